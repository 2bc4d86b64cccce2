"""What a transport is: control messages between one sender and its receivers, and bytes.

A transport is found by its name in the entry-point group ``rl_core.transports``; the entry is an
instance of :class:`Transport`. The session decides what is sent and when; a transport only moves
frames, and makes bytes that the sender wrote to its :class:`Lane` appear in the receivers'.

Both ends state whether the transport is ``private``: whether nobody but processes of this user on
this host can change the bytes of a lane, whatever happens on any network. Then digests need only
see faults, and the fastest hash is taken. Otherwise, and that is the default of an end, they
are keyed with the trainer's secret. Memory that only this user can open is private. A network is
not, nor is a connection that is encrypted without proof of who the peer is.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_core.weights.data.plan import Runs

CPU = torch.device("cpu")

__all__ = [
    "CPU",
    "Lane",
    "NoLane",
    "RankEnd",
    "ReceiverEnd",
    "SenderEnd",
    "Transport",
    "refuse_options",
]


class Lane(ABC):
    """One end of a stretch of bytes that a sender fills and receivers read.

    Either side keeps its end from refit to refit. What ends that, by kind of memory::

        event                     | shared (ipc, CPU) | GPU (ipc)        | group (collective)
        --------------------------+-------------------+------------------+-------------------
        packed: a refit fails     | sender closes     | sender closes    | both close
        direct: a refit fails     | both keep         | sender keeps     | (never direct)
        direct: a refit ends      | both keep         | receiver closes  |
        direct: the sender's      | receiver closes   | (closed already) |
          memory is gone          |                   |                  |
        other receivers take part | sender keeps      | sender keeps     | sender closes

    A sender that closed its end makes another for the next refit, and a receiver attaches to that.
    Lanes are ``direct`` where tensors of the trainer are moved into them, to stay: for each one
    :meth:`allocate_view`, after the last :meth:`free_old_memory`.

    Attributes:
        data: The bytes on this side, uint8 ``[nbytes]``; allocated and touched once.
        ends: When the refit that uses the lane is over at the latest, by :func:`time.monotonic`.
        ref: Plain data from which a receiver attaches; sent inside an authenticated message.
        reusable_after_failure: A refit that fails leaves the lane as good as new.
        unmap_after_each_refit: The sender cannot free the memory while a receiver is attached. If
            it is the trainer's own (``direct``), receivers attach for one refit at a time.
    """

    data: torch.Tensor
    ends: float = math.inf
    ref: Mapping[str, Any]
    reusable_after_failure: ClassVar[bool] = True
    unmap_after_each_refit: ClassVar[bool] = False

    def serves(self, receivers: Sequence[str]) -> bool:
        """Sender: whether just these receivers can use the lane as it is."""
        return True

    def allocate_view(self, start: int, stop: int) -> torch.Tensor:
        """Sender: some of the bytes, had now, as a tensor that owns its storage if it can.

        Raises:
            RefitError: There is not enough memory for them.
        """
        return self.data[start:stop]

    def free_old_memory(self) -> None:
        """Sender: all tensors were moved in; frees the memory that they left."""

    def publish(self, start: int, stop: int, runs: Mapping[str, Runs] = {}) -> None:
        """Sender: these bytes are written; lets the receivers have them. Does not wait.

        ``runs`` are those that each receiver reads, by its id; empty if all of them read all.
        """

    def expect(self, start: int, stop: int, runs: Runs | None = None) -> None:
        """Receiver: these bytes were announced and their place here is free. Does not wait.

        ``runs`` are those that this one reads; None if all receivers read all.
        """

    def arrived(self) -> bool:
        """Receiver: whether what was expected first, and not yet released, is here.

        Raises:
            RefitPeerError: It will not come any more.
        """
        return True

    def release(self) -> None:
        """Receiver: all that was copied from the first expected bytes is done with."""

    def sender_gone(self) -> bool:
        """Receiver: whether the sender has released the memory, as far as that can be seen."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Releases this side's memory; who waits on the other side for bytes is unblocked.

        Idempotent.
        """


class NoLane(Lane):
    """The lane of a refit in which nothing is sent."""

    def __init__(self) -> None:
        self.data = torch.empty(0, dtype=torch.uint8)
        self.ref = {}

    def close(self) -> None:
        """There is nothing to close."""


class RankEnd(ABC):
    """Where a rank of the trainer makes its lanes.

    Attributes:
        reads_memory: Receivers read the sender's own memory: what ``direct`` needs.
        private: Only this user's processes on this host reach a lane's bytes.
        reason_not_shareable: Why it cannot share memory of the GPU, see :meth:`lane_device`.
    """

    reason_not_shareable: str | None = None
    reads_memory: ClassVar[bool] = False
    private: ClassVar[bool] = False

    def lane_device(self, device: torch.device, gpus: Sequence[Sequence[str]]) -> torch.device:
        """Where a lane is made for tensors on ``device``.

        Args:
            device: The sender's.
            gpus: UUIDs of the GPUs that each receiver sees, that of its tensors first; empty for
                one with its tensors on no GPU.

        Returns:
            ``device`` itself if the receivers can reach what lies there, else the CPU.
        """
        return CPU

    @abstractmethod
    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> Lane:
        """New memory that these receivers can attach to.

        Args:
            nbytes: At least 1.
            device: Where the sender's tensors are.
            receivers: Their ids, as in ``Hello``. Bytes for one alone go to the first one first.
            direct: Tensors are moved in one by one with :meth:`Lane.allocate_view`, so that memory
                which can grow as they come need not be had at once. Nothing else is written.

        Raises:
            RefitError: There is not enough memory.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends everything and leaves nothing behind. Idempotent."""


class SenderEnd(RankEnd):
    """Rank 0's end, which also exchanges messages with any number of receivers.

    Attributes:
        address: Plain data from which receivers connect; travels in ``prepare_refit_info``.
    """

    address: Mapping[str, Any]

    @abstractmethod
    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Frames that are there, each with its connection; waits for the first."""

    @abstractmethod
    def send(self, key: str, frame: bytes) -> bool:
        """Sends to one connection; False if it was lost."""

    @abstractmethod
    def departed(self) -> list[str]:
        """Connections that were lost since the last call."""

    def refused(self) -> str | None:
        """Why a receiver that cannot connect here will not come; None if no receiver sent that."""
        return None

    def check_room(self) -> None:
        """Raises RefitError if this process lacks what connections of receivers take."""

    def rendezvous(self, deadline_s: float) -> None:
        """Waits for the receivers that :attr:`address` alone does not bring here.

        Raises:
            DeadlineError: Names who is missing.
        """


