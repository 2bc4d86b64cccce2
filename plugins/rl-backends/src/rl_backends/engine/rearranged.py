"""Layers that an engine rearranges or quantises after loading, and how a refit renews them.

An engine may keep only what its hooks made of a layer's weights: experts in the order of a kernel,
or numbers of 8 bits with their scales. Nothing can be written there in place. So a refit collects
the plain weights of such a layer in memory of their own, has the engine's own hook process them,
and copies the result to where the engine keeps its tensors, so that CUDA graphs stay valid. Which
layers these are was measured while the model was loaded (:class:`LoadWatch`), not looked up by
name. When the engine starts, the hook of each runs once more: with the weights that were loaded it
must make what the engine has, which is tried with one layer of each kind; with numbers that mean
nothing it must make tensors of the same shapes, dtypes and strides. Of layers that the engine
processes while it loads them nobody has the weights that were loaded, so that only the second is
tried with these.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.engine.derived_weights import containers_of, digest_of, tensors_in
from rl_core.errors import RefitCorrupted

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from rl_backends.engine.derived_weights import Container, LoadWatch
    from rl_backends.engine.regions import Region

__all__ = ["RearrangedLayer", "RearrangedLayers"]

_FEW = 5


class RearrangedLayer:
    """One module that computes with what the engine's hook made of its weights.

    Args:
        name: Of the module.
        module: The engine's.
        plain: The parameters that the loader fills, without memory.
        collected: They are; if not, those that the module has are written in place, and the hook
            makes other tensors of them.
        changed: What the hook changes besides parameters, and what it held before.
        hook: Has the engine process the module as it is.
        ignored: Storages of tensors that other modules own, and names of attributes that the
            backend itself renews.

    Attributes:
        regions: By the name of a checkpoint's tensor, parameters and which elements of them it
            fills. The targets have no memory.
        sizes: The elements of these tensors.
        renewed: All was written and processed since :meth:`begin`.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        plain: Mapping[str, torch.Tensor],
        collected: bool,
        changed: Sequence[tuple[Container, Container]],
        hook: Callable[[], None],
        ignored: Collection[object] = (),
    ) -> None:
        self.name = name
        self.regions: dict[str, list[tuple[str, Region]]] = {}
        self.sizes: dict[str, int] = {}
        self.renewed = False
        self.plain = plain if collected else {}
        self.module = module
        self._names = set(plain)
        self._changed = changed
        self._hook = hook
        self._ignored = ignored
        self._where = torch.empty(0, device=next(iter(self.tensors().values())).device)
        self._print: dict[str, bytes] = {}
        self._parameters: dict[str, torch.nn.Parameter] = {}
        self._open: dict[str, list[Region]] = {}
        self._written: dict[str, list[tuple[int, int]]] = {}

    # -- what the hook makes ----------------------------------------------------------------------

    def tensors(self) -> dict[str, torch.Tensor]:
        """What the engine computes with: parameters, and all that its hook left on the module."""
        own = {**self.module._parameters, **self.module._buffers}
        found = {
            key: one.detach()
            for key, one in own.items()
            if one is not None and key not in self._ignored
        }
        stack: list[tuple[str, Any]] = []
        for number, (now, before) in enumerate(self._changed):
            if isinstance(now, dict) and isinstance(before, dict):
                old = {id(value) for value in before.values()}
                entries: Iterable[tuple[Any, Any]] = list(now.items())
            else:
                old, entries = {id(value) for value in before}, list(enumerate(now))
            stack += [
                (f"{number}:{key}", value)
                for key, value in entries
                if id(value) not in old and key not in self._ignored
            ]
        storages = {one.untyped_storage().data_ptr() for one in found.values()}
        ignored = [*own.values(), *self.module.modules()]
        for path, tensor in tensors_in(stack, ignored):
            if tensor.layout is torch.strided:
                storage = tensor.untyped_storage().data_ptr()
                if storage in storages or storage in self._ignored:
                    continue
            found[path] = tensor.detach()
        return {key: one for key, one in found.items() if one.numel() and not one.is_meta}

    def given(self) -> dict[str, Any]:
        """The module's parameters without those that its hook adds."""
        own = self.module._parameters
        return {key: one for key, one in own.items() if key in self._names or one is None}

    def make(self, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, torch.Tensor]:
        """What the hook makes of parameters; the module is left as it is.

        Args:
            parameters: In the place of the module's own; none to leave those.
        """
        own = self.module._parameters
        now = [(container, container.copy()) for container, _ in self._changed]
        kept = dict(own)
        try:
            for container, before in self._changed:
                _put(container, before)
            _put(own, dict(parameters) or self.given())
            where = torch.cuda.device_of(self._where)  # type: ignore[no-untyped-call]
            with torch.no_grad(), where:
                self._hook()
            return self.tensors()
        finally:
            for container, content in now:
                _put(container, content)
            _put(own, kept)

    def rehearse(self, sample: Mapping[str, torch.Tensor] | None = None) -> str:
        """Runs the hook again, and compares its result with what the engine has.

        Args:
            sample: The weights that the engine has processed. Where they are not known, numbers
                are compared with those of another run.

        Returns:
            Why the layer cannot be renewed, or nothing.
        """
        live = self.tensors()
        made = self.make(self._new_parameters(sample, meaningless=True))
        if differ := self._compare(made, live):
            return differ
        known = sample or not self.plain
        other = live if known else self.make(self._new_parameters(meaningless=True))
        unequal = [key for key, one in other.items() if digest_of(one) != digest_of(made[key])]
        return f"makes other numbers in {', '.join(unequal[:_FEW])}" if unequal else ""

    def _compare(self, made: dict[str, torch.Tensor], live: dict[str, torch.Tensor]) -> str:
        """How tensors differ in what must be the same before one is copied to the other."""
        if made.keys() != live.keys():
            return f"makes other tensors: {', '.join(sorted(made.keys() ^ live.keys())[:_FEW])}"
        for key, one in live.items():
            form, other = (
                (t.layout, t.dtype, t.shape, t.stride(), t.device) for t in (one, made[key])
            )
            if form != other or one.layout is not torch.strided:
                return f"makes {key} with {other}, where the engine has {form}"
        return ""

    # -- a refit ----------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets earlier refits, and what they did not complete."""
        self.renewed, self._print = False, {}
        self.drop()

    def drop(self) -> None:
        """Frees the plain parameters."""
        self._parameters, self._open, self._written = {}, {}, {}

    def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """Takes a run of a tensor's elements; the last one has the layer processed."""
        if not self._parameters:
            self.begin()
            self._parameters = self._new_parameters()
            self._open = {
                key: [_bound(region, self._parameters[own]) for own, region in regions]
                for key, regions in self.regions.items()
            }
        for region in self._open[name]:
            region.write(offset, data)
        first, last, apart = offset, offset + data.numel(), []
        for begin, end in self._written.get(name, []):
            if begin <= last and first <= end:
                first, last = min(first, begin), max(last, end)
            else:
                apart.append((begin, end))
        self._written[name] = [*apart, (first, last)]
        if not self.lacking():
            for region in (region for regions in self._open.values() for region in regions):
                if region.steps:
                    region.renew()
            self.renew(self._parameters)

    def _new_parameters(
        self, sample: Mapping[str, torch.Tensor] | None = None, *, meaningless: bool = False
    ) -> dict[str, torch.nn.Parameter]:
        """The plain parameters with memory.

        Args:
            sample: Their numbers.
            meaningless: Without a sample they have some numbers; if not, zeros, which padding
                keeps.
        """
        device = self._where.device
        made = {key: with_memory(one, device) for key, one in self.plain.items()}
        for key, one in made.items():
            if sample:
                one.data.copy_(sample[key])
            elif meaningless and one.is_floating_point():
                ramp = torch.linspace(-1, 1, one.numel(), dtype=one.dtype, device=device)
                one.data.copy_(ramp.view(one.shape))
            else:
                one.data.zero_()
        return made

    def lacking(self) -> list[str]:
        """Tensors of which some elements have not come yet."""
        return [
            name
            for name, numel in self.sizes.items()
            if numel and self._written.get(name, []) != [(0, numel)]
        ]

    @property
    def open_bytes(self) -> int:
        """Bytes of the plain parameters that are there now."""
        return sum(one.nbytes for one in self._parameters.values())

    def renew(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Puts what the hook makes where the engine computes with it."""
        made, live = self.make(parameters), self.tensors()
        if differ := self._compare(made, live):
            raise RefitCorrupted(
                f"{self.name}: the engine's hook {differ}",
                fix="report it to the engine's plugin, with the name of the model",
                tensor=self.name,
            )
        self._print = {key: digest_of(one) for key, one in made.items()}
        for key, one in live.items():
            one.copy_(made[key])
        self.drop()
        self.renewed = True

    def copy(self) -> dict[str, torch.Tensor]:
        """A copy of what the engine computes with, for :meth:`restore`."""
        return {key: one.clone() for key, one in self.tensors().items()}

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Gives the engine back what it had."""
        self.begin()
        for key, one in self.tensors().items():
            one.copy_(tensors[key])

    def check(self) -> None:
        """Makes sure that the engine has what its hook made.

        Raises:
            RefitCorrupted: It does not, or the layer was not renewed.
        """
        live = {key: digest_of(one) for key, one in self.tensors().items()}
        if not self.renewed or live != self._print:
            wrong = [key for key, digest in live.items() if self._print.get(key) != digest]
            raise RefitCorrupted(
                f"{self.name}: the engine does not compute with what its hook made of this "
                f"refit's tensors: {', '.join(wrong[:_FEW]) or 'the hook has not run'}",
                fix="report it to the engine's plugin, with the name of the model",
                tensor=self.name,
            )


class RearrangedLayers:
    """All such layers of one worker's model.

    Args:
        model: The engine's, loaded.
        watch: What watched its loading; None if nothing did.
        hook: Of a module; None if the engine has none for it.
        prepare: Takes what engines put around weight loaders off a parameter without memory.

    Attributes:
        collected: Those of which a refit collects the weights, by name.
        derived: Those of which it writes the weights in place, and then has the hook run.
        renewed: Names and paths of what they renew, for :meth:`LoadWatch.check`.
        why: Why others cannot be renewed.
        most_open_bytes: Most bytes of plain weights that were there at once in a refit.
    """

    def __init__(
        self,
        model: nn.Module,
        watch: LoadWatch | None,
        hook: Callable[[nn.Module], Callable[[], None] | None],
        prepare: Callable[[torch.Tensor], None],
    ) -> None:
        self.collected: dict[str, RearrangedLayer] = {}
        self.derived: dict[str, RearrangedLayer] = {}
        self.renewed: list[str] = []
        self.why = ""
        self.most_open_bytes = 0
        self._hook, self._model = hook, model
        self._modules = dict(model.named_modules())
        if watch is None:
            return
        self._watch = watch
        for name in dict.fromkeys(name.rpartition(".")[0] for name in watch.rearranged):
            for one in watch.plain[name].values():
                prepare(one)
            if layer := self._layer(name, collected=True):
                self.collected[name] = layer
        self.renewed += [n for n in watch.rearranged if n.rpartition(".")[0] in self.collected]
        made = {_storage(t) for one in self.collected.values() for t in one.tensors().values()}
        for path in watch.derived:
            if (tensor := watch.find_derived(path)) is None:
                continue
            owner = path
            while owner not in self._modules:
                owner = owner.rpartition(".")[0]
            if _storage(tensor) not in made and owner not in self.derived:
                if (layer := self._layer(owner, collected=False)) is None:
                    continue
                self.derived[owner] = layer
                made |= {_storage(one) for one in layer.tensors().values()}
            if _storage(tensor) in made:
                self.renewed.append(path)
        watch.samples.clear()

    def _layer(self, name: str, *, collected: bool) -> RearrangedLayer | None:
        """A layer, if its hook makes again what the engine has."""
        module, plain = self._modules[name], self._watch.plain[name]
        if (hook := self._hook(module)) is None:
            return None
        others = {
            _storage(one)
            for other in self._model.modules()
            if other is not module
            for one in other._parameters.values()
            if one is not None
        }
        within = containers_of(module, self._model)
        changed = [pair for pair in self._watch.changed if id(pair[0]) in within]
        ignored = {*others, *self._watch.skipped}
        try:
            layer = RearrangedLayer(name, module, plain, collected, changed, hook, ignored)
            why = layer.rehearse(self._watch.samples.pop(name, None))
        except Exception as error:  # whatever hooks raise that do not run twice
            why = f"fails: {type(error).__name__}: {error}"
        if not why:
            return layer
        self.why = self.why or f"the hook of {name}, run again, {why}"
        return None

    @contextmanager
    def plain_parameters(self) -> Iterator[dict[int, tuple[RearrangedLayer, str]]]:
        """The layers have parameters that a loader can fill, of pages that nothing touches.

        Yields:
            The layer and the parameter's name, by the address of its storage.
        """
        places, kept = {}, []
        try:
            for layer in (*self.collected.values(), *self.derived.values()):
                own = layer.module._parameters
                kept.append((own, dict(own)))
                virtual = {k: with_memory(p, "cpu") for k, p in layer.plain.items()}
                _put(own, virtual or layer.given())
                for key, one in virtual.items():
                    places[one.untyped_storage().data_ptr()] = layer, key
            yield places
        finally:
            for own, before in kept:
                _put(own, before)

    def take(
        self,
        regions: dict[str, list[Region]],
        sizes: Mapping[str, int],
        places: Mapping[int, tuple[RearrangedLayer, str]],
    ) -> None:
        """Takes the regions that are in plain parameters out of a model's.

        Args:
            regions: By the names of tensors.
            sizes: Elements of each tensor.
            places: See :meth:`plain_parameters`.
        """
        for name, found in regions.items():
            regions[name] = [r for r in found if _storage(r.target) not in places]
            for region in found:
                target, plain = region.target, region.plain
                if (place := places.get(_storage(target))) is None:
                    continue
                layer, key = place
                where = target.shape, target.stride(), target.storage_offset()
                there = region._replace(
                    target=layer.plain[key].detach().as_strided(*where),
                    plain=None if plain is None else plain.to("meta"),
                )
                layer.regions.setdefault(name, []).append((key, there))
                layer.sizes[name] = sizes[name]

    def of_tensor(self, name: str) -> list[RearrangedLayer]:
        """The layers that have elements of a checkpoint's tensor."""
        return [layer for layer in self.collected.values() if name in layer.regions]

    def begin(self) -> None:
        """See :meth:`RearrangedLayer.begin`."""
        for layer in (*self.collected.values(), *self.derived.values()):
            layer.begin()

    def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """See :meth:`RearrangedLayer.write`."""
        for layer in self.of_tensor(name):
            layer.write(name, offset, data)
            open_bytes = sum(one.open_bytes for one in self.collected.values())
            self.most_open_bytes = max(self.most_open_bytes, open_bytes)

    def finish(self, *, all_sent: bool) -> None:
        """Runs the hooks that make other tensors of weights that were written in place.

        Args:
            all_sent: All tensors of a checkpoint were sent.

        Raises:
            RefitCorrupted: Tensors of a layer have not come, or some of their elements.
        """
        for layer in self.collected.values():
            if layer.open_bytes or (all_sent and not layer.renewed):
                raise RefitCorrupted(
                    f"{layer.name}: this layer was not renewed, because elements of these tensors "
                    f"did not come: {', '.join(layer.lacking()[:_FEW])}",
                    fix="call refit again; if it happens twice, report it to the engine's plugin",
                    tensor=layer.name,
                )
        for layer in self.derived.values():
            layer.renew({})

    def check(self) -> None:
        """See :meth:`RearrangedLayer.check`."""
        for layer in (*self.collected.values(), *self.derived.values()):
            layer.check()


def with_memory(plain: torch.Tensor, device: torch.device | str) -> torch.nn.Parameter:
    """A parameter with all that loaders find on one without memory; nothing touches its pages.

    Args:
        plain: Of :attr:`LoadWatch.plain`.
        device: Of the parameter.
    """
    made = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=device)
    parameter = torch.nn.Parameter(made, requires_grad=False)
    parameter.__class__ = plain.__class__  # type: ignore[assignment]
    parameter.__dict__.update(vars(plain))
    return parameter


def _bound(region: Region, parameter: torch.nn.Parameter) -> Region:
    """A region of a parameter without memory, in one that has some."""
    target, plain = region.target, region.plain
    where = target.shape, target.stride(), target.storage_offset()
    if plain is not None:
        plain = torch.zeros(plain.shape, dtype=plain.dtype, device=parameter.device)
    return region._replace(target=parameter.detach().as_strided(*where), plain=plain)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided else 0


def _put(container: Container, content: Container) -> None:
    container.clear()
    if isinstance(container, dict):
        container.update(content)
    else:
        container.extend(content)
