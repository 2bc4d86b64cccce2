"""Watches how vLLM loads a model, for what it derives from the weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rl_backends.engine.derived_weights import LoadWatch, find_watch
from rl_backends.engine.methods import call_first
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["watch_attention", "watch_loading"]

#: Attributes that are made anew after a refit (``cpu_weights``), or travel with it (``sink``).
_MADE_ANEW = {"cpu_linear", "pack_experts"}
#: What changes while weights are quantised, but not with them.
_CLOCKS = {"online_quantization_time"}
#: Of the key/value cache; `_cpu` has other devices before and after loading, where there is a GPU.
_SCALES = {f"_{which}_scale{kind}" for which in "qkv" for kind in ("", "_float", "_cpu")}


def watch_loading() -> None:
    """Wraps vLLM's loader, so that its steps are seen. To be called before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader

    initialize, process = base_loader.initialize_model, base_loader.process_weights_after_loading
    if hasattr(process, "rl_watched"):
        return

    @functools.wraps(initialize)
    def watched_initialize(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = initialize(*args, **kwargs)
        LoadWatch(model, "vLLM", _MADE_ANEW | _SCALES | _CLOCKS)
        return model

    @functools.wraps(process)
    def watched_process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        loading = find_watch(model)
        if loading is not None:
            loading.weights_loaded(model)
        process(model, *args, **kwargs)
        if loading is not None:
            loading.hooks_finished(model)

    watched_process.rl_watched = True  # type: ignore[attr-defined]
    base_loader.initialize_model = watched_initialize
    base_loader.process_weights_after_loading = watched_process


def watch_attention() -> None:
    """Has attention on the CPU refuse keys of more tokens than its queries have.

    vLLM runs some models by the code of transformers. If that repeats keys for groups of queries
    itself, vLLM takes the repeated heads for the keys of other tokens. To be called before a model
    is loaded: the first row that the engine computes, while it starts, shows it.
    """
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or hasattr(Attention.forward, "__wrapped__"):
        return

    def check_tokens(self: Any, query: Any, key: Any, *args: Any, **kwargs: Any) -> None:
        if key is not None:
            tokens = query.numel() // (self.num_heads * self.head_size)
            heads = key.numel() // (tokens * self.head_size) if tokens else self.num_kv_heads
            if heads != self.num_kv_heads:
                raise CapabilityError(
                    f"the attention {self.layer_name} gets keys of {heads} heads, and vLLM "
                    f"computes with {self.num_kv_heads}, as the configuration has it",
                    fix="use another model, or a release of vLLM that has this model itself",
                    capability="refit",
                )

    call_first(Attention, "forward", check_tokens)
