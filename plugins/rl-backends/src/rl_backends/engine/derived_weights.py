"""Finds what an engine derives from the weights, because a refit would leave that as it was.

A refit writes parameters. A layer that computes with something else that was made of them (a copy
in another attribute, a weight that was rearranged) would silently go on with the old weights. So
all that the modules of a model hold is recorded before there are weights, and
again after the engine's hooks have run. What was there before, bit for bit, does not depend on the
weights. A view of a parameter follows it. Nor is a number derived that a dataclass has by default,
or that a dataclass has from somewhere in the model: engines hand kernels their configuration like
that, and make kernels in their hooks. All else was derived from the weights.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rl_core.errors import CapabilityError
from rl_core.weights.data.digests import BlockHash, Hasher, tensor_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["LoadWatch", "check_derived", "find_watch"]

#: Attributes of a module that are looked at one by one.
_LISTED = {"_modules", "_parameters", "_buffers"}
_ATOMS = (str, bytes, int, bool, type(None), torch.dtype, torch.device, types.ModuleType)
_FEW = 5
#: Numbers of a tensor that are compared, and how many different ones there must be: zeros and ones
#: alone are in every tensor.
_SAMPLE, _FEWEST_NUMBERS = 4096, 8


class _Setting(float):
    """A number in a field of a dataclass, other than the field's default."""


class _Number(NamedTuple):
    """The fingerprint of a number, and whether it is a :class:`_Setting`."""

    text: str
    setting: bool


class LoadWatch:
    """Watches the loading of one model, from its construction to the end of the engine's hooks.

    Make one when the model is constructed; call :meth:`weights_loaded`, :meth:`hooks_finished`, and
    then :meth:`check` before each refit.

    Args:
        model: Before it has weights.
        engine: How errors call it.
        skipped: Attributes and buffers of modules that the backend itself renews after a refit.

    Attributes:
        derived: Paths of what was derived from weights.
        rearranged: Names of parameters that hooks changed.
    """

    def __init__(self, model: nn.Module, engine: str, skipped: Collection[str] = ()) -> None:
        self._engine = engine
        self._skipped = frozenset(skipped)
        self._held = self._fingerprints(model)
        self._weights: dict[str, tuple[torch.dtype, bytes]] = {}
        self.derived: list[str] = []
        self.rearranged: list[str] = []
        self._known: set[str] = set()
        _watches[model] = self

    def weights_loaded(self, model: nn.Module) -> None:
        """Records the weights; to be called before any hook."""
        self._weights = {n: (p.dtype, _digest(p)) for n, p in _parameters(model)}

    def hooks_finished(self, model: nn.Module) -> None:
        """Compares what the hooks left with what was recorded."""
        after = dict(_parameters(model))
        for name, (dtype, digest) in self._weights.items():
            # Some kernels keep the same numbers in a wider dtype.
            if name not in after or _digest(after[name].detach().to(dtype)) != digest:
                self.rearranged.append(name)
        numbers = {found.text for found in self._held.values() if isinstance(found, _Number)}
        for path, found in self._fingerprints(model).items():
            copied = isinstance(found, _Number) and found.setting and found.text in numbers
            if self._held.get(path) != found and not copied:
                self.derived.append(path)
        self._known = {path for path, _ in _held(model, self._skipped)}

    def find_new_copies(self, model: nn.Module) -> None:
        """Finds copies of weights that layers made while they computed.

        What they keep then may also be scratch memory or a cache. A tensor is taken for a copy if
        all of a sample of its numbers are in the weights of its module.
        """
        modules = dict(model.named_modules())
        for path, value in _held(model, self._skipped):
            if path in self._known:
                continue
            self._known.add(path)
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            owner = path
            while owner not in modules:
                owner = owner.rpartition(".")[0]
            weights = [p.detach() for p in modules[owner].parameters()]
            storages = {weight.untyped_storage().data_ptr() for weight in weights}
            if not weights or value.untyped_storage().data_ptr() in storages:
                continue
            part = value.detach()
            while part.dim() > 1 and part.numel() > _SAMPLE:  # without a copy of the whole
                part = part[0]
            sample: torch.Tensor = part.flatten()[:_SAMPLE].unique()  # type: ignore[no-untyped-call]
            if sample.numel() < _FEWEST_NUMBERS:
                continue
            for weight in weights:
                sample = sample[~torch.isin(sample, weight.to(sample.dtype).flatten())]
            if not sample.numel():
                self.derived.append(path)

    def check(self, model: nn.Module, *, fix: str) -> None:
        """Makes sure that the engine computes with what its loader wrote, where it wrote it.

        Args:
            model: The same.
            fix: What to do about it.

        Raises:
            CapabilityError: Names the parameters that were rearranged after loading, and what else
                was made of weights.
        """
        self.find_new_copies(model)
        for paths, what in (
            (self.rearranged, "rearranges the weights of this model after loading"),
            (self.derived, "keeps other tensors that it computed from the weights"),
        ):
            if paths:
                more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
                raise CapabilityError(
                    f"{self._engine}'s {type(model).__name__} takes no refit: {self._engine} "
                    f"{what}, and a refit would not update them: {', '.join(paths[:_FEW])}{more}",
                    fix=fix,
                    capability="refit",
                )

    def _fingerprints(self, model: nn.Module) -> dict[str, Any]:
        """What the modules of a model hold besides parameters and views of these, by path."""
        storages = {p.untyped_storage().data_ptr() for _, p in _parameters(model) if p.numel()}
        found: dict[str, Any] = {}
        for path, value in _held(model, self._skipped):
            if isinstance(value, torch.Tensor):
                if value.is_meta or not value.numel():
                    continue
                if value.layout is torch.strided and value.untyped_storage().data_ptr() in storages:
                    continue
                found[path] = (value.dtype, tuple(value.shape), _digest(value))
            elif isinstance(value, np.ndarray):
                found[path] = (value.dtype, value.shape, value.tobytes())
            else:
                found[path] = _Number(float.__repr__(value), isinstance(value, _Setting))
        return found


