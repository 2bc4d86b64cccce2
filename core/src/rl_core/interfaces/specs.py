"""What crosses an interface, as TypedDicts: configurations and batches.

Shapes: ``B`` rows, ``S`` padded width of the input, ``W`` padded width of the output, ``K`` top-k.
Tensors that cross an interface live on the CPU. This module imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, TypedDict

from rl_core.interfaces.constraints import AlsoCalled, Range, Unsupported

if TYPE_CHECKING:
    import torch

__all__ = [
    "ColocationConfig",
    "DynamicBatchingConfig",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationOutputSpec",
    "LogprobOutputSpec",
    "LogprobsSpec",
    "OptimizerConfig",
    "PolicyConfig",
    "ReferenceLogprobOutputSpec",
    "ResourcesConfig",
    "SchedulerConfig",
    "ScoreOutputSpec",
    "SequencePackingConfig",
    "TopkLogitsOutputSpec",
    "TrainingDatumSpec",
]


_BY_CLUSTER = Unsupported(
    why="the cluster gives the devices: create_generation(config, RayVirtualCluster([8, 8])) of "
    "rl-ray has 8 bundles on each of two nodes",
    fix="set it to None, and pass a cluster",
)


_ALWAYS_THERE = Unsupported("every output has the log-probs of its tokens", "remove 'logprobs'")
_BY_LOSS = Unsupported(
    why="this is an option of the loss",
    fix="give them to the loss: policy.train(batch, GRPOLossFn(ratio_clip_min=..., "
    "ratio_clip_max=..., reference_policy_kl_penalty=...))",
)
_OF_LOSSES = AlsoCalled("beta epsilon clip_eps clip_ratio kl_coef")
_NOT_COLD = "leave 'temperature' out, and set 'do_sample' to False or generate with greedy=True"
_MOST_TOKENS = AlsoCalled("max_tokens max_completion_length response_length")
_SAMPLES = AlsoCalled("n num_samples num_generations_per_prompt num_return_sequences")
_PER_PASS = AlsoCalled("per_device_train_batch_size micro_batch_size ppo_micro_batch_size_per_gpu")
_SCORED = AlsoCalled("log_prob_micro_batch_size_per_gpu")
_PASSES = AlsoCalled("gradient_accumulation_steps", "rows per pass x these steps x workers")
_PROMPTS = AlsoCalled("ppo_mini_batch_size", "prompts x completions of each")


class ResourcesConfig(TypedDict, total=False):
    """Hardware of an engine, as other libraries configure it: only None, the cluster defines it."""

    gpus_per_node: Annotated[int | None, _BY_CLUSTER]
    num_nodes: Annotated[int | None, _BY_CLUSTER]


class ColocationConfig(TypedDict):
    """Whether trainer and engine share devices.

    Attributes:
        enabled: True if both take turns on the same devices: ``finish_generation`` frees the
            engine's memory. False if the engine has separate devices: it keeps its memory and
            continues to serve, unless ``finish_generation`` names what to free.
        resources: None, or see :class:`ResourcesConfig`.
    """

    enabled: bool
    resources: NotRequired[ResourcesConfig | None]


# The nested spelling, ``ColocationConfig.ResourcesConfig``, names the same class.
ColocationConfig.ResourcesConfig = ResourcesConfig  # type: ignore[attr-defined]


class GenerationConfig(TypedDict):
    """How a generation backend samples. Backends extend it with further keys.

    Attributes:
        backend: Name of the backend, as ``rl backends list`` shows it, or ``dist:name``.
        model_name: Directory (or hub name) of a checkpoint in Hugging Face layout.
        max_new_tokens: Upper bound on generated tokens per row. Default 128.
        temperature: Divides the logits before sampling. Default 1.0.
        top_p: Probability mass of nucleus sampling; 1 is off. Default 1.0.
        top_k: Number of candidates; None, -1 and 0 are off. Default None.
        stop_token_ids: Token ids that end a row; the token is kept.
        stop_strings: Strings that end a row, in addition to those in the row.
        pad_token_id: Fills the output on the right. Default: the tokenizer's.
        eos_token_id: Another stop token, or several. Default: the model's.
        do_sample: False makes every call greedy. Default True.
        repetition_penalty: Divides (if negative, multiplies) the logits of seen tokens. Default 1.
        seed: Makes sampling reproducible: the i-th row requested from a new engine draws from
            the i-th stream of it, however rows are divided into calls. Default: new random seeds.
        logprobs_mode: ``"processed"``: log-probs of the distribution that is sampled from;
            ``"raw"``: log-softmax of the logits. Default ``"processed"``.
        max_model_len: Upper bound on prompt plus generated tokens. Default: the model's.
        num_generations: Completions per prompt, laid out as ``repeat_interleave``. Default 1.
        call_deadline_s: Seconds that one call of ``generate`` may take, the wait for its turn
            included; then its rows are cancelled. Default: no limit.
        colocated: See :class:`ColocationConfig`. Default: enabled.
    """

    backend: str
    model_name: Annotated[str, AlsoCalled("model model_path model_name_or_path")]
    max_new_tokens: NotRequired[Annotated[int, Range(ge=1), _MOST_TOKENS]]
    temperature: NotRequired[Annotated[float, Range(gt=0, fix=_NOT_COLD)]]
    top_p: NotRequired[Annotated[float, Range(gt=0, le=1)]]
    top_k: NotRequired[Annotated[int | None, Range(ge=-1)]]
    stop_token_ids: NotRequired[list[int] | None]
    stop_strings: NotRequired[Annotated[list[str] | None, AlsoCalled("stop")]]
    pad_token_id: NotRequired[int | None]
    eos_token_id: NotRequired[int | list[int] | None]
    do_sample: NotRequired[Annotated[bool, AlsoCalled("greedy", "the opposite of greedy")]]
    repetition_penalty: NotRequired[Annotated[float, Range(gt=0)]]
    seed: NotRequired[Annotated[int | None, Range(ge=0)]]
    logprobs_mode: NotRequired[Literal["processed", "raw"]]
    logprobs: NotRequired[Annotated[Any, _ALWAYS_THERE]]
    max_model_len: NotRequired[Annotated[int | None, Range(ge=1), AlsoCalled("max_length")]]
    num_generations: NotRequired[Annotated[int, Range(ge=1), _SAMPLES]]
    call_deadline_s: NotRequired[Annotated[float | None, Range(gt=0)]]
    colocated: NotRequired[ColocationConfig | None]


class OptimizerConfig(TypedDict, total=False):
    """AdamW.

    Attributes:
        name: Only ``"adamw"``. Default ``"adamw"``.
        lr: Learning rate. Default 1e-5.
        betas: Decay rates of the two moments. Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled weight decay; biases and norms have none. Default 0.01.
    """

    name: Annotated[Literal["adamw"], AlsoCalled("optim")]
    lr: Annotated[float, Range(ge=0), AlsoCalled("learning_rate")]
    betas: Annotated[tuple[float, float], AlsoCalled("adam_beta1 adam_beta2", "[beta1, beta2]")]
    eps: Annotated[float, Range(gt=0), AlsoCalled("adam_epsilon")]
    weight_decay: Annotated[float, Range(ge=0)]


class SchedulerConfig(TypedDict, total=False):
    """Learning rate over optimizer steps: a linear warm-up, then the named shape.

    Attributes:
        name: Shape after the warm-up. Default ``"constant"``.
        warmup_steps: Steps over which the rate rises linearly; the last of them has the full
            rate. Default 0.
        total_steps: Steps after which ``linear`` and ``cosine`` reach their minimum.
        min_lr_ratio: The minimum as a fraction of the full rate. Default 0.
    """

    name: Annotated[Literal["constant", "linear", "cosine"], AlsoCalled("lr_scheduler_type")]
    warmup_steps: Annotated[int, Range(ge=0), AlsoCalled("warmup_ratio", "ratio x all steps")]
    total_steps: Annotated[int, Range(ge=1), AlsoCalled("max_steps total_training_steps")]
    min_lr_ratio: Annotated[float, Range(ge=0, le=1)]


class DynamicBatchingConfig(TypedDict, total=False):
    """Microbatches of rows of similar length, bounded by tokens.

    Attributes:
        enabled: Whether microbatches are bounded by tokens, not by rows. Default False.
        train_mb_tokens: Padded tokens per microbatch of a training step. Default: 4096, or those
            of the longest row (or group) if that is more.
        logprob_mb_tokens: The same for scoring. Default: ``train_mb_tokens``.
        sequence_length_round: Widths are rounded up to a multiple of it. Default 64.
    """

    enabled: bool
    train_mb_tokens: Annotated[int, Range(ge=1)]
    logprob_mb_tokens: Annotated[int, Range(ge=1)]
    sequence_length_round: Annotated[int, Range(ge=1)]


class SequencePackingConfig(TypedDict, total=False):
    """Several rows in one sequence, without padding between them.

    Attributes:
        enabled: Whether rows are packed. Default: False, with ``hf`` chosen for each microbatch.
        train_mb_tokens: Tokens per packed sequence of a training step. Default: as many as
            ``train_micro_batch_size`` rows have if that is set; if not, 4096, or those of the
            longest row (or group) if that is more.
        logprob_mb_tokens: The same for scoring. Default: ``train_mb_tokens``.
        algorithm: How rows are assigned to sequences. Default
            ``"modified_first_fit_decreasing"``.
        sequence_length_pad_multiple: Each row's length is rounded up to a multiple of it.
            Default 1.
    """

    enabled: bool
    train_mb_tokens: Annotated[int, Range(ge=1)]
    logprob_mb_tokens: Annotated[int, Range(ge=1)]
    algorithm: Literal[
        "first_fit_decreasing",
        "modified_first_fit_decreasing",
        "first_fit_shuffle",
        "concatenative",
    ]
    sequence_length_pad_multiple: Annotated[int, Range(ge=1)]


class PolicyConfig(TypedDict):
    """What every policy backend understands. Backends extend it with further keys.

    Attributes:
        backend: Name of the backend, as ``rl backends list`` shows it, or ``dist:name``.
        model_name: Directory (or hub name) of a checkpoint in Hugging Face layout.
        train_global_batch_size: Rows per optimizer step. Default: all rows of the call.
        temperature: Divides the logits in training and scoring. Default 1.0.
        train_micro_batch_size: Rows per forward and backward pass. Default 8; with packing, as many
            as its tokens allow.
        logprob_batch_size: Rows per scoring pass. Default: ``train_micro_batch_size``.
        max_grad_norm: Gradients are scaled down to this norm; None is off. Default 1.0.
        non_finite: What happens if loss or gradient is NaN or infinite: ``"raise"``, or ``"skip"``
            the step. Default ``"raise"``.
        optimizer: See :class:`OptimizerConfig`.
        scheduler: See :class:`SchedulerConfig`.
        dynamic_batching: See :class:`DynamicBatchingConfig`.
        sequence_packing: See :class:`SequencePackingConfig`.
        seed: Seed of dropout and of new adapters. Default 0.
    """

    backend: str
    model_name: Annotated[str, AlsoCalled("model model_path model_name_or_path")]
    train_global_batch_size: NotRequired[Annotated[int | None, Range(ge=1), _PASSES, _PROMPTS]]
    temperature: NotRequired[Annotated[float, Range(gt=0)]]
    train_micro_batch_size: NotRequired[Annotated[int, Range(ge=1), _PER_PASS]]
    logprob_batch_size: NotRequired[Annotated[int | None, Range(ge=1), _SCORED]]
    max_grad_norm: NotRequired[
        Annotated[float | None, Range(gt=0), AlsoCalled("grad_clip gradient_clip")]
    ]
    non_finite: NotRequired[Literal["raise", "skip"]]
    optimizer: NotRequired[OptimizerConfig]
    scheduler: NotRequired[SchedulerConfig]
    dynamic_batching: NotRequired[DynamicBatchingConfig]
    sequence_packing: NotRequired[SequencePackingConfig]
    seed: NotRequired[Annotated[int, Range(ge=0)]]
    loss: NotRequired[Annotated[Any, _BY_LOSS, _OF_LOSSES]]


class GenerationDatumSpec(TypedDict):
    """Prompts, right-padded.

    Attributes:
        input_ids: ``[B, S]`` int64 token ids.
        input_lengths: ``[B]`` int64 number of real tokens of each row, at least 1.
        attention_mask: ``[B, S]`` accepted in place of ``input_lengths`` when right-padded.
        stop_strings: One list (or None) for each row.
        __extra__: Any further batch-first key; it is carried through to the output.
    """

    input_ids: torch.Tensor
    input_lengths: NotRequired[torch.Tensor]
    attention_mask: NotRequired[torch.Tensor]
    stop_strings: NotRequired[list[list[str] | None] | None]
    __extra__: Any


class GenerationOutputSpec(TypedDict):
    """Prompts with their completions, right-padded.

    Attributes:
        output_ids: ``[B, W]`` int64: the prompt unchanged, then the generated tokens.
        generation_lengths: ``[B]`` int64 number of generated tokens.
        unpadded_sequence_lengths: ``[B]`` int64, input plus generation; ``W`` is its maximum.
        logprobs: ``[B, W]`` float32: of the generated tokens; 0 on prompt and padding.
        truncated: ``[B]`` bool: ended by length, not by a stop token or string.
        weights_version: ``[B]`` int64 version of the weights that produced the row.
        weights_origin: ``[B]`` int64: the trainer of that version; 0 for the initial weights.
        __extra__: The input's further keys, row for row.
    """

    output_ids: torch.Tensor
    generation_lengths: torch.Tensor
    unpadded_sequence_lengths: torch.Tensor
    logprobs: torch.Tensor
    truncated: torch.Tensor
    weights_version: torch.Tensor
    weights_origin: torch.Tensor
    __extra__: Any


class TrainingDatumSpec(TypedDict):
    """Sequences to learn from, right-padded.

    Attributes:
        input_ids: ``[B, S]`` int64 token ids.
        input_lengths: ``[B]`` int64 number of real tokens.
        token_mask: ``[B, S]`` 1 where the token counts in the loss; position 0 never does. Of
            rollouts, generated tokens alone: :func:`rl_losses.training_batch` makes it.
        sample_mask: ``[B]`` 0 takes a whole row out of the loss.
        __extra__: What the loss function needs besides, batch first.
    """

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    token_mask: torch.Tensor
    sample_mask: torch.Tensor
    __extra__: Any


class LogprobOutputSpec(TypedDict):
    """``logprobs`` ``[B, S]`` float32; entry t scores token t, entry 0 and padding are 0."""

    logprobs: torch.Tensor


#: The older name of :class:`LogprobOutputSpec`.
LogprobsSpec = LogprobOutputSpec


class ReferenceLogprobOutputSpec(TypedDict):
    """``reference_logprobs`` ``[B, S]`` float32 of the reference policy, as ``logprobs``."""

    reference_logprobs: torch.Tensor


class ScoreOutputSpec(TypedDict):
    """``scores`` ``[B]`` float32, one of each whole row."""

    scores: torch.Tensor


class TopkLogitsOutputSpec(TypedDict):
    """The K largest logits of every position that predicts a token.

    Attributes:
        topk_logits: ``[B, S-1, K]`` float32, sorted descending; position t predicts token t+1.
        topk_indices: ``[B, S-1, K]`` int64 vocabulary indices.
    """

    topk_logits: torch.Tensor
    topk_indices: torch.Tensor
