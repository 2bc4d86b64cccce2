"""The ranks of a trainer: which process each one is, and rank 0's connections to the others."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import LifecycleError, RefitError, RefitPeerError, RefitProtocolError
from rl_core.futures import spawn
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.protocol.frames import Channel, read_hello
from rl_core.weights.protocol.messages import Abort
from rl_core.weights.protocol.timing import EXIT_VISIBLE_S, TICK_S
from rl_core.weights.sending.ranks import Ranks
from rl_core.weights.transports.control import ControlClient
from rl_core.weights.transports.ipc import boot_id

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_core.weights.protocol.messages import Over
    from rl_core.weights.transports.base import SenderEnd
    from rl_core.weights.transports.control import ControlServer

__all__ = ["ConnectedRanks", "RankProcess"]

#: Ends of refits that are kept for ranks that come to them late.
_ENDS = 64
#: What tells connections of ranks from those of receivers.
_RANK = "rank-"


class RankProcess(msgspec.Struct, frozen=True):
    """The process of one rank.

    Attributes:
        rank: Its number.
        size: How many there are.
        pid: Its process; 0 where it is not known.
        host: Distinguishes processes on different hosts that have this pid.
        endpoint: Where rank 0 listens.
        key: With which one is let in there.
        token: The secret that messages are authenticated with.
    """

    rank: int
    size: int
    pid: int = 0
    host: str = ""
    endpoint: str = ""
    key: str = ""
    token: str = ""

    @classmethod
    def here(
        cls, rank: int, size: int, endpoint: str = "", key: str = "", token: str = ""
    ) -> RankProcess:
        """This process."""
        return cls(rank, size, os.getpid(), host_name(), endpoint, key, token)

    def __str__(self) -> str:
        process = f" (process {self.pid})" if self.pid else ""
        return f"rank {self.rank} of {self.size}{process}"

    def state(self) -> str:
        """``"ended"``, ``"stopped"`` or ``"runs"``; empty if it is on another host."""
        if self.host != host_name():
            return ""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return "ended"
        letter = text.rpartition(")")[2].split()[0]
        return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(letter, "runs")

    def describe_state(self) -> str:
        """What became of it, now that its connection is lost."""
        end = time.monotonic() + EXIT_VISIBLE_S
        while (state := self.state()) == "runs" and time.monotonic() < end:
            time.sleep(0.01)
        return {
            "ended": "has ended",
            "stopped": "does not answer: its process is stopped",
            "runs": "does not answer",
        }.get(state, "has ended or does not answer")

    def lost(self) -> RefitPeerError:
        """The error for its end, now that its connection is lost."""
        return RefitPeerError(
            f"{self} {self.describe_state()}",
            fix="look at that worker's log; if its process has ended, build the policy again",
            peer=f"rank {self.rank}",
            rank=self.rank,
        )

    def in_another_state(self, state: int, first: int) -> LifecycleError:
        """The error for its weights, which are of another state than rank 0's."""
        return LifecycleError(
            f"{self} has changed its weights {state} times, rank 0 {first} times: their weights "
            "are not parts of one model",
            fix="load one checkpoint on all ranks, into a new module if it is your own, or build "
            "the policy again; then look for a call that failed or was not made on one rank",
            peer=f"rank {self.rank}",
            rank=self.rank,
        )


