"""Rank 0: tells the others what to do, and knows who is missing."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rl_core import errors
from rl_core.errors import (
    CapabilityError,
    LifecycleError,
    RefitError,
    RefitPeerError,
    RLError,
)
from rl_core.refit.options import DEFAULT_DEADLINE_S
from rl_core.refit.ranks._peers import (
    Close,
    Confirm,
    Done,
    Failed,
    Gather,
    Go,
    Hello,
    Message,
    Peer,
    Ready,
    decode,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rl_core.refit.ranks._thread import RefitThread
    from rl_core.refit.transports.control import ControlServer

__all__ = ["Leader"]

#: Seconds between looks at who is still there.
_LOOK_S = 0.05
#: Seconds for which a process that never came may be stopped.
_STOPPED_S = 3.0
#: Seconds in which a failure may turn out to be the consequence of another rank's end.
_DOUBT_S = 0.5
#: Refits that are over and whose followers are told when they come late.
_REMEMBERED = 64

T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    """A follower in one refit."""

    key: str
    ready: int = 0
    done: int = 0
    failed: Failed | None = None
    lost: bool = False

    @property
    def gone(self) -> bool:
        """Whether it left without a word; one that failed says so, and then leaves."""
        return self.lost and self.failed is None


@dataclass(slots=True)
class _Call:
    """One refit.

    Attributes:
        members: Those who have come, by rank.
        deadline: When it must have ended.
        seconds: How long it may take.
        confirmed: All that was asked for is done, and of one state.
    """

    members: dict[int, _Member] = field(default_factory=dict)
    deadline: float = 0.0
    seconds: float = 0.0
    confirmed: bool = False


@dataclass(slots=True)
class _Over:
    """A refit that has ended.

    Attributes:
        close: What followers are told.
        absent: Ranks that were not told yet.
    """

    close: Close
    absent: set[int]


class Leader:
    """Rank 0's side. One refit is under way at a time; the followers of later ones may be there.

    Args:
        server: Where the others connect.
        peers: All ranks; the first is this one.
        thread: Computes for refits on this rank.
    """

    def __init__(self, server: ControlServer, peers: Sequence[Peer], thread: RefitThread) -> None:
        self._server = server
        self._thread = thread
        self._peers = peers
        self._turn = threading.RLock()
        self._calls: dict[str, _Call] = {}
        self._over: OrderedDict[str, _Over] = OrderedDict()
        self._current = ""
        self._number = 0
        self._stopped: dict[int, float] = {}
        self._closed = False

    # -- one refit --------------------------------------------------------------------------------

    def open(self, name: str, deadline_s: float) -> None:
        """Begins a refit, or gives it more time."""
        with self._turn:
            self._current = name
            self._stopped.clear()  # how long somebody stood still then says nothing about now
            call = self._calls.setdefault(name, _Call())
            call.seconds, call.deadline = deadline_s, time.monotonic() + deadline_s

    def look(self) -> None:
        """Raises if a follower that takes part is gone, or has failed.

        Raises:
            RefitPeerError: It is gone; names the rank.
            RLError: What it said.
        """
        with self._turn:
            self._take(0.0)
            self._check()

    def gather(self, names: Iterable[str]) -> int:
        """Has every follower gather; the number of the question.

        They begin once all are ready. From then on every rank, this one too, does it to its end.

        Raises:
            RefitPeerError: One is gone or did not come, or this rank hangs in an earlier gather.
        """
        with self._turn:
            self._wait(lambda: [] if self._thread.idle else [0])
        number = self._ask(lambda number: Gather(number, tuple(names)), lambda m: m.ready)
        with self._turn:
            for member in self._calls[self._current].members.values():
                self._send(member.key, Go(number))
        return number

    def confirm(self) -> None:
        """Has every follower say that its part is of one state.

        Raises:
            LifecycleError: One is not.
            RefitPeerError: A follower is gone.
        """
        self._ask(Confirm, lambda m: m.done)
        self._calls[self._current].confirmed = True

    def wait_for(self, future: concurrent.futures.Future[T], number: int, what: str) -> T:
        """What this rank's own part of a question comes to.

        Raises:
            RefitPeerError: A follower is gone, or some do not end theirs; names them.
        """
        while not concurrent.futures.wait([future], _LOOK_S).done:
            self.look()
            call = self._calls[self._current]
            if self._time_left(call) <= 0:
                late = [rank for rank, m in call.members.items() if m.done < number]
                raise self._late(late or [0], f"did not gather {what}", call)
        if (error := future.exception()) is not None:
            self._doubt(error)
        return future.result()

    def dismiss(self, name: str, reason: str = "") -> None:
        """Ends a refit, which may not have begun here, also for followers who come later."""
        with self._turn:
            if self._closed or name in self._over:
                return
            call = self._calls.pop(name, None) or _Call()
            early = "" if call.confirmed else reason or "it ended before all was read"
            over = self._over[name] = _Over(Close(early), set(range(1, len(self._peers))))
            while len(self._over) > _REMEMBERED:
                self._over.popitem(last=False)
            for rank, member in call.members.items():
                over.absent.discard(rank)
                self._send(member.key, over.close)
            if self._current == name:
                self._current = ""
            if over.absent:
                end = max(call.deadline, time.monotonic() + DEFAULT_DEADLINE_S)
                threading.Thread(
                    target=self._see_off, args=(over, end), name="refit-late", daemon=True
                ).start()

    def end(self) -> None:
        """Closes the connections to all followers."""
        with self._turn:
            self._closed = True
            self._server.close()

    # -- inside -----------------------------------------------------------------------------------

    def _ask(self, question: Callable[[int], Message], answer: Callable[[_Member], int]) -> int:
        """Asks all followers; returns when each has answered."""
        with self._turn:
            call = self._calls[self._current]
            self._number += 1
            others = range(1, len(self._peers))
            self._wait(lambda: [rank for rank in others if rank not in call.members])
            for member in call.members.values():
                self._send(member.key, question(self._number))
            self._wait(lambda: [r for r, m in call.members.items() if answer(m) < self._number])
            return self._number

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Until nobody is missing."""
        call = self._calls[self._current]
        while late := missing():
            self._take(_LOOK_S)
            self._check()
            self._check_absent(set(late) - {0, *call.members})
            if self._time_left(call) <= 0 and (late := missing()):
                here = [rank for rank in late if rank in (0, *call.members)]
                what = "did not answer" if here else "did not come to the refit"
                raise self._late(here or late, what, call)

    def _time_left(self, call: _Call) -> float:
        """Seconds in which to wait; what is left then is for saying who was late."""
        return call.deadline - min(1.0, call.seconds / 10) - time.monotonic()

    def _take(self, timeout_s: float) -> None:
        """Takes note of all that the followers said, and of who is gone."""
        if self._closed:
            raise LifecycleError("the ranks' refits are closed", fix="build a new policy")
        for key, frame in self._server.receive(timeout_s):
            try:
                self._sort(key, decode(frame))
            except msgspec.MsgspecError as error:
                raise RefitError(
                    f"a rank said what is no message: {error}",
                    fix="install the same rl-core for all ranks",
                ) from error
        for key in self._server.departed():
            for call in self._calls.values():
                for member in call.members.values():
                    member.lost |= member.key == key

    def _sort(self, key: str, message: Message) -> None:
        if isinstance(message, Hello):
            if (over := self._over.get(message.call)) is not None:
                over.absent.discard(message.rank)
                self._send(key, over.close)
            elif 0 < message.rank < len(self._peers):
                call = self._calls.setdefault(message.call, _Call())
                call.members[message.rank] = _Member(key)
            return
        for call in self._calls.values():
            for rank, member in call.members.items():
                if member.key != key:
                    continue
                if isinstance(message, Ready):
                    member.ready = message.number
                elif isinstance(message, Done):
                    member.done = message.number
                elif isinstance(message, Failed):
                    member.failed = message
                    if message.out_of_step:
                        why = f"on {self._peers[rank]}: {message.kind}: {message.message}"
                        self._thread.out_of_step = self._thread.out_of_step or why

    def _check(self) -> None:
        call = self._calls.get(self._current)
        if call is None:
            return
        if any(member.failed is not None for member in call.members.values()):
            self._doubt(None)
        for rank, member in call.members.items():
            if member.gone:
                raise self._peers[rank].lost()
        for rank, member in call.members.items():
            if member.failed is not None:
                raise _error_of(member.failed, str(self._peers[rank]), rank)

    def _doubt(self, cause: BaseException | None) -> None:
        """After a failure: raises for a rank that is gone, if that is why.

        A collective that lost a peer fails on all ranks, which then cannot say who is gone.
        """
        end = time.monotonic() + _DOUBT_S
        with self._turn:
            call = self._calls[self._current]
            while time.monotonic() < end:
                self._take(_LOOK_S)
                for rank, member in call.members.items():
                    if member.gone or self._peers[rank].state() == "ended":
                        raise self._peers[rank].lost() from cause
            if cause is not None:
                self._check()

    def _check_absent(self, absent: set[int]) -> None:
        """Raises for a follower that did not come and, as can be seen, will not."""
        now = time.monotonic()
        for rank in absent:
            state = self._peers[rank].state()
            if state != "stopped":
                self._stopped.pop(rank, None)
            elif now - self._stopped.setdefault(rank, now) > _STOPPED_S:
                raise self._peers[rank].lost()
            if state == "ended":
                raise self._peers[rank].lost()

    def _late(self, ranks: list[int], what: str, call: _Call) -> RefitPeerError:
        ranks = sorted(ranks)  # in whichever order they came
        names = " and ".join(str(self._peers[rank]) for rank in ranks)
        return RefitPeerError(
            f"{names} {what} in time for the refit's deadline of {call.seconds:g} s",
            fix="look at what that worker does (its log, py-spy); call every rank for a refit",
            peer=" and ".join(f"rank {rank}" for rank in ranks),
            rank=ranks[0],
        )

    def _send(self, key: str, message: Message) -> None:
        self._server.send(key, msgspec.msgpack.encode(message))  # who is gone is found missing

    def _see_off(self, over: _Over, end: float) -> None:
        """Tells followers who come late that their refit is over."""
        while over.absent and time.monotonic() < end:
            time.sleep(_LOOK_S)
            with self._turn:
                if self._closed:
                    return
                self._take(0.0)


def _error_of(failed: Failed, who: str, rank: int) -> RLError:
    """What a follower said, as an error of the same class where that says more."""
    found: Any = getattr(errors, failed.kind, None) if failed.kind in errors.__all__ else None
    known = RefitError | CapabilityError | LifecycleError
    kind = found if isinstance(found, type) and issubclass(found, known) else RefitPeerError
    error: RLError = kind(
        f"{who} failed: {failed.kind}: {failed.message}",
        fix=failed.fix,
        peer=f"rank {rank}",
        rank=rank,
    )
    return error
