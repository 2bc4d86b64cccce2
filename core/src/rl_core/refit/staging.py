"""A second copy of the weights: an engine serves until a refit is complete, or after it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import CapabilityError
from rl_core.interfaces.weights import WeightSink
from rl_core.refit.manifest import dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from rl_core.interfaces.weights import TensorSpec

__all__ = ["StagedSink"]


class StagedSink(WeightSink):
    """Collects tensors beside an engine's, and exchanges the two at once.

    After :meth:`finish` the second copy holds what the engine had; :meth:`fail` gives it back.

    Args:
        sink: The engine's own; it must be able to read what is installed.
        sent: Names of the engine's tensors that are sent; the others stay as they are.
        before: Version that the engine has.
        touch: Called before the engine's tensors are written.

    Raises:
        CapabilityError: The sink cannot read, so that there is no way back.
    """

    def __init__(
        self, sink: WeightSink, sent: Collection[str], before: int, touch: Callable[[], None]
    ) -> None:
        if type(sink).read is WeightSink.read:
            raise CapabilityError(
                f"{type(sink).__name__} cannot read its tensors, so no refit can be undone",
                fix='use isolation="quiesced", or implement WeightSink.read',
                capability="staged",
            )
        self._sink = sink
        self._touch = touch
        self._before = before
        self._specs = [s for s in sink.specs() if s.name in sent]
        self._device = next((t.device for t in (sink.targets() or {}).values()), None)
        self._staged: dict[str, torch.Tensor] = {}
        self._exchanged: list[TensorSpec] = []

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._sink.specs()

    def begin(self, version: int) -> None:
        """Takes the memory of the second copy; the engine goes on."""
        self._staged = {
            s.name: torch.empty(s.shape, dtype=dtype_of(s), device=self._device)
            for s in self._specs
        }

    def targets(self) -> Mapping[str, torch.Tensor]:
        """The second copy."""
        return self._staged

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self._staged[name].view(-1)[offset : offset + data.numel()].copy_(data)

    def finish(self, version: int) -> None:
        """Exchanges the two copies; the engine must not generate."""
        self._sink.begin(version)
        self._touch()
        for spec in self._specs:
            self._exchanged.append(spec)
            self._exchange(spec)
        self._sink.finish(version)

    def fail(self) -> None:
        """Gives the engine back what it had, if anything was taken."""
        if not self._exchanged:
            return
        self._sink.fail()
        self._sink.begin(self._before)
        for spec in self._exchanged:
            self._put(spec, self._staged[spec.name])
        self._exchanged = []
        self._sink.finish(self._before)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        return self._sink.read(names)

    def _exchange(self, spec: TensorSpec) -> None:
        [(_, installed)] = self._sink.read([spec.name])
        before = installed.clone()
        new = self._staged[spec.name]
        self._staged[spec.name] = before
        self._put(spec, new)

    def _put(self, spec: TensorSpec, tensor: torch.Tensor) -> None:
        if tensor.numel():
            self._sink.write(spec.name, 0, tensor.reshape(-1), of=spec)
