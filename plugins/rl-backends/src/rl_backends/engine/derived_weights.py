"""Finds what an engine derives from the weights, because a refit would leave that as it was.

A refit writes parameters. A layer that computes with something else that was made of them (a copy
in another attribute, a weight that was rearranged) would silently go on with the old weights. So
all that the modules of a model hold is recorded before there are weights, and
again after the engine's hooks have run. What was there before, bit for bit, does not depend on the
weights. A view of a parameter follows it. Nor is a number derived that a dataclass has by default,
or that a dataclass has from somewhere in the model: engines hand kernels their configuration like
that, and make kernels in their hooks. All else was derived from the weights.

What the hooks were given and what they changed is kept, too, so that
:mod:`rl_backends.engine.rearranged` can run them again.
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
from rl_core.weights.data.runs import flat

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

__all__ = [
    "Container",
    "LoadWatch",
    "check_derived",
    "containers_of",
    "digest_of",
    "find_watch",
    "tensors_in",
]

#: What holds the attributes or items of an object.
Container = dict[Any, Any] | list[Any]

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
        skipped: As given.
        derived: Paths of what was derived from weights.
        rearranged: Names of parameters that were changed after loading, or by it.
        plain: Of each module, by name, the parameters that the loader fills, without memory.
        changed: What the hooks changed besides parameters and tensors, and what it held before.
        samples: Of one module of each kind that hooks rearranged, the parameters before, on the
            CPU.
    """

    def __init__(self, model: nn.Module, engine: str, skipped: Collection[str] = ()) -> None:
        self._engine = engine
        self.skipped = frozenset(skipped)
        self._held = self._fingerprints(model)
        self.plain = {name: _without_memory(module) for name, module in model.named_modules()}
        self.changed: list[tuple[Container, Container]] = []
        self.samples: dict[str, dict[str, torch.Tensor]] = {}
        self._contents = self._copy_containers(model)
        self._derived: dict[str, weakref.ref[torch.Tensor]] = {}
        self._weights: dict[str, tuple[torch.dtype, bytes]] = {}
        self.derived: list[str] = []
        self.rearranged: list[str] = []
        self._known: set[str] = set()
        _watches[model] = self

    def weights_loaded(self, model: nn.Module) -> None:
        """Records the weights; to be called before the hooks that run when all are loaded."""
        self._weights = {n: (p.dtype, digest_of(p)) for n, p in _parameters(model)}
        plain = {name: _without_memory(module) for name, module in model.named_modules()}
        contents, kept = self._copy_containers(model), set[int]()
        for name, module in model.named_modules():
            # A loader may add modules and parameters.
            if _forms(self.plain.setdefault(name, {})).items() <= _forms(plain[name]).items():
                self.plain[name] = plain[name]
            else:  # its hook has run while it was loaded
                self.rearranged += [f"{name}.{key}" for key in self.plain[name]]
                kept |= containers_of(module, model, self.skipped).keys()
        for key in contents.keys() - kept:
            self._contents[key] = contents[key]
        processed = {name.rpartition(".")[0] for name in self.rearranged}
        kinds: dict[Any, tuple[str, nn.Module]] = {}
        for name, module in model.named_modules():
            held = (*vars(module).values(), *module.children())
            kind = (repr(_forms(self.plain[name])), *map(type, held))
            if self.plain[name] and name not in processed:
                kinds.setdefault(kind, (name, module))
        for name, module in kinds.values():
            own = module.named_parameters(recurse=False)
            self.samples[name] = {key: one.detach().cpu().clone() for key, one in own}

    def hooks_finished(self, model: nn.Module) -> None:
        """Compares what the hooks left with what was recorded."""
        self.changed = [pair for pair in self._contents.values() if _differ(*pair)]
        self._contents = {}
        after = dict(_parameters(model))
        for name, (dtype, digest) in self._weights.items():
            # Some kernels keep the same numbers in a wider dtype.
            if name not in after or digest_of(after[name].detach().to(dtype)) != digest:
                self.rearranged.append(name)
        self.rearranged = list(dict.fromkeys(self.rearranged))
        owners = {name.rpartition(".")[0] for name in self.rearranged}
        self.samples = {name: one for name, one in self.samples.items() if name in owners}
        numbers = {found.text for found in self._held.values() if isinstance(found, _Number)}
        for path, found in self._fingerprints(model).items():
            copied = isinstance(found, _Number) and found.setting and found.text in numbers
            if self._held.get(path) != found and not copied:
                self.derived.append(path)
        held = dict(_held(model, self.skipped))
        self._known = set(held)
        loaded = {
            one.untyped_storage().data_ptr() for n, one in after.items() if n in self._weights
        }
        self.derived += [
            name
            for name, one in after.items()
            if name not in self._weights and one.untyped_storage().data_ptr() not in loaded
        ]
        derived = [(path, held.get(path, after.get(path))) for path in self.derived]
        self._derived = {p: weakref.ref(one) for p, one in derived if isinstance(one, torch.Tensor)}

    def find_derived(self, path: str) -> torch.Tensor | None:
        """A tensor that was derived from weights."""
        found = self._derived.get(path)
        return found() if found else None

    def find_new_copies(self, model: nn.Module) -> None:
        """Finds copies of weights that layers made while they computed.

        What they keep then may also be scratch memory or a cache. A tensor is taken for a copy if
        all of a sample of its numbers are in the weights of its module.
        """
        modules = dict(model.named_modules())
        for path, value in _held(model, self.skipped):
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

    def check(
        self, model: nn.Module, *, fix: str, renewed: Collection[str] = (), why: str = ""
    ) -> None:
        """Makes sure that the engine computes with what its loader wrote, where it wrote it.

        Args:
            model: The same.
            fix: What to do about it.
            renewed: Names and paths of what a refit makes anew.
            why: What else is known about those that it does not.

        Raises:
            CapabilityError: Names the parameters that were rearranged after loading, and what else
                was made of weights.
        """
        self.find_new_copies(model)
        for found, what in (
            (self.rearranged, "rearranges the weights of this model after loading"),
            (self.derived, "keeps other tensors that it computed from the weights"),
        ):
            if paths := [path for path in found if path not in renewed]:
                more = f" and {len(paths) - _FEW} more" if len(paths) > _FEW else ""
                raise CapabilityError(
                    f"{self._engine}'s {type(model).__name__} takes no refit: {self._engine} "
                    f"{what}, and a refit would not update them: {', '.join(paths[:_FEW])}{more}"
                    + (f"; {why}" if why else ""),
                    fix=fix,
                    capability="refit",
                )

    def _copy_containers(self, model: nn.Module) -> dict[int, tuple[Container, Container]]:
        found = containers_of(model, model, self.skipped)
        return {key: (one, one.copy()) for key, one in found.items()}

    def _fingerprints(self, model: nn.Module) -> dict[str, Any]:
        """What the modules of a model hold besides parameters and views of these, by path."""
        storages = {p.untyped_storage().data_ptr() for _, p in _parameters(model) if p.numel()}
        found: dict[str, Any] = {}
        for path, value in _held(model, self.skipped):
            if isinstance(value, torch.Tensor):
                if value.is_meta or not value.numel():
                    continue
                if value.layout is torch.strided and value.untyped_storage().data_ptr() in storages:
                    continue
                found[path] = (value.dtype, tuple(value.shape), digest_of(value))
            elif isinstance(value, np.ndarray):
                found[path] = (value.dtype, value.shape, value.tobytes())
            else:
                found[path] = _Number(float.__repr__(value), isinstance(value, _Setting))
        return found