class ReceiverEnd(ABC):
    """A receiver's end of a transport, for its whole life.

    Attributes:
        private: As of the sender's end, and the same.
    """

    private: ClassVar[bool] = False

    def rendezvous(self, deadline_s: float) -> None:
        """Waits for the sender, where that must be done before the first refit.

        Raises:
            DeadlineError: It did not come.
        """

    def refuse(self, why: str) -> None:
        """Tells a sender that may wait that this side will not come, where there is a way."""

    @abstractmethod
    def connect(self, address: Mapping[str, Any]) -> None:
        """Begins a refit: a new connection, on which nothing of earlier refits arrives.

        Args:
            address: The sender's, as its ``prepare_refit_info`` has it; this end may have been made
                with less.

        Raises:
            RefitPeerError: The sender is not there.
        """

    @abstractmethod
    def disconnect(self) -> None:
        """Ends it, once what was sent is delivered or a moment has passed. Idempotent."""

    @abstractmethod
    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame, or None after the timeout."""

    @abstractmethod
    def send(self, frame: bytes) -> None:
        """Sends a frame."""

    @abstractmethod
    def lost(self) -> bool:
        """Whether the sender's process died, or does not answer."""

    @abstractmethod
    def attach(self, ref: Mapping[str, Any], receiver: str, device: torch.device = CPU) -> Lane:
        """This side of the sender's lane, which the caller keeps as long as ``ref`` is the same.

        Args:
            ref: As the sender gave it.
            receiver: This receiver's id.
            device: Where the engine's tensors are.

        Raises:
            RefitProtocolError: It is not there, or is not what ``ref`` describes.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends everything and leaves nothing behind. Idempotent."""


class Transport(ABC):
    """Makes both ends of one kind of transport."""

    @abstractmethod
    def sender(self, **options: Any) -> SenderEnd:
        """The sender's end.

        Raises:
            ConfigError: An option is unknown or not legal.
        """

    @abstractmethod
    def receiver(self, address: Mapping[str, Any], **options: Any) -> ReceiverEnd:
        """A receiver's end for the sender of :attr:`SenderEnd.address`, or of a part of it.

        Raises:
            RefitProtocolError: The address is malformed.
        """

    @abstractmethod
    def rank(self, address: Mapping[str, Any]) -> RankEnd:
        """The end of another rank of the trainer.

        Args:
            address: :attr:`SenderEnd.address` of rank 0.
        """

    def remove_leftovers(self, address: Mapping[str, Any]) -> None:
        """Removes what a sender that was killed left behind there; nothing of one that lives.

        Raises:
            RefitProtocolError: The address is malformed.
        """


def refuse_options(who: str, options: Mapping[str, Any]) -> None:
    """Raises ConfigError for the first of the options, where ``who`` takes none."""
    for key in options:
        raise ConfigError(f"{who} has no option {key!r}", fix=f"remove {key!r}", key=key)
