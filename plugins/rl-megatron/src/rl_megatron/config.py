"""What the Megatron backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from rl_core.interfaces import PolicyConfig
from rl_core.interfaces.constraints import AlsoCalled, Range, Unsupported

__all__ = ["MegatronPolicyConfig"]

Size = Annotated[int, Range(ge=1)]


_ATTENTION = Unsupported(
    why="attention is always torch's fused kernel, which takes what is fastest on the device",
    fix="remove 'use_flash_attention'",
)


class MegatronPolicyConfig(PolicyConfig):
    """Configuration of :class:`rl_megatron.policy.MegatronPolicy`.

    The number of ranks is the cluster's; what the sizes below leave of it is data-parallel.

    Attributes:
        tensor_model_parallel_size: Ranks that share every layer. Default 1.
        pipeline_model_parallel_size: Stages that the layers are dealt to. Default 1.
        context_parallel_size: Ranks that share a sequence. Default 1; more is not implemented.
        expert_model_parallel_size: Ranks that the experts are dealt to; taken of the data-parallel
            ones. Default 1.
        sequence_parallel: Split activations between the layers' matrices over the tensor-parallel
            ranks, too. Default False.
        torch_dtype: Dtype of the weights. Gradients and the optimizer's weights are float32.
            Default ``"float32"``.
        trust_remote_code: Let a tokenizer run Python that comes with the checkpoint. The model
            never does. Default False.
        architecture: The model's layout (for example ``"llama"``), where the ``model_type`` of
            its checkpoint names none that is known here.
        activation_recompute: What is computed again in the backward pass instead of kept:
            ``"full"`` layers, ``"selective"``: attention alone. Default ``"none"``.
        reference: Where the weights of the start are kept once training changes the policy's:
            ``"swap"`` in a file on disk, ``"copy"`` as tensors beside, both of which take the place
            of the policy's while the reference scores; ``"none"`` nowhere. Default ``"swap"``.
        refit_experts: Under which names a refit sends experts: ``"stacked"`` as transformers has
            them, one tensor of all; ``"separate"`` as checkpoints are published. Default
            ``"stacked"``.
        generation: Sampling keys of a :class:`~rl_core.interfaces.GenerationConfig`, for
            ``policy.generate``, and ``max_batch_size``.
        rank_timeout_s: Longest wait for another rank, once all have started. Default 600.
        resume_from: Checkpoint to continue from.
    """

    tensor_model_parallel_size: NotRequired[
        Annotated[int, Range(ge=1), AlsoCalled("tensor_parallel_size tp_size tp")]
    ]
    pipeline_model_parallel_size: NotRequired[
        Annotated[int, Range(ge=1), AlsoCalled("pipeline_parallel_size pp_size pp")]
    ]
    context_parallel_size: NotRequired[Size]
    expert_model_parallel_size: NotRequired[
        Annotated[int, Range(ge=1), AlsoCalled("expert_parallel_size ep_size ep")]
    ]
    sequence_parallel: NotRequired[bool]
    use_flash_attention: NotRequired[Annotated[bool | None, _ATTENTION]]
    torch_dtype: NotRequired[
        Annotated[
            Literal["float32", "bfloat16"],
            AlsoCalled("dtype precision"),
            AlsoCalled("bf16", "bfloat16"),
        ]
    ]
    trust_remote_code: NotRequired[bool]
    architecture: NotRequired[str | None]
    activation_recompute: NotRequired[
        Annotated[
            Literal["none", "selective", "full"],
            AlsoCalled("recompute_granularity"),
            AlsoCalled("gradient_checkpointing activation_checkpointing", "full"),
        ]
    ]
    reference: NotRequired[Literal["copy", "swap", "none"]]
    refit_experts: NotRequired[Literal["stacked", "separate"]]
    generation: NotRequired[dict[str, Any]]
    rank_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    resume_from: NotRequired[Annotated[str | None, AlsoCalled("resume_from_checkpoint")]]
