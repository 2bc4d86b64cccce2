"""Rank 0: sends the others their work, and finds out which of them is missing."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from rl_backends.gathering import messages
from rl_backends.gathering.processes import RankProcess, other_weights
from rl_core.errors import (
    CapabilityError,
    LifecycleError,
    ManifestMismatchError,
    RefitError,
    RefitPeerError,
)
from rl_core.futures import spawn
from rl_core.weights.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.protocol.session import peer_error
from rl_core.weights.protocol.timing import CAUSE_S, TICK_S, report_margin_s

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rl_backends.gathering.thread import RefitThread
    from rl_core.weights.sending.sender import RefitSender
    from rl_core.weights.transports.control import ControlServer

T = TypeVar("T")


@dataclass(slots=True)
class _Member:
    """A follower in one refit.

    Attributes:
        counts: It numbers its refits, as rank 0 does, and its states from the same one.
    """

    key: str
    counts: bool
    state: int
    specs: str
    failed: messages.RankFailed | None
    done: int = 0
    lost: bool = False

    @property
    def vanished(self) -> bool:
        """Whether its connection was lost without a report; one that fails reports that first."""
        return self.lost and self.failed is None


@dataclass(slots=True)
class _Call:
    """One refit.

    Attributes:
        members: Those who have come, by rank.
        deadline: When it must have ended.
        seconds: How long it may take.
        state: Of rank 0's weights.
        specs: Digest of rank 0's names, shapes and dtypes of the tensors.
        confirmed: Every rank has done its work, with weights of one state.
        asked: Its followers have got a question.
        close: Once it is over, the message for followers, also those that come later.
        absent: Ranks that have not got it yet.
        late: Those of them for which it was given up, so that they may never come to it.
    """

    members: dict[int, _Member] = field(default_factory=dict)
    deadline: float = 0.0
    seconds: float = 0.0
    state: int = 0
    specs: str = ""
    confirmed: bool = False
    asked: bool = False
    close: messages.Close | None = None
    absent: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)


class Leader:
    """Rank 0's side. One refit is under way at a time; the followers of later ones may be there.

    Args:
        server: Where the others connect.
        processes: Those of all ranks; the first is this one. Others introduce themselves.
        thread: Computes for refits on this rank.

    Attributes:
        sending: The last refit of :meth:`send`, which has the last word on it.
    """

    def __init__(
        self, server: ControlServer, processes: Sequence[RankProcess], thread: RefitThread
    ) -> None:
        self._server = server
        self._thread = thread
        self._processes = list(processes)
        self.sending = 0
        self._turn = threading.RLock()
        self._calls: dict[int, _Call] = {}  # by number, from the last one that has begun
        self._begun = 0  # the last that has begun
        self._current = 0  # the one that goes on
        self._rank_of: dict[str, int] = {}  # by connection, also after its refit
        # Of followers that do not number refits: their last call; its number minus itself; the ends
        # of refits that they have yet to come to; and how far behind their states were at first.
        self._newest: dict[int, int] = {}
        self._lag: dict[int, int] = {}
        self._missed: dict[int, dict[int, messages.Close]] = {}
        self._ahead: dict[int, int] = {}
        self._first = 0  # refit here
        self._question = 0
        self._closed = False

    # -- one refit --------------------------------------------------------------------------------

    def send(
        self, sender: RefitSender, options: dict[str, Any]
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts a refit; all ranks learn how it ends, also if it cannot begin."""
        with sender.asking:
            # It counts where another option is not legal, too: that may be so on one rank alone.
            number = sender.next_number(SendOptions(number=options.get("number")).number)
            self.sending = number
            try:
                sending = sender.send(**options)
            except BaseException as error:
                sender.number = number
                self.dismiss(number, str(error))
                raise

        def end() -> dict[str, Any]:
            report, reason = None, ""
            try:
                report = sending.result()
                return report
            except BaseException as error:
                reason = str(error)
                raise
            finally:  # before the caller can begin the next one
                self.dismiss(number, reason, report)

        def stop() -> None:
            sending.cancel()

        return spawn(f"end-{number}", end, stop)

    def open(self, number: int, deadline_s: float, state: int, specs: str) -> None:
        """Begins a refit, of what rank 0 has (see :class:`_Call`); none before it will begin."""
        with self._turn:
            self._first = self._first or number
            for earlier in [n for n in self._calls if n < number]:
                over = self._calls.pop(earlier)
                close = self._end(over, "" if over.confirmed else f"refit {number} has begun")
                for rank in over.absent - over.late:
                    self._missed.setdefault(rank, {})[earlier] = close
            self._begun = self._current = number
            call = self._calls.setdefault(number, _Call())
            call.seconds, call.deadline = deadline_s, time.monotonic() + deadline_s
            call.state, call.specs = state, specs
            for _ in range(2):  # who came and gave up before is known when its message was read
                self._take(0.0)

    def look(self) -> None:
        """Raises if a follower that takes part was lost, or has failed.

        Raises:
            RefitPeerError: It was lost; names the rank.
            RLError: The error that it reported.
        """
        with self._turn:
            self._take(0.0)
            self._check()

    def gather(self, names: Iterable[str]) -> int:
        """Has every follower gather; the number of the question.

        They begin once all are ready. From then on every rank, this one too, does it to its end.

        Raises:
            RefitPeerError: One was lost or did not come, or this rank hangs in an earlier gather.
            RLError: One is not of rank 0's state, or has other tensors.
        """
        with self._turn:
            self._wait(lambda: [] if self._thread.idle else [0])
        self._ask(lambda number: messages.Gather(number, tuple(names)))
        with self._turn:
            self._question += 1
            for member in self._calls[self._current].members.values():
                self._send(member.key, messages.Go(self._question))
            return self._question

    def confirm(self) -> None:
        """Has every follower confirm that its part is of one state.

        Raises:
            LifecycleError: One is not.
            RefitPeerError: A follower was lost.
        """
        self._ask(messages.ConfirmPart)
        self._calls[self._current].confirmed = True

    def wait_for(self, future: concurrent.futures.Future[T], number: int, what: str) -> T:
        """What this rank's own part of a question comes to.

        Args:
            future: Ends with it.
            number: Of the question; 0 for what this rank alone does.
            what: It is to do, for errors.

        Raises:
            RefitPeerError: A follower was lost, or some do not end theirs; names them.
        """
        while not concurrent.futures.wait([future], TICK_S).done:
            self.look()
            call = self._calls[self._current]
            if self._time_left(call) <= 0:
                late = [rank for rank, m in call.members.items() if m.done < number]
                raise self._late(late or [0], f"did not {what}", call)
        if (error := future.exception()) is not None:
            self._raise_if_lost(error)
        return future.result()

    def dismiss(self, number: int, reason: str = "", report: dict[str, Any] | None = None) -> None:
        """Ends a refit, which may not have begun here, also for followers who come later."""
        with self._turn:
            if self._closed or number < self._begun:
                return
            self._first = self._first or number
            call = self._calls.setdefault(number, _Call())
            if call.close is not None:
                return
            self._end(call, reason, report)
            if self._current == number:
                self._current = 0
            if call.absent:
                end = max(call.deadline, time.monotonic() + DEFAULT_DEADLINE_S)
                threading.Thread(
                    target=self._see_off, args=(number, end), name="refit-late", daemon=True
                ).start()

    def end(self) -> None:
        """Closes the connections to all followers."""
        with self._turn:
            self._closed = True
            self._server.close()

    # -- inside -----------------------------------------------------------------------------------

    def _ask(self, question: Callable[[int], messages.Message]) -> None:
        """Sends all followers a question; returns when each has answered."""
        with self._turn:
            call = self._calls[self._current]
            self._question += 1
            others = range(1, len(self._processes))
            self._wait(lambda: [rank for rank in others if rank not in call.members])
            self._compare(call)
            call.asked = True
            for member in call.members.values():
                self._send(member.key, question(self._question))
            self._wait(lambda: [r for r, m in call.members.items() if m.done < self._question])
            self._compare(call)

    def _compare(self, call: _Call) -> None:
        """Raises for a follower that has a part of another model than rank 0's."""
        for rank, member in call.members.items():
            if member.specs != call.specs:
                raise ManifestMismatchError(
                    f"{self._processes[rank]} has other tensors than rank 0: the digests of their "
                    f"names, shapes and dtypes are {member.specs} and {call.specs}",
                    fix="use the same configuration, checkpoint and packages on all ranks",
                    peer=f"rank {rank}",
                    rank=rank,
                )
            state = member.state
            if not member.counts:
                state += self._ahead.setdefault(rank, call.state - state)
            if state != call.state:
                raise other_weights(self._processes[rank], state, call.state)

    def _wait(self, missing: Callable[[], list[int]]) -> None:
        """Until nobody is missing."""
        call = self._calls[self._current]
        while late := missing():
            self._take(TICK_S)
            self._check()
            for rank in set(late) - {0, *call.members}:
                if self._processes[rank].state() == "ended":  # it will not come any more
                    raise self._processes[rank].lost()
            if self._time_left(call) <= 0 and (late := missing()):
                here = [rank for rank in late if rank in (0, *call.members)]
                call.late.update(set(late).difference(here))
                what = "did not answer" if here else "did not join the refit"
                raise self._late(here or late, what, call)

    def _time_left(self, call: _Call) -> float:
        """Seconds in which to wait; what is left then is for saying who was late."""
        return call.deadline - report_margin_s(call.seconds) - time.monotonic()

    def _take(self, timeout_s: float) -> None:
        """Handles the followers' messages, and marks those with a lost connection."""
        if self._closed:
            raise LifecycleError("the policy was shut down", fix="build a new policy")
        for key, frame in self._server.receive(timeout_s):
            try:
                self._sort(key, messages.decode(frame))
            except msgspec.MsgspecError as error:
                raise RefitError(
                    f"received a malformed message of another rank: {error}",
                    fix="install the same rl-backends and rl-core for all ranks",
                ) from error
        for key in self._server.departed():
            self._rank_of.pop(key, None)
            for call in self._calls.values():
                for rank, member in [*call.members.items()]:
                    member.lost |= member.key == key
                    if member.vanished and not (member.counts or call.asked):
                        del call.members[rank]  # it gave up early, and may come again

    def _sort(self, key: str, message: messages.Message) -> None:
        if isinstance(message, messages.RankHello):
            if not 0 < message.rank < len(self._processes):
                return
            self._rank_of[key] = message.rank
            if (number := message.number) == 0:
                if message.call < self._newest.get(message.rank, 0):
                    return  # connections are not read in the order in which they were made
                self._newest[message.rank] = message.call
                number = message.call + self._lag.get(message.rank, self._first - 1)
                if close := self._missed.get(message.rank, {}).pop(number, None):
                    self._send(key, close)
                    return
                number = self._next_of(message.rank, number)
                self._lag[message.rank] = number - message.call
            if number < self._begun:
                over = f"refit {number} is over: this is refit {self._begun}"
                self._send(key, messages.Close(over))
                return
            if message.pid:
                it = RankProcess(message.rank, len(self._processes), message.pid, message.host)
                self._processes[message.rank] = it
            call = self._calls.setdefault(number, _Call())
            if call.close is not None:
                call.absent.discard(message.rank)
                self._send(key, call.close)
            else:
                call.members[message.rank] = _Member(
                    key, message.number > 0, message.state, message.specs, message.failed
                )
            return
        rank = self._rank_of.get(key)
        if (
            rank is not None
            and isinstance(message, messages.RankFailed)
            and message.collectives_diverged
        ):
            # Also where its refit is over here: what the ranks gather next does not match.
            why = f"on {self._processes[rank]}: {message.kind}: {message.message}"
            self._thread.collectives_diverged = self._thread.collectives_diverged or why
        for call in self._calls.values():
            for member in call.members.values():
                if member.key != key:
                    continue
                if isinstance(message, messages.RankDone):
                    # The answer to an earlier gather may come after the next question.
                    member.done = max(member.done, message.number)
                    member.state = message.state
                elif isinstance(message, messages.RankFailed):
                    member.failed = message

    def _next_of(self, rank: int, likely: int) -> int:
        """The refit that a follower comes to which does not number them."""
        ended = [number for number, call in self._calls.items() if rank in call.absent]
        if ended:
            return likely if likely in ended else max(ended)
        for number, call in sorted(self._calls.items()):
            if call.close is None and (rank not in call.members or not call.asked):
                return number  # also if it has given up, and comes again
        return max([self._begun, *self._calls]) + 1

    def _check(self) -> None:
        call = self._calls.get(self._current)
        if call is None:
            return
        if any(member.failed is not None for member in call.members.values()):
            self._raise_if_lost(None)
        for rank, member in call.members.items():
            if member.vanished:
                raise self._processes[rank].lost()
        for rank, member in call.members.items():
            if member.failed is not None:
                kind, text = member.failed.kind, member.failed.message
                raise peer_error(
                    kind,
                    f"{self._processes[rank]} failed: {kind}: {text}",
                    same_here=(RefitError, CapabilityError, LifecycleError),
                    fix=member.failed.fix,
                    peer=f"rank {rank}",
                    rank=rank,
                )

    def _raise_if_lost(self, cause: BaseException | None) -> None:
        """After a failure: raises for a rank that was lost, if that is why.

        A collective that lost a peer fails on all ranks, and its error does not name the peer.
        """
        end = time.monotonic() + CAUSE_S
        with self._turn:
            call = self._calls[self._current]
            while time.monotonic() < end:
                self._take(TICK_S)
                for rank, member in call.members.items():
                    if member.vanished or self._processes[rank].state() == "ended":
                        raise self._processes[rank].lost() from cause
            if cause is not None:
                self._check()

    def _late(self, ranks: list[int], what: str, call: _Call) -> RefitPeerError:
        ranks = sorted(ranks)  # in whichever order they came
        names = " and ".join(str(self._processes[rank]) for rank in ranks)
        return RefitPeerError(
            f"{names} {what} within its deadline of {call.seconds:g} s",
            fix="look at what that worker does (its log, py-spy dump); every rank must call refit",
            peer=" and ".join(f"rank {rank}" for rank in ranks),
            rank=ranks[0],
        )

    def _send(self, key: str, message: messages.Message) -> None:
        self._server.send(key, messages.encode(message))  # a lost follower is found missing

    def _end(
        self, call: _Call, reason: str, report: dict[str, Any] | None = None
    ) -> messages.Close:
        """Sends the followers of a refit its end, unless they have it."""
        if call.close is None:
            if not (reason or call.confirmed):
                reason = "it ended before all tensors were read"
            call.close = messages.Close(reason, report)
            call.absent = set(range(1, len(self._processes))) - set(call.members)
            for member in call.members.values():
                self._send(member.key, call.close)
        return call.close

    def _see_off(self, number: int, end: float) -> None:
        """Sends followers that come late the end of their refit, until the next one begins."""
        while time.monotonic() < end:
            time.sleep(TICK_S)
            with self._turn:
                call = self._calls.get(number)
                if self._closed or call is None or not call.absent:
                    return
                self._take(0.0)