class ConnectedRanks(Ranks):
    """The ranks of one trainer, as one of them knows them, for the trainer's whole life.

    Args:
        rank: This one; rank 0 decides.
        processes: Those of all ranks, by rank. Those of ranks that rank 0 does not know yet have no
            ``pid``: they introduce themselves.
        server: Where rank 0 listens, on rank 0.
        count_alike: The ranks count the states of their weights from one moment on.

    Attributes:
        rank: As given.
        processes: As given.
    """

    def __init__(
        self,
        rank: int,
        processes: Sequence[RankProcess],
        server: ControlServer | None = None,
        *,
        count_alike: bool = True,
    ) -> None:
        self.rank = rank
        self._count_alike = count_alike
        self.processes = list(processes)
        self.token = self.leader.token
        self.pid, self.host = os.getpid(), host_name()
        #: By how much rank 0's state was ahead at first, of ranks that count from elsewhere.
        self._ahead: dict[int, int] = {}
        self._server = server
        self._turn = threading.RLock()  # of the server
        self._sending = 0  # the refit that reads what arrives
        self._ends: dict[int, Over | Abort] = {}
        self._sees_off = False  # a thread does
        self._until = 0.0
        self._absent: dict[int, set[int]] = {}  # who is yet to come to a refit that has ended
        _alive.add(self)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.processes)

    @property
    def leader(self) -> RankProcess:
        """Rank 0."""
        return self.processes[0]

    @property
    def names(self) -> list[str]:
        """See :attr:`Ranks.names`."""
        return list(map(str, self.processes))

    def lost(self, rank: int) -> RefitPeerError:
        """See :meth:`Ranks.lost`."""
        return self.processes[rank].lost()

    def connect(self) -> ControlClient:
        """See :meth:`Ranks.connect`."""
        return ControlClient(self.leader.endpoint, self.leader.key)

    # -- rank 0 -----------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        with self._turn:
            self._sending = number

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        with self._turn:
            if self._server is None:
                raise LifecycleError("the trainer was shut down", fix="build a new one")
            found = self._server.receive(timeout_s)
            return [(_RANK + key, frame) for key, frame in found if not self._is_late(key, frame)]

    def wait(self, end: SenderEnd, timeout_s: float) -> None:
        with self._turn:
            if self._server is not None:
                self._server.wait(end, timeout_s)

    def send(self, key: str, frame: bytes) -> bool:
        with self._turn:
            return self._server is not None and self._server.send(key.removeprefix(_RANK), frame)

    def departed(self) -> list[str]:
        with self._turn:
            return [_RANK + key for key in self._server.departed()] if self._server else []

    def has(self, key: str) -> bool:
        return key.startswith(_RANK)

    def ended(self) -> list[int]:
        return [it.rank for it in self.processes[1:] if it.pid and it.state() == "ended"]

    def introduce(self, rank: int, pid: int, host: str) -> None:
        known = self.processes[rank]
        self.processes[rank] = msgspec.structs.replace(known, pid=pid, host=host)

    def check_state(self, rank: int, theirs: int, ours: int) -> None:
        if not self._count_alike:
            self._ahead.setdefault(rank, ours - theirs)
        theirs += self._ahead.get(rank, 0)
        if theirs != ours:
            raise self.processes[rank].in_another_state(theirs, ours)

    def end(
        self, number: int, message: Over | Abort, here: Mapping[int, str], late: set[int]
    ) -> None:
        with self._turn:
            if self._sending == number:
                self._sending = 0
            if self._server is None or number in self._ends:
                return
            self._ends[number] = message
            self._absent[number] = {*range(1, self.size)} - {*here} - late
            for old in [n for n in self._ends if n <= number - _ENDS]:
                del self._ends[old], self._absent[old]
            self._until = time.monotonic() + DEFAULT_DEADLINE_S
            if self._absent[number] and not self._sees_off:
                with suppress(RefitError):  # else the next refit answers who comes late
                    spawn("refit-late", self._see_off)
                    self._sees_off = True

    def close(self) -> None:
        with self._turn:
            if self._server is not None:
                self._server.close()
                self._server = None

    def _is_late(self, key: str, frame: bytes) -> bool:
        """Whether a frame is the Hello of a rank that comes to a refit which has ended; answers."""
        try:
            hello = read_hello(frame, self.token)
        except RefitProtocolError:
            return False  # who reads on reports it
        if hello is None:
            return False
        due = [n for n, its in self._absent.items() if hello.rank in its and n >= hello.number]
        if not due:
            return False
        message: Over | Abort = Abort("", "RefitAborted", "that refit is over", max(due))
        if hello.number in due:
            self._absent[hello.number].discard(hello.rank)
            message = self._ends[hello.number]
        answer = Channel(self.token, hello.nonce, "sender").encode(message)
        assert self._server is not None
        self._server.send(key, answer)
        return True

    def _see_off(self) -> None:
        """Answers ranks that come late, while no refit does."""
        while True:
            time.sleep(TICK_S)
            with self._turn:
                late = time.monotonic() > self._until or not any(self._absent.values())
                if self._server is None or late:
                    self._sees_off = False
                    return
                if not self._sending:
                    self.receive(0.0)  # what else arrives is repeated


_alive: weakref.WeakSet[ConnectedRanks] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Before sockets are destroyed under the threads that use them."""
    for ranks in list(_alive):
        ranks.close()


def host_name() -> str:
    """A name that no other host, and no other container with separate pids, has."""
    parts = [boot_id()]
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts).strip() or os.uname().nodename