_watches: weakref.WeakKeyDictionary[nn.Module, LoadWatch] = weakref.WeakKeyDictionary()


def find_watch(model: nn.Module) -> LoadWatch | None:
    """What watched the loading of a model, if anything did."""
    return _watches.get(model)


def check_derived(model: nn.Module, engine: str, *, fix: str, without_refits: str) -> None:
    """Makes sure that an engine computes with what its loader wrote, where it wrote it.

    Args:
        model: The engine's.
        engine: Its name; that of its plugin is ``rl-`` and the same in small letters.
        fix: What to do about what was derived.
        without_refits: How to build an engine that takes no refits.

    Raises:
        CapabilityError: See :meth:`LoadWatch.check`; or its loading was not watched.
    """
    if (watch := find_watch(model)) is None:
        raise CapabilityError(
            f"{engine}'s {type(model).__name__} takes no refit: how {engine} loaded it was not "
            "recorded, so what it computed from the weights is unknown",
            fix=f"report it to rl-{engine.lower()}, with the name of the model; to generate "
            f"without refits, {without_refits}",
            capability="refit",
        )
    watch.check(model, fix=f"{fix}; to generate without refits, {without_refits}")


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _held(
    model: nn.Module, skipped: Collection[str]
) -> Iterator[tuple[str, torch.Tensor | np.ndarray[Any, Any] | float]]:
    """Tensors, arrays and floats that modules hold, also through other objects, with their paths.

    Each object is looked into once, where it is found first.
    """
    modules = dict(model.named_modules())
    seen: dict[int, Any] = {id(module): module for module in modules.values()}
    for name, module in modules.items():
        stack: list[tuple[str, Any]] = [
            (path, value)
            for path, value in _members(name, module, skipped)
            if path.rpartition(".")[2] not in _LISTED
        ]
        buffers = {key: one for key, one in module._buffers.items() if key not in skipped}
        stack += [(f"{name}.{key}" if name else key, one) for key, one in buffers.items()]
        while stack:
            path, value = stack.pop()
            if isinstance(value, float):
                yield path, value
                continue
            if isinstance(value, _ATOMS) or id(value) in seen:
                continue
            seen[id(value)] = value  # kept, so that nothing else gets its id
            if isinstance(value, torch.Tensor | np.ndarray):
                yield path, value
            else:
                stack.extend(_members(path, value, skipped))


def _members(path: str, value: Any, skipped: Collection[str]) -> Iterator[tuple[str, Any]]:
    """What an object holds; of a class, what a function could have left there."""
    if isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # the cell is empty
                yield f"{path}:{name}", cell.cell_contents
        yield f"{path}:defaults", value.__defaults__
        yield f"{path}:kwdefaults", value.__kwdefaults__
    elif isinstance(value, types.MethodType):
        yield path, value.__func__
        yield f"{path}.__self__", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"{path}:func", value.func), (f"{path}:args", value.args))
        yield f"{path}:keywords", value.keywords
    elif isinstance(value, Mapping):
        yield from ((f"{path}[{key!r}]", one) for key, one in list(value.items()))
    elif isinstance(value, list | tuple | AbstractSet):
        yield from ((f"{path}[{index}]", one) for index, one in enumerate(value))
    if isinstance(value, type):
        return
    fields = getattr(value, "__dataclass_fields__", {})
    attributes = list(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        if "torch" not in cls.__module__.partition(".")[0]:
            names = (slots,) if isinstance(slots, str) else tuple(slots)
            named = (n for n in names if not n.startswith("__") and hasattr(value, n))
            attributes += ((name, getattr(value, name)) for name in named)
    for name, one in attributes:
        if name in skipped and isinstance(value, nn.Module):
            continue
        if name in fields and isinstance(one, float):
            if one != fields[name].default:
                yield f"{path}.{name}", _Setting(one)
        else:
            yield (f"{path}.{name}" if path else name), one


def _digest(tensor: torch.Tensor) -> bytes:
    if tensor.layout is not torch.strided or tensor.is_meta:
        return repr((tensor.layout, tensor.shape)).encode()
    flat = tensor.detach().contiguous().view(-1)
    block_hash = BlockHash.choose(flat.device, private=True, token="")
    return tensor_digest(Hasher([flat.view(torch.uint8)], block_hash).digests())
