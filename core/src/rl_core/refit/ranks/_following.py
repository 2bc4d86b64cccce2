"""Every other rank: does what rank 0 says, for as long as a refit takes."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import RefitAborted, RefitError, RefitPeerError, RLError
from rl_core.futures import spawn
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
from rl_core.refit.transports.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_core.refit.ranks._thread import Part, RefitThread


__all__ = ["Follower"]

#: Seconds between looks at whether rank 0 is still there, and at work that is to be reported.
_LOOK_S, _REPORT_S = 0.05, 0.002
#: Seconds by which rank 0 is first to say that the deadline has passed.
_GRACE_S = 2.0
#: Seconds in which a failure may turn out to be the consequence of rank 0's end.
_DOUBT_S = 0.5
_MESSAGE_CHARS = 2000


class Follower:
    """This rank's side.

    Args:
        peers: All ranks.
        rank: This one.
        thread: Computes for refits on this rank.
    """

    def __init__(self, peers: Sequence[Peer], rank: int, thread: RefitThread) -> None:
        self._leader = peers[0]
        self._rank = rank
        self._thread = thread
        self._ended = threading.Event()
        self._threads: list[Future[None]] = []

    def follow(self, make: Callable[[], Part], call: str, deadline_s: float) -> Future[None]:
        """Takes part in a refit.

        Args:
            make: Makes this rank's part of the source; it is closed once, however the refit ends.
            call: What all ranks call the refit.
            deadline_s: Seconds for it.

        Returns:
            A future that ends with the refit. It fails with a RefitAborted if rank 0 ended it
            early, and with a RefitPeerError if rank 0 is gone.
        """
        client = ControlClient(self._leader.endpoint, self._leader.key)
        client.open()
        _send(client, Hello(call, self._rank))
        try:
            part = make()
        except BaseException as error:
            with closing(client):
                _send(client, _failure(error))
            raise
        end = time.monotonic() + deadline_s + _GRACE_S
        future = spawn(f"follow-{call}", lambda: self._follow(client, part, end))
        self._threads = [thread for thread in self._threads if not thread.done()] + [future]
        return future

    def close(self) -> None:
        """Ends all refits."""
        self._ended.set()
        wait(self._threads, 2 * _GRACE_S)

    def _follow(self, client: ControlClient, part: Part, end: float) -> None:
        try:
            with closing(client):
                self._obey(client, part, end)
        finally:
            self._thread.finish(part.close_part)

    def _obey(self, client: ControlClient, part: Part, end: float) -> None:
        waiting: Message | None = None  # for what an earlier refit began
        promised: tuple[str, ...] = ()  # to be gathered, once all ranks are ready
        working: tuple[int, Future[None]] | None = None
        while True:
            frame = client.receive(_REPORT_S if waiting or working else _LOOK_S)
            if frame is not None:
                waiting = decode(frame)
            match waiting:
                case Close(reason):
                    if reason:
                        raise RefitAborted(
                            f"{self._leader} ended the refit: {reason}",
                            fix="look at what rank 0 raised",
                            peer="rank 0",
                            cause=reason,
                        )
                    return
                case Gather(number, names) if self._thread.idle:
                    _send(client, Ready(number))
                    waiting, promised = None, names
                case Go(number):
                    gather = partial(self._thread.gather_all, part, promised)
                    waiting, working = None, (number, self._thread.submit(gather))
                case Confirm(number) if self._thread.idle:
                    waiting, working = None, (number, self._thread.submit(part.confirm_part))
            if working is not None and working[1].done():
                number, done = working
                working = None
                if (error := done.exception()) is not None:
                    out_of_step = self._thread.out_of_step is not None
                    _send(client, _failure(error, out_of_step=out_of_step))
                    self._doubt(client, error)
                    if isinstance(error, RLError):
                        raise error
                    raise RefitError(
                        f"rank {self._rank}: {type(error).__name__}: {error}"
                    ) from error
                _send(client, Done(number))
            if self._ended.is_set():
                raise RefitAborted("this rank was shut down", fix="refit with all ranks")
            if frame is None and client.lost():
                raise self._leader.lost()
            if frame is None and time.monotonic() > end:
                raise RefitPeerError(
                    f"{self._leader} did not end the refit by its deadline",
                    fix="look at what that worker does (its log, py-spy)",
                    peer="rank 0",
                    rank=0,
                )

    def _doubt(self, client: ControlClient, cause: BaseException) -> None:
        """After a failure: raises if rank 0 is gone, of which a collective knows no more."""
        end = time.monotonic() + _DOUBT_S
        while time.monotonic() < end:
            if client.lost() or self._leader.state() == "ended":
                raise self._leader.lost() from cause
            if (frame := client.receive(_LOOK_S)) is not None and isinstance(decode(frame), Close):
                return


def _failure(error: BaseException, *, out_of_step: bool = False) -> Failed:
    text = error.message if isinstance(error, RLError) else str(error)
    fix = error.fix if isinstance(error, RLError) else None
    return Failed(type(error).__name__, text[:_MESSAGE_CHARS], fix, out_of_step)


def _send(client: ControlClient, message: Message) -> None:
    client.send(msgspec.msgpack.encode(message))
