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


class OptimizerConfig(TypedDict, total=False):
    """How gradients become steps.

    Attributes:
        name: ``"adamw"``, the default and only one.
        lr: Learning rate. Default 1e-5.
        betas: Decay of the two moments. Default (0.9, 0.999).
        eps: Added to the denominator. Default 1e-8.
        weight_decay: Decoupled decay of every trained tensor. Default 0.01.
    """

    name: Literal["adamw"]
    lr: Annotated[float, Range(ge=0)]
    betas: tuple[Annotated[float, Range(ge=0, lt=1)], Annotated[float, Range(ge=0, lt=1)]]
    eps: Annotated[float, Range(gt=0)]
    weight_decay: Annotated[float, Range(ge=0)]


class SchedulerConfig(TypedDict, total=False):
    """How the learning rate moves over optimizer steps.

    Attributes:
        name: ``"constant"`` (the default), ``"linear"`` or ``"cosine"``, after the warmup.
        warmup_steps: The rate climbs linearly to its full value in so many steps. Default 0.
        total_steps: Where linear and cosine reach their minimum, warmup included.
        min_lr_ratio: That minimum as a fraction of the full rate. Default 0.
    """

    name: Literal["constant", "linear", "cosine"]
    warmup_steps: Annotated[int, Range(ge=0)]
    total_steps: Annotated[int, Range(ge=1)]
    min_lr_ratio: Annotated[float, Range(ge=0, le=1)]


class DynamicBatchingConfig(TypedDict):
    """Microbatches of rows of similar length, each narrowed to its longest row.

    Attributes:
        enabled: Use it, in place of fixed micro batch sizes.
        train_mb_tokens: Bound on rows times width when training. Default 4096.
        logprob_mb_tokens: The same when scoring. Default: ``train_mb_tokens``.
        sequence_length_round: Widths are rounded up to a multiple of this. Default 1.
    """

    enabled: bool
    train_mb_tokens: NotRequired[Annotated[int, Range(ge=1)]]
    logprob_mb_tokens: NotRequired[Annotated[int, Range(ge=1)]]
    sequence_length_round: NotRequired[Annotated[int, Range(ge=1)]]


class SequencePackingConfig(TypedDict):
    """Microbatches of rows that are laid end to end and do not see one another.

    Attributes:
        enabled: Use it, in place of fixed micro batch sizes. Building the policy fails for a
            model whose architecture cannot keep packed sequences apart.
        train_mb_tokens: Bound on the tokens of a microbatch when training. Default 4096.
        logprob_mb_tokens: The same when scoring. Default: ``train_mb_tokens``.
        algorithm: Name of a packing algorithm of ``rl_core.batch``.
        sequence_length_pad_multiple: Lengths count as multiples of this. Default 1.
    """

    enabled: bool
    train_mb_tokens: NotRequired[Annotated[int, Range(ge=1)]]
    logprob_mb_tokens: NotRequired[Annotated[int, Range(ge=1)]]
    algorithm: NotRequired[str]
    sequence_length_pad_multiple: NotRequired[Annotated[int, Range(ge=1)]]


class HuggingFacePolicyConfig(PolicyConfig, HuggingFaceModelConfig):
    """Configuration of :class:`rl_hf.policy.HuggingFacePolicy`.

    Attributes:
        temperature: Divides the logits in log-probs and losses. Default 1.
        train_micro_batch_size: Rows per forward and backward pass. Default 4.
        logprob_batch_size: Rows per forward pass when scoring. Default 8.
        dynamic_batching: See :class:`DynamicBatchingConfig`.
        sequence_packing: See :class:`SequencePackingConfig`.
        optimizer: See :class:`OptimizerConfig`.
        scheduler: See :class:`SchedulerConfig`.
        max_grad_norm: Gradients are scaled down to this L2 norm; None or 0 is off. Default 1.
        gradient_checkpointing: Recompute activations in the backward pass. Default False.
        lora: See :class:`LoraConfig`.
        reference: Where the weights of the start are kept once training changes the policy's:
            ``"swap"`` in a file on disk, swapped in while the reference scores; ``"copy"`` as a
            second model beside the policy; ``"none"`` nowhere. With ``lora`` they are the base
            weights, and this key is not used. Default ``"swap"``.
        seed: Of the adapters' initial weights. Default 0.
        non_finite: What a NaN or infinite loss or gradient does. Default ``"raise"``.
        generation: Sampling keys of a :class:`HuggingFaceGenerationConfig`, for
            ``policy.generate``.
        resume_from: Checkpoint to continue from.
    """

    temperature: NotRequired[Annotated[float, Range(gt=0)]]
    train_micro_batch_size: NotRequired[Annotated[int, Range(ge=1)]]
    logprob_batch_size: NotRequired[Annotated[int, Range(ge=1)]]
    dynamic_batching: NotRequired[DynamicBatchingConfig | None]
    sequence_packing: NotRequired[SequencePackingConfig | None]
    optimizer: NotRequired[OptimizerConfig]
    scheduler: NotRequired[SchedulerConfig]
    max_grad_norm: NotRequired[Annotated[float | None, Range(ge=0)]]
    gradient_checkpointing: NotRequired[bool]
    lora: NotRequired[LoraConfig | None]
    reference: NotRequired[Literal["copy", "swap", "none"]]
    seed: NotRequired[int]
    non_finite: NotRequired[Literal["raise", "skip"]]
    generation: NotRequired[dict[str, Any]]
    resume_from: NotRequired[str | None]
