"""Every other rank: follows rank 0's messages for the length of a refit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from rl_backends.gathering import messages
from rl_core.errors import RefitAborted, RefitError, RefitPeerError, RLError
from rl_core.futures import spawn
from rl_core.weights.protocol.timing import CAUSE_S, FOLLOWER_GRACE_S, TICK_S
from rl_core.weights.transports.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_backends.gathering.processes import RankProcess
    from rl_backends.gathering.thread import Part, RefitThread

#: Seconds between looks at work that is to be reported.
_REPORT_S = 0.002


class Follower:
    """This rank's side.

    Args:
        leader: Rank 0's process.
        mine: This rank's.
        thread: Computes for refits on this rank.

    Attributes:
        calls: Where rank 0 alone numbers refits, the calls on this rank, also if they failed here.
    """

    def __init__(self, leader: RankProcess, mine: RankProcess, thread: RefitThread) -> None:
        self._leader = leader
        self._mine = mine
        self.calls = 0
        self._thread = thread
        self._ended = threading.Event()
        self._threads: list[Future[Any]] = []

    def follow(self, make: Callable[[], Part], number: int, deadline_s: float) -> Future[Any]:
        """Takes part in a refit.

        Args:
            make: Makes this rank's part of the source; it is closed once, however the refit ends.
            number: Of the refit, the same on all ranks; 0 if rank 0 alone counts them.
            deadline_s: Seconds for it.

        Returns:
            A future of rank 0's report, if it sent one, that ends with the refit. It fails with a
            RefitAborted if rank 0 ended it early, and with a RefitPeerError if rank 0 is lost.
        """
        client = ControlClient(self._leader.endpoint, self._leader.key)
        client.open()
        mine = self._mine
        hello = partial(
            messages.RankHello, number, mine.rank, call=self.calls, pid=mine.pid, host=mine.host
        )
        part: Part | None = None
        try:
            part = make()
            _send(client, hello(part.part_state, part.part_specs))
        except BaseException as error:
            with closing(client):
                _send(client, hello(failed=messages.RankFailed.of(error)))
            if part is not None:
                self._thread.finish(part.close_part)
            raise
        end = time.monotonic() + deadline_s + FOLLOWER_GRACE_S
        future = spawn(f"follow-{number}", lambda: self._follow(client, part, end))
        self._threads = [thread for thread in self._threads if not thread.done()] + [future]
        return future

    def close(self) -> None:
        """Ends all refits."""
        self._ended.set()
        wait(self._threads, 2 * FOLLOWER_GRACE_S)

    def _follow(self, client: ControlClient, part: Part, end: float) -> dict[str, Any] | None:
        with ExitStack() as last:
            last.callback(self._thread.finish, part.close_part)
            last.enter_context(closing(client))
            # Rank 0's message, until everything that an earlier refit began on this rank has ended.
            waiting: messages.Message | None = None
            promised: tuple[str, ...] = ()  # to be gathered, once all ranks are ready
            working: tuple[int, Future[None]] | None = None
            while True:
                frame = client.receive(_REPORT_S if waiting or working else TICK_S)
                if frame is not None:
                    waiting = messages.decode(frame)
                match waiting:
                    case messages.Close(reason, report):
                        if reason:
                            text, _, fix = reason.partition("\nFix: ")
                            raise RefitAborted(
                                f"{self._leader} ended the refit: {text}",
                                fix=fix or "correct the error that rank 0 raised",
                                peer="rank 0",
                                cause=reason,
                            )
                        return report
                    case messages.Gather(number, names) if self._thread.idle:
                        try:
                            self._thread.check_in_sync()
                        except RefitError as error:  # rank 0 may not know, and would gather alone
                            self._fail(client, error)
                        _send(client, messages.RankDone(number, part.part_state))
                        waiting, promised = None, names
                    case messages.Go(number):
                        gather = partial(self._thread.gather_all, part, promised)
                        waiting, working = None, (number, self._thread.submit(gather))
                    case messages.ConfirmPart(number) if self._thread.idle:
                        waiting, working = None, (number, self._thread.submit(part.confirm_part))
                if working is not None and working[1].done():
                    number, done = working
                    working = None
                    if (failure := done.exception()) is not None:
                        self._fail(client, failure)
                    _send(client, messages.RankDone(number, part.part_state))
                if self._ended.is_set():
                    raise RefitAborted("this rank was shut down", fix="build the policy again")
                if frame is None and client.lost():
                    raise self._leader.lost()
                if frame is None and time.monotonic() > end:
                    raise RefitPeerError(
                        f"{self._leader} did not end the refit within its deadline",
                        fix="look at what that worker does (its log, py-spy dump)",
                        peer="rank 0",
                        rank=0,
                    )

    def _fail(self, client: ControlClient, error: BaseException) -> NoReturn:
        """Sends rank 0 a failure; raises it, or rank 0's end if a collective failed for that."""
        collectives_diverged = self._thread.collectives_diverged is not None
        _send(client, messages.RankFailed.of(error, collectives_diverged=collectives_diverged))
        end = time.monotonic() + CAUSE_S
        while time.monotonic() < end:
            if client.lost() or self._leader.state() == "ended":
                raise self._leader.lost() from error
            frame = client.receive(TICK_S)
            if frame is not None and isinstance(messages.decode(frame), messages.Close):
                break
        if isinstance(error, RLError):
            raise error
        raise RefitError(f"rank {self._mine.rank}: {type(error).__name__}: {error}") from error


def _send(client: ControlClient, message: messages.Message) -> None:
    client.send(messages.encode(message))
