"""Whether a policy's weights changed while a refit read them: what was read is then a mixture."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rl_core.backends._sources import WrappedSource
from rl_core.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    import torch

    from rl_core.interfaces import WeightSource

__all__ = ["GuardedSource", "WeightChanges"]


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


class GuardedSource(WrappedSource):
    """Another source, which raises as soon as the weights behind it change.

    Args:
        source: Gives the tensors.
        check: What :meth:`WeightChanges.watch` returned when the source was made.
    """

    def __init__(self, source: WeightSource, check: Callable[..., None]) -> None:
        super().__init__(source)
        self._unchanged = check

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            LifecycleError: The weights changed since this source was made.
        """
        for name, tensor in super().tensors(names):
            self._unchanged(f", at {name}")
            yield name, tensor
            self._unchanged(f", at {name}")

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._unchanged()
        super().confirm()