_watches: weakref.WeakKeyDictionary[nn.Module, LoadWatch] = weakref.WeakKeyDictionary()


def find_watch(model: nn.Module) -> LoadWatch | None:
    """What watched the loading of a model, if anything did."""
    return _watches.get(model)


def check_derived(
    model: nn.Module,
    engine: str,
    *,
    fix: str,
    without_refits: str,
    renewed: Collection[str] = (),
    why: str = "",
) -> None:
    """Makes sure that an engine computes with what its loader wrote, where it wrote it.

    Args:
        model: The engine's.
        engine: Its name; that of its plugin is ``rl-`` and the same in small letters.
        fix: What to do about what was derived.
        without_refits: How to build an engine that takes no refits.
        renewed: See :meth:`LoadWatch.check`.
        why: See :meth:`LoadWatch.check`.

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
    fix = f"{fix}; to generate without refits, {without_refits}"
    watch.check(model, fix=fix, renewed=renewed, why=why)


def _parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return model.named_parameters(remove_duplicate=False)


def _without_memory(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters on ``meta``, with all that loaders find on them."""
    found = {}
    for name, parameter in module._parameters.items():
        if parameter is not None:
            found[name] = parameter.detach().to("meta")
            found[name].__class__ = parameter.__class__
            found[name].__dict__ = dict(vars(parameter))
    return found


