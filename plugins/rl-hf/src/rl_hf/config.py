"""What the Hugging Face backends are configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from rl_core.interfaces import GenerationConfig, PolicyConfig
from rl_core.interfaces.constraints import AlsoCalled, Range

__all__ = [
    "DTensorConfig",
    "HuggingFaceGenerationConfig",
    "HuggingFaceModelConfig",
    "HuggingFacePolicyConfig",
    "LoraConfig",
]


class HuggingFaceModelConfig(TypedDict):
    """How a checkpoint is loaded.

    Attributes:
        torch_dtype: Dtype of the weights; ``"auto"`` keeps the checkpoint's. Default: ``"auto"``
            for generation, ``"float32"`` for training.
        device: ``"cpu"``, ``"cuda"`` or ``"cuda:N"``. Default: CUDA if available.
        device_map: Placement over several devices, as transformers takes it; needs accelerate.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
        load_in_8bit: Quantise the weights to 8 bits; generation on CUDA only. Default False.
        load_in_4bit: Quantise the weights to 4 bits; generation on CUDA only. Default False.
        attn_implementation: Attention kernel, by its name in transformers. Default: torch's fused
            kernel if it computes what the model's own does, otherwise the model's own.
    """

    torch_dtype: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16", "auto"],
            AlsoCalled("dtype precision model_dtype"),
            AlsoCalled("bf16", "bfloat16"),
            AlsoCalled("fp16", "float16"),
        ]
    ]
    device: NotRequired[str | None]
    device_map: NotRequired[str | dict[str, Any] | None]
    trust_remote_code: NotRequired[bool]
    load_in_8bit: NotRequired[bool]
    load_in_4bit: NotRequired[bool]
    attn_implementation: NotRequired[
        Annotated[
            str | None,
            AlsoCalled("use_flash_attention use_flash_attention_2", "flash_attention_2"),
        ]
    ]


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
        dropout: Dropout of the adapter's input. Default 0.
        target_modules: Names of the modules that get an adapter; ``"all-linear"`` for every linear
            layer except the output. Default: peft's choice for the architecture.
        refit: What a refit sends: ``"merged"``: the full weights, with the adapters added;
            ``"adapter"``: only the adapters, for an engine with the same ``r`` and
            ``target_modules`` in its own ``lora``. Default ``"merged"``.
    """

    r: Annotated[int, Range(ge=1), AlsoCalled("lora_r rank lora_rank dim")]
    alpha: Annotated[float, Range(gt=0), AlsoCalled("lora_alpha")]
    dropout: Annotated[float, Range(ge=0, lt=1), AlsoCalled("lora_dropout")]
    target_modules: str | list[str]
    refit: Literal["merged", "adapter"]


class DTensorConfig(TypedDict, total=False):
    """A model that is sharded over the ranks of a policy, by torch's FSDP2.

    Attributes:
        enabled: Each data-parallel rank keeps a shard of every parameter, gradient and optimizer
            state, and has a layer whole only while it computes. Adapters (``lora``) are whole on
            each rank. False: each rank has the whole model. Without effect on one rank. Default
            False.
    """

    enabled: bool


class HuggingFacePolicyConfig(PolicyConfig, HuggingFaceModelConfig):
    """Configuration of :class:`rl_hf.policy.HuggingFacePolicy`.

    Attributes:
        gradient_checkpointing: Recompute activations in the backward pass. Default False.
        dtensor_cfg: See :class:`DTensorConfig`.
        lora: See :class:`LoraConfig`.
        reference: Where the initial weights are kept when training changes the policy's:
            ``"swap"``: in a file on disk, swapped in while the reference scores; ``"copy"``: as a
            second model; ``"none"``: nowhere. With ``lora`` they are the base weights, and this key
            is not used. Default ``"swap"``.
        generation: Sampling keys of a :class:`HuggingFaceGenerationConfig`, for
            ``policy.generate``.
        resume_from: Checkpoint to continue from.
    """

    gradient_checkpointing: NotRequired[
        Annotated[bool, AlsoCalled("activation_checkpointing enable_gradient_checkpointing")]
    ]
    dtensor_cfg: NotRequired[
        Annotated[
            DTensorConfig | None,
            AlsoCalled("fsdp fsdp_config fsdp2", "{enabled: True}"),
        ]
    ]
    lora: NotRequired[Annotated[LoraConfig | None, AlsoCalled("peft_config lora_cfg")]]
    reference: NotRequired[Literal["copy", "swap", "none"]]
    generation: NotRequired[dict[str, Any]]
    resume_from: NotRequired[Annotated[str | None, AlsoCalled("resume_from_checkpoint")]]
