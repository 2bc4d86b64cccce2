"""A lane over a process group: what the sender publishes is sent to the members that read it.

What all members read is broadcast. Of the rest the sender sends to each member what this one reads,
to all of them at once.

The group belongs to one lane. It is independent of torch's default group, and ends with the
lane: members that left or joined, or a broadcast that failed, call for a new lane.

Making a group, waiting for bytes and letting a group go all block. So each lane has a thread that
does all three, and nobody waits for that thread for long. A member that hangs lets the transfer
hang, which gloo has no way to end: a lane that is closed leaves its thread, its buffer and the
group's connections to the deadline of the refit, which is the timeout of all that travels.

The NCCL half is written against torch's documented interface and was never run: there was no
machine with two GPUs.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
import weakref
from collections import deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
import torch
from torch._C import _distributed_c10d as c10d

from rl_core.errors import RefitError, RefitPeerError, RefitProtocolError
from rl_core.weights.transports.base import Lane

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    from rl_core.weights.data.plan import Runs

__all__ = ["GroupLane", "GroupRef", "Member"]

#: For the members' connections to each other, once all of them are there.
_JOIN = timedelta(seconds=10)
#: Seconds for one broadcast at most, in which a member may first have to load the one before it.
_MOVE_S = 600.0
#: Seconds that a close waits for the lane's thread, and again once the group was aborted.
_STOP_S = 0.5
#: Seconds for which :meth:`GroupLane.arrived` waits, so that a loop of calls costs little.
_PATIENCE_S = 0.001
#: More than the members of any group: taken from their number by one that leaves.
_NEVER = 1 << 30
#: Clean up after a failed peer, and do not end the process, nor when that takes long.
_NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_MAKING = threading.Lock()  # of NCCL groups: the environment belongs to the whole process
_CUDA: Any = torch.cuda  # its streams and events are not typed
_C10D: Any = c10d


class GroupRef(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the sender sends to the members of a group.

    Attributes:
        kind: Distinguishes it from other lanes.
        group_name: Never used before.
        backend: What moves the bytes.
        members: Ids of the receivers, in the order of their ranks from 1; 0 is the sender.
        nbytes: Size of the lane.
    """

    kind: Literal["group"]
    group_name: str
    backend: Literal["gloo", "nccl"]
    members: tuple[str, ...]
    nbytes: Annotated[int, msgspec.Meta(ge=1)]


@dataclass(frozen=True)
class Member:
    """One member of a group, and where it finds the others.

    Attributes:
        ref: The group.
        rank: This member's.
        store: Reaches all members.
        host: The sender's address; members use the interface from which they reach it.
        port: The store's.
        before: Set once this process has opened the group that it joined before this one. While it
            opens one, a store answers nothing else: two processes that open two groups in other
            orders would wait for each other.
        opened: Set once this one is open, or will not be.
    """

    ref: GroupRef
    rank: int
    store: c10d.Store
    host: str
    port: int
    before: threading.Event
    opened: threading.Event

    @property
    def size(self) -> int:
        """How many members there are, the sender among them."""
        return 1 + len(self.ref.members)


@dataclass
class _Span:
    """Bytes that travel, or are to come, until the time ``ends`` at most.

    Attributes:
        data: What is broadcast, if ``runs`` is None.
        runs: Else, what travels between this member and another one, with that one's rank.
    """

    data: torch.Tensor
    runs: list[tuple[int, torch.Tensor]] | None
    ends: float
    written: torch.cuda.Event | None = None
    done: threading.Event = field(default_factory=threading.Event)


