"""What the Megatron backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from rl_core.interfaces import PolicyConfig
from rl_core.interfaces.constraints import Range

__all__ = ["MegatronPolicyConfig"]

Size = Annotated[int, Range(ge=1)]


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

    tensor_model_parallel_size: NotRequired[Size]
    pipeline_model_parallel_size: NotRequired[Size]
    context_parallel_size: NotRequired[Size]
    expert_model_parallel_size: NotRequired[Size]
    sequence_parallel: NotRequired[bool]
    torch_dtype: NotRequired[Literal["float32", "bfloat16"]]
    trust_remote_code: NotRequired[bool]
    architecture: NotRequired[str | None]
    activation_recompute: NotRequired[Literal["none", "selective", "full"]]
    reference: NotRequired[Literal["copy", "swap", "none"]]
    refit_experts: NotRequired[Literal["stacked", "separate"]]
    generation: NotRequired[dict[str, Any]]
    rank_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    resume_from: NotRequired[str | None]
