"""What the Megatron backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from rl_core.interfaces import PolicyConfig
from rl_core.interfaces.constraints import AlsoCalled, Range, Unsupported

__all__ = ["MegatronPolicyConfig"]

Size = Annotated[int, Range(ge=1)]


_ATTENTION = Unsupported(
    why="rl-megatron always uses torch's fused attention, which chooses the fastest kernel",
    fix="remove 'use_flash_attention'",
)


class MegatronPolicyConfig(PolicyConfig):
    """Configuration of :class:`rl_megatron.policy.MegatronPolicy`.

    The number of ranks is the cluster's; what the sizes below leave of it is data-parallel.

    Attributes:
        tensor_model_parallel_size: Ranks that share every layer. Default 1.
        pipeline_model_parallel_size: Stages that the layers are divided into. Default 1.
        context_parallel_size: Ranks that share a sequence; larger values are not implemented.
            Default 1.
        expert_model_parallel_size: Data-parallel ranks that the experts are divided among.
            Default 1.
        sequence_parallel: Also split the activations between the layers' matrices over the
            tensor-parallel ranks. Default False.
        torch_dtype: Dtype of the weights. Gradients and the optimizer's weights are float32.
            Default ``"float32"``.
        trust_remote_code: Let the tokenizer run Python that comes with the checkpoint. The model's
            Python never runs. Default False.
        architecture: The architecture that has the model's layout (for example ``"llama"``), if
            the checkpoint's ``model_type`` is another one. Default: the ``model_type``.
        activation_recompute: What is recomputed in the backward pass instead of kept: ``"full"``:
            layers, ``"selective"``: attention only. Default ``"none"``.
        reference: Where the initial weights are kept when training changes the policy's:
            ``"swap"``: in a file on disk, ``"copy"``: in memory; they replace the policy's while
            the reference scores; ``"none"``: nowhere. Default ``"swap"``.
        refit_experts: Names under which a refit sends experts: ``"stacked"``: transformers' names,
            one tensor for all experts; ``"separate"``: as published, one tensor for each expert.
            Default ``"stacked"``.
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