class _Gloo:
    """Groups on the CPU."""

    def open(self, store: c10d.Store, member: Member) -> Any:
        """The group; blocks until all members open it."""
        gloo: Any = c10d.ProcessGroupGloo
        options = gloo._Options()
        family = socket.AF_INET6 if ":" in member.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            # Sends nothing: this host's interface from which the sender is reached.
            probe.connect((member.host, member.port))
            options._devices = [gloo.create_device(hostname=probe.getsockname()[0])]
        options._threads = 1  # broadcasts arrive one after the other, so the first is here first
        options._timeout = _JOIN
        return gloo(store, member.rank, member.size, options)

    def move(self, group: Any, span: _Span) -> None:
        """Moves bytes from rank 0; returns when they are received, or sent."""

        def left() -> timedelta:
            return timedelta(seconds=min(max(span.ends - time.monotonic(), 0.001), _MOVE_S))

        if span.runs is None:
            options = _from_sender()
            options.timeout = left()
            group.broadcast([span.data], options).wait()
            return
        for work in _exchange(group, span.runs):
            work.wait(left())

    def abort(self, group: Any) -> None:
        """Gloo cannot: what hangs ends with its timeout."""


class _Nccl:
    """Groups of GPUs; methods as of :class:`_Gloo`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _CUDA.Stream(device)

    def open(self, store: c10d.Store, member: Member) -> Any:
        nccl: Any = c10d.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=_MOVE_S)
        with _survive_errors():
            group = nccl(store, member.rank, member.size, options)
        # All members make the communicator with this; of what travels later, some have no part.
        start = torch.zeros(1, dtype=torch.uint8, device=self._device)
        self.move(group, _Span(start, None, time.monotonic() + _MOVE_S))
        return group

    def move(self, group: Any, span: _Span) -> None:
        with torch.cuda.stream(self._stream):
            if span.written is not None:
                self._stream.wait_event(span.written)
            # For what is waited here, the stream waits, and not the host.
            if span.runs is None:
                group.broadcast([span.data], _from_sender()).wait()
            elif span.runs:
                group._start_coalescing()  # all of them at once, or they wait for each other
                _exchange(group, span.runs)
                group._end_coalescing().wait()
            self._stream.synchronize()
        # A communicator that was aborted, because a peer failed, lets all that waits for it go on.
        if (state := group.get_error()) != _C10D.ErrorType.SUCCESS:
            raise RuntimeError(f"NCCL reports {state}")

    def abort(self, group: Any) -> None:
        threading.Thread(target=group.abort, daemon=True).start()  # which may hang itself


class _Carrier:
    """The thread that owns the group, and what it was given to do."""

    def __init__(self, backend: _Gloo | _Nccl, member: Member) -> None:
        self._backend, self._member = backend, member
        self._spans: queue.SimpleQueue[_Span | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._group: Any = None
        self.failure = ""
        self._thread = threading.Thread(
            target=self._run, name=f"rl-refit-{member.ref.group_name}", daemon=True
        )
        self._thread.start()

    def take(self, span: _Span) -> None:
        """Puts bytes in line."""
        self._spans.put(span)

    def check(self) -> None:
        """Raises if nothing will be carried any more."""
        if self.failure or self._stopped.is_set():
            raise RefitPeerError(
                f"the transfer from the sender failed: {self.failure or 'it was closed'}",
                fix="call refit again; the members that still run form a new group",
                phase="TRANSFER",
            )

    def stop(self) -> None:
        """Ends the thread, and has the group aborted if it is stuck in there.

        First it is waited for: members that do not hang get the rest of what is on its way. Gloo
        forgets to tell one that has half of a message that the connection broke; its thread is
        stuck until the deadline of the refit.
        """
        self._stopped.set()
        self._spans.put(None)
        if threading.current_thread() is self._thread:
            return
        self._thread.join(_STOP_S)
        if (group := self._group) is not None:
            self._backend.abort(group)
            del group  # the thread lets it go
            self._thread.join(_STOP_S)

    def _run(self) -> None:
        member = self._member
        try:
            # The group is made once every member has arrived.
            while not member.before.wait(_PATIENCE_S):
                if self._stopped.is_set():
                    return
            store = c10d.PrefixStore(f"refit/{member.ref.group_name}", member.store)
            there, pause = store.add("members", 1), 0.0005
            while 0 < there < member.size:
                if self._stopped.wait(pause):
                    store.add("members", -_NEVER)
                    return
                there, pause = store.add("members", 0), min(2 * pause, 0.02)
            if there < 0:
                raise RuntimeError("a member of the group left before all had joined")
            self._group = self._backend.open(store, member)
            member.opened.set()
            while not self._stopped.is_set() and (span := self._spans.get()) is not None:
                self._backend.move(self._group, span)
                if self._stopped.is_set():
                    return  # what was aborted ends like what succeeded
                span.done.set()
        except Exception as error:  # check() raises it
            self.failure = (str(error).splitlines() or [type(error).__name__])[0]
        finally:
            member.opened.set()
            self._group = None


class GroupLane(Lane):
    """One member's end of a group that was made for one sender and its receivers.

    Args:
        member: This one. The group is made at once, which is not waited for.
        device: Where ``data`` is: the CPU for gloo, a GPU for NCCL.

    Raises:
        RefitError: There is not enough memory.
    """

    reusable_after_failure: ClassVar[bool] = False

    def __init__(self, member: Member, device: torch.device) -> None:
        self.ref = {**msgspec.to_builtins(member.ref), "members": list(member.ref.members)}
        nbytes = member.ref.nbytes
        try:
            self.data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        except RuntimeError as error:
            raise RefitError(
                f"cannot allocate a buffer of {nbytes} bytes on {device}: {error}",
                fix="lower bucket_bytes, or free memory there",
            ) from error
        self._cuda = device.type == "cuda"
        self._expected: deque[_Span] = deque()
        self._carrier = _Carrier(_Nccl(device) if self._cuda else _Gloo(), member)
        self._stop = weakref.finalize(self, self._carrier.stop)

    def serves(self, receivers: Sequence[str]) -> bool:
        """See :meth:`Lane.serves`; their ranks are those of ``ref``, in whatever order they are."""
        return set(receivers) == set(self.ref["members"]) and not self._carrier.failure

    def publish(self, start: int, stop: int, runs: Mapping[str, Runs] = {}) -> None:
        """See :meth:`Lane.publish`.

        Raises:
            RefitPeerError: What was published before did not arrive.
        """
        self._carrier.check()
        written = _CUDA.Event() if self._cuda else None
        if written is not None:
            written.record(torch.cuda.current_stream(self.data.device))
        sent = [
            (number, self.data[first:after])
            for number, member in enumerate(self.ref["members"], 1)
            for first, after in runs.get(member, ())
        ]
        apart = sent if runs else None
        self._carrier.take(_Span(self.data[start:stop], apart, self.ends, written))

    def expect(self, start: int, stop: int, runs: Runs | None = None) -> None:
        apart = None if runs is None else [(0, self.data[first:after]) for first, after in runs]
        span = _Span(self.data[start:stop], apart, self.ends)
        self._expected.append(span)
        self._carrier.take(span)

    def arrived(self) -> bool:
        """See :meth:`Lane.arrived`; waits for a moment, so that a loop of calls costs little."""
        if not self._expected:
            raise RefitProtocolError("received data that was not announced", phase="TRANSFER")
        if self._expected[0].done.wait(_PATIENCE_S):
            return True
        self._carrier.check()
        return False

    def release(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self.data.device).synchronize()
        self._expected.popleft()

    def close(self) -> None:
        """See :meth:`Lane.close`; takes a moment, however the other members are."""
        self._stop()
        self._expected.clear()
        self.data = torch.empty(0, dtype=torch.uint8)


def _exchange(group: Any, runs: Sequence[tuple[int, torch.Tensor]]) -> list[Any]:
    """Begins to send runs to other members or, on these, to receive them."""
    move = group.recv if group.rank() else group.send
    return [move([data], peer, 0) for peer, data in runs]


def _from_sender() -> c10d.BroadcastOptions:
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.asyncOp = True
    return options


@contextmanager
def _survive_errors() -> Generator[None]:
    """A group made in here reports a failed peer; by default torch ends the process instead."""
    with _MAKING:
        before = {name: os.environ.get(name) for name in _NCCL_SETTINGS}
        os.environ.update({k: v for k, v in _NCCL_SETTINGS.items() if before[k] is None})
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