def _forms(parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {name: (p.shape, p.dtype, p.stride()) for name, p in parameters.items()}


def _differ(one: Container, other: Container) -> bool:
    if len(one) != len(other):
        return True
    if isinstance(one, dict) and isinstance(other, dict):
        missing = object()
        return any(one.get(key, missing) is not value for key, value in other.items())
    return any(a is not b for a, b in zip(one, other, strict=True))


def containers_of(
    module: nn.Module, model: nn.Module, skipped: Collection[str] = ()
) -> dict[int, Container]:
    """What holds attributes and items, of a module and of all that it holds, by their ids.

    Args:
        module: With those of its children that have no parameters, such as kernels; the model
            itself for all of its modules.
        model: Whose other modules are not looked into.
        skipped: Attributes that are not looked at.
    """
    found: dict[int, Container] = {}
    modules = list(model.modules())
    seen: dict[int, Any] = {id(one): one for one in modules}
    for one in modules if module is model else _with_parts(module):
        own = (one.__dict__, one._buffers, one._modules)
        found |= {id(container): container for container in own}
        stack = [(path, value) for path, value in _members("", one, skipped) if path not in _LISTED]
        for _, value in _walk(stack, seen, skipped):
            held = value if isinstance(value, dict | list) else getattr(value, "__dict__", None)
            if isinstance(held, dict | list) and not isinstance(value, torch.Tensor | type):
                found[id(held)] = held
    return found


def _with_parts(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if next(child.parameters(), None) is None:
            yield from _with_parts(child)


def tensors_in(
    stack: list[tuple[str, Any]], ignored: Iterable[Any] = ()
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that objects hold, also through others, with their paths; each once.

    Args:
        stack: The objects, by name.
        ignored: Objects that are not looked into.
    """
    for path, value in _walk(stack, {id(one): one for one in ignored}, ()):
        if isinstance(value, torch.Tensor):
            yield path, value


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
        for path, value in _walk(stack, seen, skipped):
            if isinstance(value, float | torch.Tensor | np.ndarray):
                yield path, value


def _walk(
    stack: list[tuple[str, Any]], seen: dict[int, Any], skipped: Collection[str]
) -> Iterator[tuple[str, Any]]:
    """Objects, and all that they hold; each but numbers once."""
    while stack:
        path, value = stack.pop()
        if isinstance(value, float):
            yield path, value
            continue
        if isinstance(value, _ATOMS) or id(value) in seen:
            continue
        seen[id(value)] = value  # kept, so that nothing else gets its id
        yield path, value
        if not isinstance(value, torch.Tensor | np.ndarray):
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
        if name in skipped:
            continue
        if name in fields and isinstance(one, float):
            if one != fields[name].default:
                yield f"{path}.{name}", _Setting(one)
        else:
            yield (f"{path}.{name}" if path else name), one


def digest_of(tensor: torch.Tensor) -> bytes:
    """A fingerprint of a tensor's elements."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        return repr((tensor.layout, tensor.shape)).encode()
    run = flat(tensor.contiguous()).view(torch.uint8)
    block_hash = BlockHash.choose(run.device, private=True, token="")
    return tensor_digest(Hasher([run], block_hash).digests())
