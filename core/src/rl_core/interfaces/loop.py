"""What training loops bring along and ask for, besides what they compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

__all__ = ["AxisSizes", "Timer"]


class Timer(Protocol):
    """A loop's stopwatch; what it does with the times is its own."""

    def time(self, label: str) -> AbstractContextManager[object]:
        """Measures what is done in the body, under a label such as ``"get_logprobs"``."""


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Into how many parts a trainer divides what, by axis."""

    sizes: Mapping[str, int]

    def get_axis_size(self, axis: str) -> int:
        """The number of parts along an axis, such as ``"data_parallel"``.

        Raises:
            ConfigError: There is no such axis.
        """
        if axis not in self.sizes:
            raise ConfigError(
                f"the trainer has no axis {axis!r}", fix=f"ask for one of {sorted(self.sizes)}"
            )
        return self.sizes[axis]
