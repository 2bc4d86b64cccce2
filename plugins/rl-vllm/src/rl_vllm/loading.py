"""Watches how vLLM loads a model, for what it derives from the weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rl_backends.engine.derived_weights import LoadWatch, find_watch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["watch_loading"]

#: Attributes that are made anew after a refit (``cpu_weights``), or travel with it (``sink``).
_MADE_ANEW = {"cpu_linear", "pack_experts"}
#: What changes while weights are quantised, but not with them.
_CLOCKS = {"online_quantization_time"}
_SCALES = {f"_{which}_scale{kind}" for which in "qkv" for kind in ("", "_float")}


def watch_loading() -> None:
    """Wraps vLLM's loader, so that its steps are seen. To be called before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader

    initialize, process = base_loader.initialize_model, base_loader.process_weights_after_loading
    if hasattr(process, "__wrapped__") and hasattr(process, "rl_watched"):
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
