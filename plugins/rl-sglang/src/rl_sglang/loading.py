"""Watches how SGLang loads a model, for what it derives from the weights."""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch, find_watch
from rl_backends.tensors import same_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["DerivedTensors", "find_derived", "watch_loading"]

#: Scales that travel with a refit, and what is made of weights again after one (``ModelSink``).
_MADE_ANEW = {"k_scale", "v_scale", "k_scale_float", "v_scale_float", "gemma_weight"}


class DerivedTensors:
    """Tensors that a model computes of its weights, and computes again in ``post_load_weights``.

    Attention over latents multiplies with two parts of a weight, for example, which it keeps beside
    the weight in another order. SGLang's function is trusted with a tensor only if it restored that
    tensor, bit for bit, after the tensor had been set to zero.

    Args:
        model: SGLang's, loaded.
        paths: What was derived of weights, by path.

    Attributes:
        renewed: The paths of those that the function restores.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str]) -> None:
        self._compute: Callable[[], None] = model.post_load_weights  # type: ignore[assignment]
        self._tensors: dict[str, tuple[nn.Module, str, torch.Tensor]] = {}
        modules = dict(model.named_modules())
        for path in paths:
            owner, _, name = path.rpartition(".")
            held = vars(modules[owner]).get(name) if owner in modules else None
            if isinstance(held, torch.Tensor):
                self._tensors[path] = (modules[owner], name, held)
        before = {path: held.clone() for path, (*_, held) in self._tensors.items()}
        for *_, held in self._tensors.values():
            held.zero_()
        self.renew()
        for path, old in before.items():
            held = self._tensors[path][2]
            if not same_bytes(held, old):
                held.copy_(old)
                del self._tensors[path]
        self.renewed = list(self._tensors)

    @torch.no_grad()
    def renew(self) -> None:
        """Computes them of the weights as they are; in place, as CUDA graphs need it."""
        self._compute()
        for module, name, held in self._tensors.values():
            found = getattr(module, name)
            if found is not held:
                held.copy_(found)
                setattr(module, name, held)


_derived: weakref.WeakKeyDictionary[nn.Module, DerivedTensors] = weakref.WeakKeyDictionary()


def find_derived(model: nn.Module) -> DerivedTensors | None:
    """What has to be computed again after a refit of a model, if there is anything."""
    return _derived.get(model)


def watch_loading() -> None:
    """Wraps SGLang's loaders, so that their steps are seen; before a model is loaded, once."""
    from sglang.srt.model_loader import loader

    if vars(loader).setdefault("_rl_watched", False):
        return
    loader._rl_watched = True
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
                plain = not watch.rearranged  # the function was made for weights as loaded
                if watch.derived and plain and hasattr(model, "post_load_weights"):
                    _derived[model] = found = DerivedTensors(model, watch.derived)
                    watch.derived = [path for path in watch.derived if path not in found.renewed]
            return model

        return watched_load

    loader._initialize_model = watched_make
    loader.initialize_dummy_weights = noted(fill)
    loader.DefaultModelLoader.load_weights_only = staticmethod(noted(load_weights))
    for kind in (loader.DefaultModelLoader, loader.DummyModelLoader):
        kind.load_model = finished(kind.load_model)
