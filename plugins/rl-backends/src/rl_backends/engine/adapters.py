"""The sink of an engine that serves adapters: a refit sends A and B, not weights."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch import nn

from rl_backends.adapters import adapter_tensors, add_adapters
from rl_backends.base_weights import digest_as
from rl_backends.engine.weights import workers_group
from rl_backends.modalities import model_on_meta
from rl_backends.tensors import whole_pieces
from rl_core.errors import CapabilityError, ManifestMismatchError
from rl_core.interfaces import Piece, TensorSpec, WeightSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rl_backends.base_weights import Digests
    from rl_backends.engine.weights import LoadedWeights

__all__ = ["ADAPTERS", "AdapterSink", "adapted_modules", "serving", "without_wrappers"]

_log = logging.getLogger(__name__)

#: Adapters that an engine has at a time: the one that serves, and the next one.
ADAPTERS = 2


def adapted_modules(
    model_name: str,
    dtype: torch.dtype,
    lora: Mapping[str, Any],
    *,
    trust: bool,
    key: str,
    distribution: str,
) -> dict[str, tuple[str, TensorSpec]]:
    """The tensors of an adapter of a checkpoint's model; allocates none of them.

    Args:
        model_name: The checkpoint.
        dtype: Of the engine.
        lora: The engine's key ``lora``.
        trust: Whether code of the checkpoint may run.
        key: Of the configuration, for errors.
        distribution: The one that has peft as its extra ``lora``.

    Returns:
        The module and the tensor, by the name under which peft saves the tensor.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model.
        CapabilityError: A module is not a linear layer.
    """
    model = model_on_meta(model_name, dtype, trust=trust)
    with torch.device("meta"):
        adapted = add_adapters(model, lora, key=key, distribution=distribution)
    kind = str(dtype).removeprefix("torch.")
    return {
        name: (one.module, TensorSpec(name, tuple(one.parameter.shape), kind))
        for name, one in adapter_tensors(adapted).items()
    }


@contextmanager
def without_wrappers(model: nn.Module) -> Iterator[None]:
    """Has the layers that adapters were put around in their old places, where loaders look."""
    wrapped = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if isinstance(getattr(child, "base_layer", None), nn.Module)
    ]
    for parent, name, child in wrapped:
        setattr(parent, name, child.base_layer)
    try:
        yield
    finally:
        for parent, name, child in wrapped:
            setattr(parent, name, child)


@contextmanager
def _not_compared() -> Iterator[None]:
    """Goes on without base weights that cannot be followed, such as those of a quantised file."""
    try:
        yield
    except CapabilityError as error:
        _log.warning("the base weights will not be compared with a trainer's: %s", error)


def serving(sink: Callable[[], AdapterSink]) -> tuple[int, int]:
    """The adapter that requests are to name, and its version; for ``call_in_workers``."""
    return sink().serving, sink().version


class AdapterSink(WeightSink, ABC):
    """Collects the tensors of an adapter, and has the engine load it beside the one that serves.

    One is used for all refits of a worker. The scale of the adapter is in its B.

    Args:
        tensors: Of :func:`adapted_modules`.
        workers: How many workers share the model; all of them read at the same time.
        base: Makes the weights under the adapters, which are compared with a trainer's. A
            CapabilityError means that they cannot be followed. None compares nothing.

    Attributes:
        serving: The adapter that requests are to name: 1 or 2, or 0 for none.
        version: Of that adapter.
        by_name: The tensors.
        buffers: What was written of each.
    """

    casts = True
    double_buffered = True

    def __init__(
        self,
        tensors: Mapping[str, tuple[str, TensorSpec]],
        *,
        workers: int,
        base: Callable[[], LoadedWeights] | None = None,
    ) -> None:
        self._make_base = base
        self._base: LoadedWeights | None = None  # whose places are known
        self._theirs: Digests = {}  # the trainer's, if it tells them
        self._equal: Digests = {}  # those that were found equal last
        self.by_name = {name: spec for name, (_, spec) in tensors.items()}
        self._workers = workers
        self.serving = self.version = 0
        self._before: tuple[int, int] | None = None  # the same, if the newest can be taken back
        self._checked = False
        self.buffers = {
            name: torch.zeros(spec.shape, dtype=spec.torch_dtype)
            for name, spec in self.by_name.items()
        }

    # -- for a subclass --------------------------------------------------------------------------

    @abstractmethod
    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Has the engine load an adapter, in the place of an earlier one with this number.

        Args:
            adapter: 1 or 2.
            tensors: By name, to be copied.
        """

    @abstractmethod
    def unload(self, adapter: int) -> None:
        """Has the engine remove an adapter, if it is there."""

    @abstractmethod
    def kept(self, name: str) -> torch.Tensor:
        """Which elements of a tensor this worker keeps: indices into the flattened tensor."""

    @abstractmethod
    def held(self, adapter: int, name: str) -> torch.Tensor:
        """The values of these elements in the engine's own memory, in the same order."""

    # -- the sink ---------------------------------------------------------------------------------

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return list(self.by_name.values())

    def check(self) -> None:
        """Makes sure that the engine keeps all elements of all tensors; finds the base weights.

        Raises:
            CapabilityError: It does not, or computes another model than the trainer's.
        """
        kept = torch.tensor([self.kept(name).numel() for name in self.by_name])
        if self._workers > 1:
            dist.all_reduce(kept, group=self._group)
        lost = [
            name
            for (name, spec), count in zip(self.by_name.items(), kept.tolist(), strict=True)
            if count < spec.numel
        ]
        if lost:
            raise CapabilityError(
                f"the engine does not serve adapters of these modules, or drops a part of them "
                f"({len(lost)} tensors): {', '.join(lost[:5])}",
                fix="leave them out of lora.target_modules on both sides, or refit merged weights",
                capability="adapters",
            )
        base: LoadedWeights | None = None
        with _not_compared():
            base = self._make_base and self._make_base()
        if base is not None:
            with without_wrappers(base.model):
                base.check_same()
                with _not_compared():
                    _ = base.pieces  # now, while nothing computes
                    self._base = base

    def expect_base(self, theirs: Digests) -> None:
        """Takes what :meth:`rl_backends.base_weights.BaseDigests.now` gave, for the next refits.

        They are compared in :meth:`finish`: before, the engine may sleep.
        """
        self._theirs = theirs

    def _check_base(self) -> None:
        """Makes sure that the trainer's base weights are those of the engine.

        They are read only if the trainer's are not those of the last comparison: nothing changes
        the engine's own.

        Raises:
            ManifestMismatchError: They are not, with the names of those that differ.
        """
        theirs = self._theirs
        if self._base is None or theirs == self._equal:
            return
        differing, unknown, compared = [], [], 0
        for spec in self._base.specs:
            if spec.alias_of is not None or spec.name in self._base.unused or not spec.numel:
                continue
            whole = self._base.whole(spec)
            if whole is None:
                unknown.append(spec.name)
                continue
            compared += 1
            known = theirs.get(spec.name, {})
            # A trainer that keeps fewer bits has no digest of what it was loaded from.
            kind = spec.dtype if spec.dtype in known else next(iter(known), spec.dtype)
            if known.get(kind) != digest_as(whole, getattr(torch, kind)):
                differing.append(spec.name)
        if differing:
            raise ManifestMismatchError(
                f"the trainer's base weights are not those of the engine: {len(differing)} of "
                f"{compared} tensors differ, the first is {differing[0]}",
                fix="load one checkpoint in one dtype on both sides, and change only adapters; or "
                'send all weights: set lora.refit to "merged", and leave lora out in the engine',
                differing=differing,
            )
        if unknown:
            _log.warning(
                "base weights that the engine has only in another form were not compared with the "
                "trainer's (%d): %s",
                len(unknown),
                ", ".join(unknown[:5]),
            )
        self._equal = theirs

    @cached_property
    def _group(self) -> Any:
        return workers_group(self._workers)

    def begin(self, version: int) -> None:
        """The newest adapter stays; the first time, see :meth:`check`."""
        if not self._checked:
            self.check()
        self._checked, self._before = True, None
        if self._workers > 1:
            both = torch.tensor([self.serving, -self.serving])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            if int(both.sum()):  # a commit reached only some workers: what they serve is torn
                self.serving = 0

    def pieces(self) -> Sequence[Piece]:
        """Memory of the host; the engine itself is not written to."""
        return whole_pieces(self.buffers)

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self.buffers[name].view(-1)[offset : offset + data.numel()].copy_(data)

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Loads the adapter; rows that begin now get it.

        Raises:
            ManifestMismatchError: It was trained on other base weights than the engine's.
        """
        self._check_base()
        adapter = self.serving % ADAPTERS + 1
        self.load(adapter, self.buffers)
        self._before = self.serving, self.version
        self.serving, self.version = adapter, version

    def fail(self) -> None:
        """Returns to the adapter that served before."""
        if self._before is not None:
            failed = self.serving
            self.serving, self.version = self._before
            self._before = None
            self.unload(failed)

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine holds; zeros if no adapter serves."""
        for name in names:
            spec = self.by_name[name]
            whole = torch.zeros(spec.numel, dtype=spec.torch_dtype)
            if self.serving:
                whole[self.kept(name)] = self.held(self.serving, name).to("cpu", whole.dtype)
            if self._workers > 1:
                # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
                dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
            yield name, whole.view(spec.shape)
