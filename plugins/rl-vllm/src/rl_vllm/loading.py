"""Watches how vLLM loads a model, for what it derives from the weights."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

from rl_backends.engine.derived_weights import LoadWatch
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["WITHOUT_REFITS", "check_derived", "watch_loading"]

#: Attributes that are made anew after a refit (``cpu_weights``), or travel with it (``sink``).
_MADE_ANEW = {"cpu_linear"}
_SCALES = {f"_{which}_scale{kind}" for which in "qkv" for kind in ("", "_float")}
#: How to build an engine that takes no refits.
WITHOUT_REFITS = "set vllm_cfg.refit to False"

_watched: weakref.WeakKeyDictionary[nn.Module, LoadWatch] = weakref.WeakKeyDictionary()


def watch_loading() -> None:
    """Wraps vLLM's loader, so that its steps are seen. To be called before a model is loaded."""
    from vllm.model_executor.model_loader import base_loader

    initialize, process = base_loader.initialize_model, base_loader.process_weights_after_loading
    if hasattr(process, "__wrapped__") and hasattr(process, "rl_watched"):
        return

    @functools.wraps(initialize)
    def watched_initialize(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = initialize(*args, **kwargs)
        _watched[model] = LoadWatch(model, "vLLM", _MADE_ANEW | _SCALES)
        return model

    @functools.wraps(process)
    def watched_process(model: nn.Module, *args: Any, **kwargs: Any) -> None:
        loading = _watched.get(model)
        if loading is not None:
            loading.weights_loaded(model)
        process(model, *args, **kwargs)
        if loading is not None:
            loading.hooks_finished(model)

    watched_process.rl_watched = True  # type: ignore[attr-defined]
    base_loader.initialize_model = watched_initialize
    base_loader.process_weights_after_loading = watched_process


def check_derived(model: nn.Module) -> None:
    """Makes sure that vLLM computes with what its loader wrote, where it wrote it.

    Raises:
        CapabilityError: It does not, or its loading was not watched.
    """
    loading = _watched.get(model)
    if loading is None:
        raise CapabilityError(
            f"nobody saw how vLLM loaded its {type(model).__name__}, so that what it made of the "
            "weights is not known",
            fix="report it to rl-vllm, with the name of the model; without refits "
            f"{WITHOUT_REFITS}",
            capability="refit",
        )
    loading.check(
        model,
        fix="use a model without such layers; on CUDA, experts that run in Triton "
        '(vllm_cfg.engine_args["moe_backend"]="triton") are left as they are; '
        f"without refits {WITHOUT_REFITS}",
    )
