"""The frames between a driver and its engine's process: MessagePack on a socket, nothing pickled.

Both sides send at any time. A request has a number, and so has its one reply; what an engine has
completed comes as :class:`Progress`, which answers nothing.
"""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import suppress
from typing import Any

import msgspec

from rl_core.cluster.remote_error import as_plain, from_plain
from rl_core.errors import DeadlineError, IncompatiblePluginError, WorkerError

__all__ = [
    "WIRE",
    "Channel",
    "Done",
    "Hello",
    "Progress",
    "Prompt",
    "Reply",
    "Request",
    "Sampling",
    "decode",
    "encode",
    "failure",
    "raised",
]

#: Version of the frames; every frame begins with it.
WIRE = 1

_HEAD = struct.Struct("!BQ")
_TIMEVAL = struct.Struct("@ll")
#: A frame that is larger than this is none of ours.
_MOST = 1 << 34
#: Seconds in which more of a frame must come, once it has begun.
_STALL_S = 20.0


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """What the engine's process says first.

    Attributes:
        core: Version of rl-core there.
        hosting: Version of rl-hosting there.
        python: Its interpreter.
    """

    core: str
    hosting: str
    python: str


class Request(msgspec.Struct, array_like=True, tag="request"):
    """A call.

    Attributes:
        method: Of the host.
        arguments: Its keyword arguments.
        number: Of the call; 0 wants no reply.
    """

    method: str
    arguments: dict[str, Any] = {}
    number: int = 0


class Sampling(msgspec.Struct, array_like=True):
    """How a row is sampled; see :class:`rl_core.backends.SamplingParams`."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    stop_token_ids: list[int]


class Prompt(msgspec.Struct, array_like=True):
    """One row to complete; see :class:`rl_core.backends.Row`.

    Attributes:
        key: Tells it from every other row of the engine.
        index: Of the row in its call, for messages.
        token_ids: The prompt.
        budget: Tokens that it may generate.
        seed: Of its own stream, or None to draw from the engine's.
        stop_strings: Each of them ends it.
        sampling: How.
    """

    key: int
    index: int
    token_ids: list[int]
    budget: int
    seed: int | None
    stop_strings: list[str]
    sampling: Sampling


class Done(msgspec.Struct, array_like=True):
    """One row that is complete, or that failed; see :class:`rl_core.backends.Completion`.

    Attributes:
        key: Of the row.
        token_ids: Generated.
        logprobs: One for each.
        truncated: It ended by length.
        error: As :func:`rl_core.cluster.remote_error.as_plain` makes it, if it failed.
    """

    key: int
    token_ids: list[int] = []
    logprobs: list[float] = []
    truncated: bool = False
    error: list[Any] | None = None


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """Rows that ended, or none: a sign of life.

    Attributes:
        rows: That ended since the one before.
        error: The engine failed; all rows in it are gone.
    """

    rows: list[Done] = []
    error: list[Any] | None = None


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """The answer to a request.

    Attributes:
        number: The request's.
        value: What the method returned.
        error: As :func:`rl_core.cluster.remote_error.as_plain` makes it.
    """

    number: int = 0
    value: Any = None
    error: list[Any] | None = None


Message = Hello | Request | Progress | Reply

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.decode
_decode_message = msgspec.msgpack.Decoder(Message).decode


def failure(error: BaseException, name: str, number: int = 0) -> Reply:
    """The reply that carries an error."""
    return Reply(number=number, error=as_plain(error, name))


def raised(reply: Reply | Done | Progress) -> WorkerError | None:
    """The error that a message carries."""
    try:
        return None if reply.error is None else from_plain(reply.error)
    except (TypeError, ValueError):
        return WorkerError(
            f"the engine failed with an error that is none: {reply.error!r:.200}",
            fix="report it to the backend's author: rl_core.cluster.remote_error makes them",
        )


class Channel:
    """One end of a connection. Any thread may send; one receives.

    Args:
        end: A connected stream socket, which is the channel's from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(_STALL_S))
        self._end = end
        self._turn = threading.Lock()
        self._broken = False

    def send(self, data: bytes, timeout_s: float) -> None:
        """Sends a message.

        Args:
            data: What :func:`encode` made of it.
            timeout_s: Seconds for which the other side may take nothing.

        Raises:
            DeadlineError: It took nothing for so long. If it took a part of the message before
                that, nothing more can be sent.
            OSError: It is gone.
        """
        if not self._turn.acquire(timeout=timeout_s):
            raise self._late(timeout_s)
        try:
            if self._broken:
                raise BrokenPipeError("a part of an earlier frame was not taken")
            # The kernel's own limit: Python's would hold for whoever receives, too.
            self._end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(timeout_s))
            for part in (_HEAD.pack(WIRE, len(data)), data):
                view = memoryview(part)
                while view:
                    view = view[self._end.send(view) :]
                    self._broken = True  # until all of it is gone
            self._broken = False
        except BlockingIOError as error:
            raise self._late(timeout_s) from error
        finally:
            self._turn.release()

    def receive(self) -> Message:
        """The next message.

        Raises:
            EOFError: The other side is gone.
            DeadlineError: A message began and does not go on.
            IncompatiblePluginError: It speaks another version.
            msgspec.MsgspecError: It sends what is no message.
        """
        version, size = _HEAD.unpack(self._exactly(_HEAD.size, begun=False))
        if version != WIRE:
            raise IncompatiblePluginError(
                f"the other side speaks version {version} of rl-hosting's wire, this one {WIRE}",
                fix="install the same release of rl-hosting in both environments",
                version=version,
            )
        if size > _MOST:
            raise msgspec.DecodeError(f"a frame of {size} bytes")
        message: Message = _decode_message(self._exactly(size, begun=True))
        return message

    def close(self) -> None:
        """Ends it for both sides, even where a forked child has it, too. Idempotent."""
        with suppress(OSError):  # it is closed
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()

    def _exactly(self, size: int, *, begun: bool) -> bytearray:
        data = bytearray(size)
        view, got = memoryview(data), 0
        while got < size:
            try:
                count = self._end.recv_into(view[got:], min(size - got, 1 << 20))
            except BlockingIOError:
                if not (begun or got):
                    continue
                raise DeadlineError(
                    f"of a frame of {size} bytes {got} came, and no more in {_STALL_S:.0f} s",
                    fix="look at its log",
                    seconds=_STALL_S,
                ) from None
            except OSError as error:
                raise EOFError(str(error)) from error
            if not count:
                raise EOFError("the other side is gone")
            got += count
        return data

    def _late(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"the other side took nothing for {timeout_s:.0f} s",
            fix="look at its log",
            seconds=timeout_s,
        )


def _timeval(seconds: float) -> bytes:
    """For the kernel, to which 0 means for ever."""
    seconds = max(seconds, 0.001)
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
