"""A second copy of the weights: an engine serves until a refit is complete, or after it failed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import CapabilityError
from rl_core.interfaces.weights import Piece, WeightSink
from rl_core.weights.data.parts import box_of, sizes_of
from rl_core.weights.receiving.loading import check_apart

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from rl_core.interfaces.weights import Box, TensorSpec

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
        memory: The second copy's tensors by name and box, kept from refit to refit; those that are
            missing are made.
        mark_torn: Called before the engine's tensors are written.
    """

    def __init__(
        self,
        sink: WeightSink,
        sent: Collection[str],
        before: int,
        memory: dict[tuple[str, Box], torch.Tensor],
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
        specs = sink.specs()
        self._spec = {spec.name: spec for spec in specs}
        given = sink.pieces()
        if given is None:
            given = [Piece(s.name, box_of(s), None) for s in specs if s.alias_of is None]
        # Those that are read back before they are exchanged come first: `read` may verify.
        self._pieces = [piece for piece in given if piece.name in sent and piece.tensor is None]
        self._pieces += [
            piece for piece in given if piece.name in sent and piece.tensor is not None
        ]
        self._others = [piece for piece in given if piece.name not in sent]
        check_apart(self._pieces)
        self._memory = memory
        self._staged: list[Piece] = []
        self._begun = False
        self._exchanged: list[int] = []

    def specs(self) -> Sequence[TensorSpec]:
        return self._sink.specs()

    def begin(self, version: int) -> None:
        """Takes the memory of the second copy, all or none of it; the engine goes on."""
        devices = (piece.tensor.device for piece in self._pieces if piece.tensor is not None)
        device = next(devices, torch.device("cpu"))
        try:
            for name, box, _ in self._pieces:
                kept = self._memory.get((name, box))
                wanted = (sizes_of(box), self._spec[name].torch_dtype, device)
                if kept is None or (tuple(kept.shape), kept.dtype, kept.device) != wanted:
                    kept = torch.empty(wanted[0], dtype=wanted[1], device=device)
                    self._memory[name, box] = kept
                self._staged.append(Piece(name, box, kept))
        except BaseException:
            self._memory.clear()
            self._staged.clear()
            raise

    def pieces(self) -> Sequence[Piece]:
        """The second copy, and what it leaves as it is."""
        return [*self._staged, *self._others]

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        raise NotImplementedError("all is written in place")

    def finish(self, version: int) -> None:
        """Exchanges the two copies; the engine must not generate."""
        self._sink.begin(version)
        self._begun = True
        self._mark_torn()
        for index, (name, _, target) in enumerate(self._pieces):
            new = self._staged[index].tensor
            assert new is not None
            if target is not None:
                _swap(new, target.detach())
                self._exchanged.append(index)
                continue
            [(_, installed)] = self._sink.read([name])
            if installed is None:  # `fail` of the sink gives it back
                self._put(index, new)
                continue
            before = installed.clone()
            self._staged[index] = self._staged[index]._replace(tensor=before)
            self._exchanged.append(index)  # from here on there is something to restore
            self._put(index, new)
            self._staged[index] = self._staged[index]._replace(tensor=new.copy_(before))
        self._sink.finish(version)

    def fail(self) -> None:
        """Gives the engine back what it had, if anything was taken."""
        if not self._begun:
            return
        self._begun = False
        self._sink.fail()
        self._sink.begin(self._before)
        for index in reversed(self._exchanged):  # those that overlap, too
            before = self._staged[index].tensor
            assert before is not None
            self._put(index, before)
        self._exchanged = []
        self._sink.finish(self._before)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        return self._sink.read(names)

    def _put(self, index: int, tensor: torch.Tensor) -> None:
        name, _, target = self._pieces[index]
        if target is not None:
            target.detach().copy_(tensor)
        elif tensor.numel():
            self._sink.write(name, 0, tensor.reshape(-1), of=self._spec[name])


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchanges the elements of two tensors of one shape, some of them at a time."""
    step = _SWAPPED if one.device.type == "cpu" else _SWAPPED_ON_DEVICE
    if other.is_contiguous():
        one, other = one.view(-1), other.view(-1)
    some = -(-one.numel() // step)
    pairs = [(one, other)] if some == 1 else zip(one.chunk(some), other.chunk(some), strict=True)
    for a, b in pairs:
        kept = a.clone()
        a.copy_(b)
        b.copy_(kept)
