"""What refits need of a trainer's ranks; :mod:`rl_backends.ranks` implements it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_core.errors import RLError
    from rl_core.weights.protocol.messages import Abort, Over
    from rl_core.weights.transports.base import SenderEnd
    from rl_core.weights.transports.control import ControlClient

__all__ = ["Ranks"]


class Ranks(ABC):
    """The ranks of one trainer, as one of them knows them, for the trainer's whole life.

    Attributes:
        rank: This one; rank 0 decides on refits.
        token: The secret that messages between them are authenticated with.
        pid: Of this process.
        host: Distinguishes processes on different hosts that have this pid. Its first word is the
            ``host`` that engines there send in ``Ready``.
    """

    rank: int
    token: str
    pid: int
    host: str

    @property
    @abstractmethod
    def names(self) -> Sequence[str]:
        """What errors call them, by rank."""

    @abstractmethod
    def lost(self, rank: int) -> RLError:
        """The error for the end of a rank, now that its connection is lost."""

    @abstractmethod
    def connect(self) -> ControlClient:
        """On another rank: a new end for connections to rank 0."""

    # -- rank 0's connections to the others -------------------------------------------------------

    @abstractmethod
    def begin(self, number: int) -> None:
        """This refit reads what arrives from now on, until its :meth:`end`."""

    @abstractmethod
    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Frames, each with its connection; waits for the first.

        Raises:
            LifecycleError: They were closed.
        """

    @abstractmethod
    def wait(self, end: SenderEnd, timeout_s: float) -> None:
        """Until a frame or a loss is there to be received, here or at ``end``, or for so long."""

    @abstractmethod
    def send(self, key: str, frame: bytes) -> bool:
        """Sends to one connection; False if it was lost."""

    @abstractmethod
    def departed(self) -> list[str]:
        """Connections that were lost since the last call."""

    @abstractmethod
    def has(self, key: str) -> bool:
        """Whether a connection is of a rank, and not of a receiver."""

    @abstractmethod
    def ended(self) -> list[int]:
        """Other ranks of which the process has ended, as far as that is known here."""

    @abstractmethod
    def introduce(self, rank: int, pid: int, host: str) -> None:
        """A rank is this process."""

    @abstractmethod
    def check_state(self, rank: int, theirs: int, ours: int) -> None:
        """Raises LifecycleError unless a rank's :attr:`WeightSource.state` fits rank 0's."""

    @abstractmethod
    def end(
        self, number: int, message: Over | Abort, here: Mapping[int, str], late: set[int]
    ) -> None:
        """A refit has ended, or never began; also those who come to it later learn how.

        Args:
            number: Of the refit.
            message: How it ended.
            here: The other ranks that have got it, and their connections.
            late: Ranks that were given up, which may never come to it.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the connections. Idempotent."""
