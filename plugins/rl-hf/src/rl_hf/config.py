"""What the Hugging Face backends are configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from rl_core.interfaces import GenerationConfig, PolicyConfig
from rl_core.interfaces.constraints import Range

__all__ = [
    "DynamicBatchingConfig",
    "HuggingFaceGenerationConfig",
    "HuggingFaceModelConfig",
    "HuggingFacePolicyConfig",
    "LoraConfig",
    "OptimizerConfig",
    "SchedulerConfig",
    "SequencePackingConfig",
]


class HuggingFaceModelConfig(TypedDict):
    """How a checkpoint is loaded.

    Attributes:
        torch_dtype: Dtype of the weights; ``"auto"`` keeps the checkpoint's. Default: ``"auto"``
            for generation, ``"float32"`` for training.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. Default: CUDA if there is any.
        device_map: Placement over several devices, as transformers takes it; needs accelerate.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
        load_in_8bit: Quantise the weights to 8 bits; generation on CUDA only.
        load_in_4bit: Quantise the weights to 4 bits; generation on CUDA only.
        attn_implementation: Attention kernel, as transformers names it. Default: its choice.
    """

    torch_dtype: NotRequired[Literal["float32", "bfloat16", "float16", "auto"]]
    device: NotRequired[str | None]
    device_map: NotRequired[str | dict[str, Any] | None]
    trust_remote_code: NotRequired[bool]
    load_in_8bit: NotRequired[bool]
    load_in_4bit: NotRequired[bool]
    attn_implementation: NotRequired[str | None]


class HuggingFaceGenerationConfig(GenerationConfig, HuggingFaceModelConfig):
    """Configuration of :class:`rl_hf.generation.HuggingFaceGeneration`.

    Attributes:
        max_batch_size: Rows decoded together; further rows take the place of finished ones.
            Default 256. It bounds the memory of the KV cache and changes no result.
    """

    max_batch_size: NotRequired[Annotated[int, Range(ge=1)]]


class OptimizerConfig(TypedDict, total=False):
    """AdamW.

    Attributes:
        name: Only ``"adamw"``.
        lr: Learning rate. Default 1e-5.
        betas: Decay rates of the two moments. Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled; biases and norms have none. Default 0.01.
    """

    name: Literal["adamw"]
    lr: Annotated[float, Range(ge=0)]
    betas: tuple[float, float]
    eps: Annotated[float, Range(gt=0)]
    weight_decay: Annotated[float, Range(ge=0)]


class SchedulerConfig(TypedDict, total=False):
    """Learning rate over optimizer steps: a linear warm-up, then the named shape.

    Attributes:
        name: Shape after the warm-up. Default ``"constant"``.
        warmup_steps: Steps from 0 to the full rate. Default 0.
        total_steps: Step at which ``linear`` and ``cosine`` reach their minimum.
        min_lr_ratio: That minimum as a fraction of the full rate. Default 0.
    """

    name: Literal["constant", "linear", "cosine"]
    warmup_steps: Annotated[int, Range(ge=0)]
    total_steps: Annotated[int, Range(ge=1)]
    min_lr_ratio: Annotated[float, Range(ge=0, le=1)]


class DynamicBatchingConfig(TypedDict, total=False):
    """Microbatches of rows of similar length, bounded by tokens.

    Attributes:
        enabled: Default False.
        train_mb_tokens: Padded tokens per microbatch of a training step.
        logprob_mb_tokens: The same for scoring; default ``train_mb_tokens``.
        sequence_length_round: Widths are rounded up to a multiple of it. Default 64.
    """

    enabled: bool
    train_mb_tokens: Annotated[int, Range(ge=1)]
    logprob_mb_tokens: Annotated[int, Range(ge=1)]
    sequence_length_round: Annotated[int, Range(ge=1)]


class SequencePackingConfig(TypedDict, total=False):
    """Several rows in one sequence, without padding between them.

    Attributes:
        enabled: Default False.
        train_mb_tokens: Tokens per packed sequence of a training step.
        logprob_mb_tokens: The same for scoring; default ``train_mb_tokens``.
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


class LoraConfig(TypedDict, total=False):
    """Low-rank adapters, trained instead of the weights; needs peft.

    Attributes:
        r: Rank. Default 16.
        alpha: Scale; the update is multiplied by ``alpha / r``. Default 32.
        dropout: On the adapter's input. Default 0.
        target_modules: Names of the modules that get one; ``"all-linear"`` for every linear layer
            but the output. Default: peft's choice for the architecture.
        refit: What a refit sends; ``"merged"``: the full weights with the adapters added in.
    """

    r: Annotated[int, Range(ge=1)]
    alpha: Annotated[float, Range(gt=0)]
    dropout: Annotated[float, Range(ge=0, lt=1)]
    target_modules: str | list[str]
    refit: Literal["merged"]


class HuggingFacePolicyConfig(PolicyConfig, HuggingFaceModelConfig):
    """Configuration of :class:`rl_hf.policy.HuggingFacePolicy`.

    Attributes:
        temperature: Divides the logits in training and scoring. Default 1.0.
        train_micro_batch_size: Rows per forward and backward pass. Default 8.
        logprob_batch_size: Rows per scoring pass. Default: ``train_micro_batch_size``.
        max_grad_norm: Gradients are scaled down to this norm; None is off. Default 1.0.
        optimizer: See :class:`OptimizerConfig`.
        scheduler: See :class:`SchedulerConfig`.
        gradient_checkpointing: Recompute activations in the backward pass. Default False.
        dynamic_batching: See :class:`DynamicBatchingConfig`.
        sequence_packing: See :class:`SequencePackingConfig`.
        lora: See :class:`LoraConfig`.
        reference: Where the reference policy lives: ``"copy"`` beside the policy, ``"swap"`` in
            host memory and swapped in when asked for, ``"none"``. Default ``"copy"``.
        seed: Of dropout and adapters. Default 0.
        non_finite: What a NaN or infinite loss or gradient does. Default ``"raise"``.
        generation: Sampling keys of a :class:`HuggingFaceGenerationConfig`, for
            ``policy.generate``.
        resume_from: Checkpoint to continue from.
    """

    temperature: NotRequired[Annotated[float, Range(gt=0)]]
    train_micro_batch_size: NotRequired[Annotated[int, Range(ge=1)]]
    logprob_batch_size: NotRequired[Annotated[int | None, Range(ge=1)]]
    max_grad_norm: NotRequired[Annotated[float | None, Range(gt=0)]]
    optimizer: NotRequired[OptimizerConfig]
    scheduler: NotRequired[SchedulerConfig]
    gradient_checkpointing: NotRequired[bool]
    dynamic_batching: NotRequired[DynamicBatchingConfig]
    sequence_packing: NotRequired[SequencePackingConfig]
    lora: NotRequired[LoraConfig | None]
    reference: NotRequired[Literal["copy", "swap", "none"]]
    seed: NotRequired[int]
    non_finite: NotRequired[Literal["raise", "skip"]]
    generation: NotRequired[dict[str, Any]]
    resume_from: NotRequired[str | None]
