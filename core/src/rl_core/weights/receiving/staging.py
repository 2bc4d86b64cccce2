"""A second copy of the weights: an engine serves until a refit is complete, or after it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import CapabilityError
from rl_core.interfaces.weights import WeightSink
from rl_core.weights.data.manifest import dtype_of
from rl_core.weights.receiving.loading import check_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec

#: Elements that are exchanged at a time: on the CPU few enough for a cache, else enough to keep a
#: device busy.
_SWAPPED = 128 << 10
_SWAPPED_ON_DEVICE = 32 << 20


class StagedSink(WeightSink):
    """Collects tensors beside an engine's, and exchanges the two at once.

    After :meth:`finish` the second copy holds what the engine had; :meth:`fail` gives it back.

    Args:
        sink: The engine's own; it must be able to read what is installed.
        sent: Names of the engine's tensors that are sent; the others stay as they are.
        before: Version that the engine has.
        memory: The second copy's tensors by name, kept from refit to refit; those that are
            missing are made.
        mark_torn: Called before the engine's tensors are written.
    """

    def __init__(
        self,
        sink: WeightSink,
        sent: Collection[str],
        before: int,
        memory: dict[str, torch.Tensor],
        mark_torn: Callable[[], None],
    ) -> None:
        if type(sink).read is WeightSink.read:
            raise CapabilityError(
                f"{type(sink).__name__} cannot read its tensors, so a refit cannot be undone",
                fix='use isolation="quiesced", or implement WeightSink.read',
                capability="staged",
            )
        self._sink = sink
        self.device = sink.device
        self._mark_torn = mark_torn
        self._before = before
        self._specs = [s for s in sink.specs() if s.name in sent]
        self._targets: Mapping[str, torch.Tensor] = sink.targets() or {}
        check_apart(
            (spec.name, spec.name, self._targets[spec.name])
            for spec in self._specs
            if spec.name in self._targets
        )
        self._memory = memory
        self._staged: dict[str, torch.Tensor] = {}
        self._begun = False
        self._exchanged: list[TensorSpec] = []

    def specs(self) -> Sequence[TensorSpec]:
        return self._sink.specs()

    def begin(self, version: int) -> None:
        """Takes the memory of the second copy, all or none of it; the engine goes on."""
        device = next((target.device for target in self._targets.values()), torch.device("cpu"))
        try:
            for spec in self._specs:
                kept = self._memory.get(spec.name)
                wanted = (spec.shape, dtype_of(spec), device)
                if kept is None or (tuple(kept.shape), kept.dtype, kept.device) != wanted:
                    kept = torch.empty(spec.shape, dtype=dtype_of(spec), device=device)
                    self._memory[spec.name] = kept
                self._staged[spec.name] = kept
        except BaseException:
            self._memory.clear()
            self._staged.clear()
            raise

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The second copy."""
        return self._staged

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self._staged[name].view(-1)[offset : offset + data.numel()].copy_(data)

    def finish(self, version: int) -> None:
        """Exchanges the two copies; the engine must not generate."""
        self._sink.begin(version)
        self._begun = True
        self._mark_torn()
        for spec in self._specs:
            new, target = self._staged[spec.name], self._targets.get(spec.name)
            if target is not None:
                _swap(new.view(-1), target.detach().view(-1))
                self._exchanged.append(spec)
                continue
            [(_, installed)] = self._sink.read([spec.name])
            if installed is None:  # `fail` of the sink gives it back
                self._put(spec, new)
                continue
            before = self._staged[spec.name] = installed.clone()
            self._exchanged.append(spec)  # from here on there is something to restore
            self._put(spec, new)
            self._staged[spec.name] = new.copy_(before)
        self._sink.finish(version)

    def fail(self) -> None:
        """Gives the engine back what it had, if anything was taken."""
        if not self._begun:
            return
        self._begun = False
        self._sink.fail()
        self._sink.begin(self._before)
        for spec in reversed(self._exchanged):  # those that overlap, too
            self._put(spec, self._staged[spec.name])
        self._exchanged = []
        self._sink.finish(self._before)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._sink.read(names)

    def _put(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._sink.write(spec.name, 0, tensor.reshape(-1), of=spec)


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the elements of two 1-D tensors, some of them at a time."""
    step = _SWAPPED if one.device.type == "cpu" else _SWAPPED_ON_DEVICE
    scratch = torch.empty_like(one[:step])
    for start in range(0, len(one), step):
        a, b = one[start : start + step], other[start : start + step]
        kept = scratch[: len(a)].copy_(a)
        a.copy_(b)
        b.copy_(kept)
