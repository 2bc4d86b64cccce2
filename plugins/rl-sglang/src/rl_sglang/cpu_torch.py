"""Has SGLang's models compute with torch on a CPU where they would launch kernels of Triton.

SGLang has torch code for most of these operations, but the model or the attention backend does not
choose it. Imported in a scheduler, and only where no GPU exists.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
from sglang.srt.models import afmoe, qwen2_moe
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
)

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["choose_torch", "ignore_pinning"]


def choose_torch() -> None:
    """Replaces what has no torch code; before a model computes.

    Attention over latents has no entry for torch's backend and takes that of Triton, which makes
    keys and values of another size than the cache has.
    """
    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)
    afmoe.fused_moe = run_experts
    qwen2_moe.fused_gate_sigmoid_mul_add = add_gated


def ignore_pinning() -> None:
    """Has this process make tensors in ordinary memory where SGLang's adapters want pinned memory.

    Without a GPU torch has none, and raises.
    """

    def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            del pin_memory
            return make(*args, **kwargs)

        return made

    module: Any = torch
    module.tensor, module.zeros = unpinned(torch.tensor), unpinned(torch.zeros)
    module.Tensor.pin_memory = lambda tensor, *_: tensor


def run_experts(
    hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, topk_output: Any, **how: Any
) -> torch.Tensor:
    """Experts one after the other, as SGLang's layer for experts runs them without Triton."""
    config = how["moe_runner_config"]
    experts = SimpleNamespace(num_experts=len(w1), w13_weight=w1, w2_weight=w2)
    found: torch.Tensor = moe_forward_native(experts, hidden_states, topk_output, config)
    return found * (config.routed_scaling_factor or 1.0)


def add_gated(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds what the shared experts made, as far as their gate lets it."""
    gate = torch.sigmoid(hidden_states @ gate_weight)
    final_hidden_states += gate[:, None] * shared_output
