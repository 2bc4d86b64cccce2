"""Where an engine keeps the tensors of a checkpoint, in one of its workers, and writes to them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_backends.engine.checkpoint import file_shapes, read_tensor
from rl_backends.engine.derived_weights import check_derived, find_watch
from rl_backends.engine.loader import regions_of
from rl_backends.engine.rearranged import RearrangedLayers
from rl_backends.engine.regions import Region, count_elements
from rl_backends.modalities import model_on_meta
from rl_backends.tensors import module_tensors, same_bytes, tensor_specs
from rl_core.errors import CapabilityError, ConfigError, RefitCorrupted
from rl_core.interfaces import Piece, TensorSpec, WeightSink

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch import nn

#: Seconds for the workers of an engine to meet while a tensor is read back.
_RANKS_MEET_S = 60.0

__all__ = ["CheckpointModel", "LoadedSink", "LoadedWeights", "workers_group"]


def workers_group(workers: int) -> Any:
    """All workers of an engine as a group of processes, on the CPU."""
    timeout = timedelta(seconds=_RANKS_MEET_S)
    return dist.new_group(list(range(workers)), timeout=timeout, backend="gloo")


class LoadedWeights:
    """Finds where a model's own ``load_weights`` puts each tensor of a checkpoint, and keeps that.

    For engines with a loader that fuses, shards or pads tensors. A subclass defines what is special
    about the engine.

    Args:
        model: This worker's part of the model, loaded.
        checkpoint: The tensors that a trainer of this model has, in the dtype of the engine.
        workers: How many workers share the model; all of them read at the same time.
        without_refits: How to build an engine that takes no refits, for errors.
    """

    def __init__(
        self, model: nn.Module, checkpoint: CheckpointModel, *, workers: int, without_refits: str
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self._workers = workers
        self._without_refits = without_refits
        self._computed: dict[str, list[Region]] = {}
        #: Names of those tensors of which it is known what the engine computed with.
        self._known: set[str] = set()
        #: Names of tensors that some worker has only as its engine's hook processed them.
        self.collected: frozenset[str] = frozenset()
        #: Names of tensors that the engine does not compute with.
        self.unused: frozenset[str] = frozenset()

    # -- for a subclass --------------------------------------------------------------------------

    def check_same(self) -> None:
        """Makes sure that the engine computes what the trainer's model computes.

        Raises:
            CapabilityError: With the same weights, it computes something else.
        """

    def check(self) -> None:
        """Makes sure that nothing was derived from the weights that a refit would leave as it was.

        Usually by :meth:`check_derived`.

        Raises:
            CapabilityError: Something was.
        """

    def check_derived(self, engine: str, *, fix: str) -> None:
        """Makes sure that refits renew all that was derived from the weights.

        Args:
            engine: See :func:`rl_backends.engine.derived_weights.check_derived`.
            fix: The same.

        Raises:
            CapabilityError: They do not.
        """
        check_derived(
            self.model,
            engine,
            fix=fix,
            without_refits=self._without_refits,
            renewed=self.layers.renewed,
            why=self.layers.why,
        )

    def loading(self) -> AbstractContextManager[None]:
        """The context in which the model's ``load_weights`` runs."""
        return nullcontext()

    def hook(self, module: nn.Module) -> Callable[[], None] | None:
        """The engine's own hook, which processes a module's weights when they are loaded.

        With it, refits reach layers that the engine rearranges or quantises: see
        :mod:`rl_backends.engine.rearranged`.

        Returns:
            A function that has it process the module; None if the engine has none for it.
        """
        del module
        return None

    def prepare_plain(self, parameter: torch.Tensor) -> None:
        """Takes what the engine put around a parameter's loader off, so that it writes at once.

        Args:
            parameter: One that the engine rearranges later, without memory.
        """

    # -- found once -------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device

    @cached_property
    def layers(self) -> RearrangedLayers:
        """What the engine rearranges or quantises, as far as refits can renew it."""
        return RearrangedLayers(self.model, find_watch(self.model), self.hook, self.prepare_plain)

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """See :attr:`CheckpointModel.specs`."""
        with self.loading():
            return self.checkpoint.specs

    @cached_property
    def regions(self) -> Mapping[str, list[Region]]:
        """Where the engine keeps each tensor that owns its elements, or this worker's part of it.

        Buffers and frozen parameters that no worker keeps, such as those of a vision tower in an
        engine that takes text only, are kept by the first one here, so that they can be compared.

        Raises:
            CapabilityError: The model cannot be followed, does not use a parameter of the trainer,
                or has weights that no tensor fills, or such as were rearranged after loading.
        """
        self.check_same()
        self.check()
        owned = [spec for spec in self.specs if spec.alias_of is None]
        with self.loading(), self.layers.plain_parameters() as places:
            regions = regions_of(
                self.model,
                owned,
                self.checkpoint.dtype,
                without_refits=self._without_refits,
                published=self.checkpoint.published,
            )
            wanting = self._unfilled(regions)
            counts = [
                [count_elements((r.first, r.target.shape, r.strides) for r in regions[spec.name])]
                for spec in owned
            ]
            self.layers.take(regions, {spec.name: spec.numel for spec in owned}, places)
        for spec, count in zip(owned, counts, strict=True):
            count.append(bool(self.layers.of_tensor(spec.name)))
        # One worker's lack is all workers': what follows has collectives.
        kept = torch.tensor([*counts, [len(wanting), 0]])
        if self._workers > 1:
            dist.all_reduce(kept, group=self._group)
        *found, (lacking, _) = kept.tolist()
        lost, collected, unused = [], set[str](), set[str]()
        for spec, (count, processed) in zip(owned, found, strict=True):
            if processed:
                collected.add(spec.name)
            used = spec.role == "parameter" and (spec.trainable or count)
            if used and count < spec.numel:
                lost.append(f"{spec.name} ({count} of {spec.numel} elements)")
            if not count:
                unused.add(spec.name)
            if not count and (self._workers == 1 or dist.get_rank() == 0):
                whole = torch.zeros(spec.numel, dtype=spec.torch_dtype)
                regions[spec.name] = [Region(whole, 0, (1,))]
        self.collected, self.unused = frozenset(collected), frozenset(unused)
        if lost:
            raise CapabilityError(
                f"the engine's {type(self.model).__name__} does not load all of the trainer's "
                f"parameters, so the two are different models: {', '.join(lost[:5])}",
                fix=f"use another model; to generate without refits, {self._without_refits}",
                capability="refit",
            )
        if lacking:
            names = ", ".join(wanting[:5]) or "of another worker"
            raise CapabilityError(
                f"no tensor of transformers fills these parameters of the engine's "
                f"{type(self.model).__name__} ({lacking}): {names}",
                fix="report it, with the name of the model; to generate without refits, "
                f"{self._without_refits}",
                capability="refit",
            )
        for name, found in regions.items():
            if not (computed := [region for region in found if region.steps]):
                continue
            self._computed[name] = computed
            if (tensor := self.checkpoint.loaded(name)) is not None:
                filled = [region.fill(tensor) for region in computed]
                self._known |= {name} if all(filled) else set()
        return regions

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """What this worker keeps of each tensor: views of the engine's own, where they are boxes.

        Whole tensors without a view, on all workers, are those that the engine's hooks process, of
        which its loader computes something, or that some worker keeps in other shapes or dtypes:
        some kernels for CPUs keep biases of a bfloat16 model in float32.
        """
        owned = [spec for spec in self.specs if spec.alias_of is None and spec.numel]
        found: list[list[Piece | None]] = [
            [
                None
                if region.steps or region.place.dtype != spec.torch_dtype
                else region.piece(spec)
                for region in self.regions[spec.name]
            ]
            for spec in owned
        ]
        called = torch.tensor([float(None in one) for one in found])
        if self._workers > 1 and owned:
            dist.all_reduce(called, dist.ReduceOp.MAX, group=self._group)
        pieces = []
        for spec, one, by_calls in zip(owned, found, called.tolist(), strict=True):
            if by_calls or spec.name in self.collected:
                pieces.append(Piece(spec.name, tuple((0, size) for size in spec.shape), None))
            else:
                pieces += [piece for piece in one if piece is not None]
        return pieces

    @cached_property
    def _pieces_of(self) -> Mapping[str, list[Piece]]:
        """By name, those that have a view."""
        found: dict[str, list[Piece]] = {spec.name: [] for spec in self.specs if spec.numel}
        for piece in self.pieces:
            if piece.tensor is None:
                del found[piece.name]
            else:
                found[piece.name].append(piece)
        return found

    def renew(self) -> None:
        """Computes the engine's parameters where its loader does more than to copy.

        What was neither written nor read from files is left as the engine has it.
        """
        for region in (one for name in self._known for one in self._computed[name]):
            region.renew()

    def write(self, name: str, offset: int, data: torch.Tensor) -> None:
        """Writes elements of a tensor to wherever this worker has them; see :meth:`renew`."""
        for region in self.regions[name]:
            region.write(offset, data)
        if name in self._computed:
            self._known.add(name)
        self.layers.write(name, offset, data)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """What this worker keeps; all workers of an engine read at the same time.

        Whole tensors are put together again where they are written by calls.

        Yields:
            Each piece of :attr:`pieces` with its name; None for a tensor that an engine has only as
            its hook processed it.

        Raises:
            RefitCorrupted: The engine has other values than its loader computes of a tensor.
        """
        by_name = {spec.name: spec for spec in self.specs}
        for name in names:
            spec = by_name[name]
            owner = spec.alias_of or name
            if owner in self.collected:
                yield name, None
                continue
            if (kept := self._pieces_of.get(owner)) is not None:
                yield from ((name, piece.tensor) for piece in kept)
                continue
            regions = self.regions[owner]
            if not all(same_bytes(r.computed, r.target) for r in regions if r.steps):
                raise RefitCorrupted(
                    f"{name}: the engine has other values than its loader computes of this tensor",
                    fix="if the engine has had no refit, what it was loaded with is not known: "
                    "make the first refit without staged; else report it to the engine's plugin",
                    tensor=name,
                )
            whole = torch.zeros(spec.numel, dtype=spec.torch_dtype)
            for region in regions:
                region.read(whole)
            if self._workers > 1 and whole.numel():
                # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
                dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
            yield name, whole.view(spec.shape)

    def whole(self, spec: TensorSpec) -> torch.Tensor | None:
        """A whole tensor that owns its elements; all workers of an engine ask at the same time.

        Args:
            spec: One of :attr:`specs`.

        Returns:
            None where the engine has only what its hook or its loader made of it.
        """
        if spec.name in self._computed.keys() - self._known:
            return None
        parts = self.read([spec.name])
        if spec.name not in self._pieces_of:
            return next(parts)[1]
        whole = torch.zeros(spec.shape, dtype=spec.torch_dtype)
        for piece, (_, part) in zip(self._pieces_of[spec.name], parts, strict=True):
            if part is not None:
                whole[tuple(slice(*ends) for ends in piece.box)] = part
        if self._workers > 1:
            # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
            dist.all_reduce(whole.view(-1).view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
        return whole

    @cached_property
    def _group(self) -> Any:
        return workers_group(self._workers)

    def check_files(self, directory: Path) -> None:
        """Makes sure that a checkpoint's files filled the model, for engines that do not.

        To be called when the model is loaded: what no tensor is for is left as it was in memory.

        Args:
            directory: With files of safetensors; others are not looked at.

        Raises:
            ConfigError: They lack tensors.
        """
        specs = [
            TensorSpec(name, shape, str(self.checkpoint.dtype).removeprefix("torch."))
            for name, shape in file_shapes(directory).items()
        ]
        if not specs:
            return
        with self.loading(), self.layers.plain_parameters():
            regions = regions_of(
                self.model, specs, self.checkpoint.dtype, without_refits=self._without_refits
            )
            wanting = self._unfilled(regions)
        if wanting:
            raise ConfigError(
                f"no tensor in {directory} fills these parameters of the engine's "
                f"{type(self.model).__name__} ({len(wanting)}): {', '.join(wanting[:5])}",
                fix="copy or download the checkpoint again; if it is complete, the engine does not "
                "know its tensors by their names: use another model",
                key="model_name",
            )

    def _unfilled(self, regions: Mapping[str, list[Region]]) -> list[str]:
        """Parameters of which, padding aside, some elements are in no region."""
        filled: dict[int, list[torch.Tensor]] = {}
        for found in regions.values():
            for region in found:
                storage = region.target.untyped_storage().data_ptr()
                filled.setdefault(storage, []).append(region.target)
        wanting = []
        for module_name, module in self.model.named_modules():
            padded = hasattr(module, "org_vocab_size")  # rows for tokens that do not exist
            for name, parameter in module.named_parameters(recurse=False):
                parts = filled.get(parameter.untyped_storage().data_ptr(), [])
                count = count_elements(
                    (int(p.storage_offset()), p.shape, p.stride()) for p in parts
                )
                if count < parameter.numel() and not (padded and count):
                    where = f"{module_name}.{name}"
                    wanting.append(f"{where} ({count} of {parameter.numel()} elements)")
        return wanting


class LoadedSink(WeightSink):
    """Writes the tensors of a checkpoint to where the engine's own loader would, in place.

    Tensors of layers that the engine rearranges are collected, and processed by its own hook. In
    both cases storages stay what they are, so that CUDA graphs do, too.

    Args:
        weights: Of this worker.
    """

    casts = True

    def __init__(self, weights: LoadedWeights) -> None:
        self._loaded = weights
        self.device = str(weights.device)
        self._before: dict[str, dict[str, torch.Tensor]] = {}  # of layers, when they were read
        self._state = ""  # the method that was called last, of begin, finish and fail
        self._failed = False

    @property
    def always_sent(self) -> Collection[str]:  # type: ignore[override]
        """See :class:`WeightSink`: what the hook takes must come together."""
        _ = self._loaded.regions
        return self._loaded.collected

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._loaded.specs

    def begin(self, version: int) -> None:
        """Finds out where every tensor goes, before anything is written."""
        _ = self._loaded.pieces
        self._loaded.check()  # layers that computed since may have kept something
        self._loaded.layers.begin()
        self._state = "begin"

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Computes what the engine's loader computes of the tensors, and what its hooks do.

        Raises:
            RefitCorrupted: Not all tensors came of a layer that the engine rearranges.
        """
        self._loaded.renew()
        # What follows a failure gives tensors back, and layers already have what they had.
        self._loaded.layers.finish(all_sent=not self._failed)
        self._state = "finish"

    @torch.no_grad()
    def fail(self) -> None:
        """Computes that of the tensors as they are: torn, but those that :meth:`read` gives.

        Layers that the engine rearranges get back what they had when they were read.
        """
        self._loaded.renew()
        self._loaded.layers.begin()
        for name, tensors in self._before.items():
            self._loaded.layers.collected[name].restore(tensors)
        self._before = {}
        self._failed = True

    @torch.no_grad()
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self._loaded.write(name, offset, data)

    def pieces(self) -> Sequence[Piece]:
        """See :meth:`WeightSink.pieces`."""
        return self._loaded.pieces

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """See :meth:`WeightSink.read`.

        Raises:
            RefitCorrupted: The refit is finished, and the engine has something else than its hooks
                made of the tensors.
        """
        layers, names = self._loaded.layers, list(names)
        if self._state == "finish":
            layers.check()
            self._state = ""
        elif self._state == "begin":
            for layer in (layer for name in names for layer in layers.of_tensor(name)):
                if layer.name not in self._before:
                    self._before[layer.name] = layer.copy()
        return self._loaded.read(names)


class CheckpointModel:
    """A model as transformers makes it of a checkpoint's ``config.json``; allocates nothing.

    Args:
        name: The checkpoint. Its file is read anew: engines change theirs, and some write there
            what transformers does not know.
        dtype: Of the tensors.
        trust: Whether code of the checkpoint may run.
    """

    def __init__(self, name: str, dtype: torch.dtype, *, trust: bool) -> None:
        self.dtype = dtype
        self._name = name
        self._trust = trust

    @cached_property
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors, by a trainer's names; only those of the language model are trainable."""
        return tensor_specs(module_tensors(self.model))

    def published(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The trainer's tensors as the files of a checkpoint have them, which loaders know.

        Args:
            tensors: By the names of :attr:`specs`.

        Returns:
            The same elements: transformers stacks experts, and renames other tensors.
        """
        from transformers.core_model_loading import revert_weight_conversion

        found: dict[str, torch.Tensor] = revert_weight_conversion(self.model, dict(tensors))
        return found

    def loaded(self, name: str) -> torch.Tensor | None:
        """The tensor that an engine was loaded with: only files of a directory are looked at."""
        return read_tensor(Path(self._name), name)

    @cached_property
    def model(self) -> nn.Module:
        """The model, on the meta device."""
        model: nn.Module = model_on_meta(self._name, self.dtype, trust=self._trust)
        return model
