"""What a refit reads of a policy: tensors of one state, under the names of the checkpoint."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import LifecycleError
from rl_core.interfaces import WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    import torch

    from rl_core.interfaces import TensorSpec


class WeightChanges:
    """Knows of every change of a policy's weights that is declared to it."""

    def __init__(self) -> None:
        self._going_on = 0
        self._ended = 0

    @contextmanager
    def declared(self) -> Generator[None]:
        """The weights may change in the body, also if they are put back at its end."""
        self._going_on += 1
        try:
            yield
        finally:
            self._ended += 1
            self._going_on -= 1

    def watch(self) -> Callable[..., None]:
        """Returns a check for changes since now.

        The check takes a text that says where a refit is (such as ``", at lm_head.weight"``), and
        raises :class:`LifecycleError` if a change began, ended or is going on.
        """
        before = self._ended

        def check(place: str = "") -> None:
            if self._going_on or self._ended != before:
                raise LifecycleError(
                    f"the policy's weights changed during a refit{place}",
                    fix="wait for the refit's futures before training, scoring the reference or "
                    "loading a checkpoint",
                )

        return check


class GuardedSource(WeightSource):
    """Another source, which raises as soon as the weights behind it change.

    Args:
        source: Gives the tensors under the trainer's names.
        unchanged: What :meth:`WeightChanges.watch` returned when the source was made.
        names: The new name of each tensor that gets one; no two tensors may then have one name.
    """

    def __init__(
        self, source: WeightSource, unchanged: Callable[..., None], names: Mapping[str, str]
    ) -> None:
        self.device = source.device
        self._source = source
        self._unchanged = unchanged
        self._new = names
        self._old = {new: old for old, new in names.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        new = self._new
        return [
            msgspec.structs.replace(
                spec,
                name=new.get(spec.name, spec.name),
                alias_of=spec.alias_of and new.get(spec.alias_of, spec.alias_of),
            )
            for spec in self._source.specs()
        ]

    def open(self, rank_call_id: str, deadline_s: float) -> None:
        """See :meth:`WeightSource.open`."""
        self._source.open(rank_call_id, deadline_s)

    def check(self) -> None:
        """See :meth:`WeightSource.check`."""
        self._source.check()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            LifecycleError: The weights changed since this source was made.
        """
        old = [self._old.get(name, name) for name in names]
        for name, tensor in self._source.tensors(old):
            self._unchanged(f", at {name}")
            yield self._new.get(name, name), tensor
            self._unchanged(f", at {name}")

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        tensors = self._source.persistent()
        if tensors is None:
            return None
        return {self._new.get(name, name): tensor for name, tensor in tensors.items()}

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._unchanged()
        self._source.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._source.close()
