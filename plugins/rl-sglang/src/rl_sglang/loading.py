"""Watches how SGLang loads a model, for what it derives from the weights."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from rl_backends.engine.derived_weights import LoadWatch, find_watch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

__all__ = ["watch_loading"]

#: Scales that travel with a refit, and what is made of weights again after one (``ModelSink``).
_MADE_ANEW = {"k_scale", "v_scale", "k_scale_float", "v_scale_float", "gemma_weight"}


def watch_loading() -> None:
    """Wraps SGLang's loaders, so that their steps are seen; before a model is loaded."""
    from sglang.srt.model_loader import loader

    make, fill = loader._initialize_model, loader.initialize_dummy_weights
    load_weights = loader.DefaultModelLoader.load_weights_only

    @functools.wraps(make)
    def watched_make(*args: Any, **kwargs: Any) -> nn.Module:
        model: nn.Module = make(*args, **kwargs)
        LoadWatch(model, "SGLang", _MADE_ANEW)
        return model

    def noted(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def watched_load(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
            found = load(model, *args, **kwargs)
            if (watch := find_watch(model)) is not None:
                watch.weights_loaded(model)
            return found

        return watched_load

    def finished(load: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load)
        def watched_load(*args: Any, **kwargs: Any) -> nn.Module:
            model: nn.Module = load(*args, **kwargs)
            if (watch := find_watch(model)) is not None:
                watch.hooks_finished(model)
            return model

        return watched_load

    loader._initialize_model = watched_make
    loader.initialize_dummy_weights = noted(fill)
    loader.DefaultModelLoader.load_weights_only = staticmethod(noted(load_weights))
    for kind in (loader.DefaultModelLoader, loader.DummyModelLoader):
        kind.load_model = finished(kind.load_model)
