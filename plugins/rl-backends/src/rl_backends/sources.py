"""What a refit reads of a policy: tensors of one state, under the names of the checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import ConfigError
from rl_core.interfaces import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from rl_core.interfaces import Piece, TensorSpec


class GuardedSource(WeightSource):
    """Another source, which raises as soon as the weights behind it change.

    Args:
        source: Gives the tensors under the trainer's names.
        unchanged: Raises LifecycleError if the weights have changed since the source was made; it
            takes a text that names where the refit is (such as ``", at lm_head.weight"``).
        rename: Gives a tensor its new name, or None to leave it out. Of tensors that are tied to
            one that is left out, the first then stands for it.
        state: Gives :attr:`WeightSource.state`, if the source does not.
    """

    def __init__(
        self,
        source: WeightSource,
        unchanged: Callable[..., None],
        rename: Callable[[str], str | None] = str,
        state: Callable[[], int] | None = None,
    ) -> None:
        self._state = state
        self.device = source.device
        self._source = source
        self._unchanged = unchanged
        self._rename = rename
        self._old: dict[str, str] = {}  # by new name
        self._owner: dict[str, str] = {}  # the old name of what the refit reads, by new name
        self._specs: list[TensorSpec] = []

    @property
    def state(self) -> int:  # type: ignore[override]
        """See :attr:`WeightSource.state`; raises LifecycleError if the weights have changed."""
        self._unchanged()
        return self._source.state if self._state is None else self._state()

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        if self._specs:
            return self._specs
        owners: dict[str, str] = {}  # new names, by the old one of the owner
        for spec in self._source.specs():
            name = self._rename(spec.name)
            if name is None:
                continue
            if name in self._old:
                raise ConfigError(
                    f"refit: {self._old[name]} and {spec.name} would both be called {name!r}",
                    fix="give every tensor a different name, or None to leave it out",
                    key="rename",
                )
            owner = spec.alias_of or spec.name
            self._old[name], self._owner[name] = spec.name, owner
            first = owners.setdefault(owner, name)
            alias_of = None if first == name else first
            self._specs.append(msgspec.structs.replace(spec, name=name, alias_of=alias_of))
        return self._specs

    def open(self, number: int, deadline_s: float) -> None:
        """See :meth:`WeightSource.open`."""
        self._source.open(number, deadline_s)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        self.specs()
        new = {self._owner[name]: name for name in names}
        for old, tensor in self._source.tensors(list(new)):
            name = new.get(old, old)
            self._unchanged(f", at {name}")
            yield name, tensor
            self._unchanged(f", at {name}")

    def pieces(self) -> Sequence[Piece] | None:
        """See :meth:`WeightSource.pieces`."""
        self.specs()
        pieces = self._source.pieces()
        if pieces is None:
            return None
        of: dict[str, list[Piece]] = {}
        for piece in pieces:
            of.setdefault(piece.name, []).append(piece)
        return [
            piece._replace(name=name)
            for name, old in self._old.items()
            for piece in of.get(old) or of.get(self._owner[name], [])
        ]

    def memory_users(self) -> Sequence[torch.Tensor]:
        """See :meth:`WeightSource.memory_users`."""
        return self._source.memory_users()

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._unchanged()
        self._source.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._source.close()
