"""A model's weights for refits: every rank gives the boxes that it has, where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from rl_backends.tensors import dtype_name
from rl_core.errors import RefitError
from rl_core.interfaces import Piece, TensorSpec, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_backends.changes import WeightChanges
    from rl_core.interfaces import Box
    from rl_megatron.table import Table
    from rl_megatron.weights import Owned

__all__ = ["MegatronSource", "RankTensors"]


@dataclass(frozen=True, slots=True)
class RankTensors:
    """What one rank gives to refits; made once, so that all of them see the same tensor objects.

    Attributes:
        specs: Of the whole tensors, the same on all ranks.
        pieces: This rank's boxes of them, as views of its parameters. Ranks that have the same
            elements have the same values, and all give them: copies of the model, tensor-parallel
            ranks of what is not split, and the last stage of an output layer that is tied to the
            embedding, where both take the same steps, with the sum of their gradients.
    """

    specs: Sequence[TensorSpec]
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, table: Table, owned: Sequence[Owned]) -> Self:
        """Of a rank's parameters, which keep their memory as long as the model lives.

        Args:
            table: Of the model, with the names that engines know.
            owned: This rank's pieces of it.
        """
        dtype = dtype_name(owned[0].parameter.dtype)
        specs = {name: TensorSpec(name, shape, dtype) for name, shape in table.shapes().items()}
        if table.tied is not None:
            embedding, output = table.tied
            specs[output] = TensorSpec(output, specs[embedding].shape, dtype, alias_of=embedding)
        pieces = [
            Piece(one.piece.name, box, view)
            for one in owned
            for box, view in one.piece.views(one.parameter.detach())
        ]
        return cls(list(specs.values()), pieces)


class MegatronSource(WeightSource):
    """The tensors of a model as they are now, under the names of a checkpoint.

    Args:
        tensors: Of this rank.
        changes: Of this rank's weights.
        memory_users: See :meth:`WeightSource.memory_users`.

    Raises:
        LifecycleError: A change of the weights failed midway.
    """

    def __init__(
        self,
        tensors: RankTensors,
        changes: WeightChanges,
        memory_users: Callable[[], Sequence[torch.Tensor]] = tuple,
    ) -> None:
        self._tensors = tensors
        self._memory_users = memory_users
        self._unchanged = changes.watch()
        self._of: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for name, box, view in tensors.pieces:
            if view is not None:
                self._of.setdefault(name, []).append((box, view))
                self.device = str(view.device)

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._tensors.specs

    def pieces(self) -> Sequence[Piece]:
        """See :meth:`WeightSource.pieces`."""
        return self._tensors.pieces

    def memory_users(self) -> Sequence[torch.Tensor]:
        """See :meth:`WeightSource.memory_users`."""
        return self._memory_users()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`; those that this rank has all of.

        Raises:
            RefitError: Other ranks have parts of a tensor.
            LifecycleError: The weights have changed since this was made.
        """
        self._unchanged()
        specs = {spec.name: spec for spec in self.specs()}
        for name in names:
            spec, found = specs[name], self._of.get(name, [])
            if sum(view.numel() for _, view in found) != spec.numel:
                raise RefitError(
                    f"{name} cannot be read from one rank: others have parts of it",
                    fix="read pieces() of the sources of all ranks",
                )
            [(_, whole), *more] = found
            if more:
                whole = torch.empty(spec.shape, dtype=whole.dtype, device=whole.device)
                for box, view in found:
                    whole[tuple(slice(*ends) for ends in box)] = view
            yield name, whole

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._unchanged()
