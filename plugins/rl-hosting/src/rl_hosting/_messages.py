"""The messages between a driver and a hosted process: MessagePack on a socket, nothing pickled.

Both sides send at any time. A request has a number, and so has its one reply; rows that ended come
as :class:`Progress`, which answers nothing. A frame is the version of the protocol (one byte), the
length of the message (eight bytes, big-endian) and the message.
"""

from __future__ import annotations

import socket
import struct
import sys
import threading
from contextlib import suppress
from importlib.metadata import version
from typing import Any, Self

import msgspec

from rl_backends import Completion  # noqa: TC001 - msgspec looks the types of fields up
from rl_core.errors import DeadlineError, IncompatiblePluginError, WorkerError
from rl_hosting._timing import FRAME_STALL_S
from rl_hosting.cluster.remote_error import decode_error, encode_error

__all__ = [
    "PROTOCOL",
    "Channel",
    "Hello",
    "Progress",
    "Reply",
    "Request",
    "decode",
    "encode",
    "error_of",
    "error_reply",
]

#: Version of the frames; every frame begins with it.
PROTOCOL = 2

_HEAD = struct.Struct("!BQ")
_TIMEVAL = struct.Struct("@ll")
#: A frame that is larger than this is none of ours.
_MOST = 1 << 34
#: Bytes that are read at once, at most.
_PIECE = 1 << 20


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """What the engine's process says first.

    Attributes:
        releases: Of rl-core, rl-backends and rl-hosting there.
        python: Its interpreter.
    """

    releases: dict[str, str]
    python: str

    @classmethod
    def here(cls) -> Self:
        """The hello of this process."""
        names = ("rl-core", "rl-backends", "rl-hosting")
        return cls({name: version(name) for name in names}, sys.executable)


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


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """Rows that ended, or none: a sign of life.

    Attributes:
        rows: That are complete since the one before.
        failed: Errors of rows that failed, by their keys.
        error: The engine failed; all rows in it are gone.
    """

    rows: list[Completion] = []
    failed: dict[int, list[Any]] = {}
    error: list[Any] | None = None


class Reply(msgspec.Struct, array_like=True, tag="reply"):
    """The answer to a request.

    Attributes:
        number: The request's.
        value: What the method returned.
        error: As :func:`rl_hosting.cluster.remote_error.encode_error` makes it.
    """

    number: int = 0
    value: Any = None
    error: list[Any] | None = None


Message = Hello | Request | Progress | Reply

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.decode
_decode_message = msgspec.msgpack.Decoder(Message).decode


def error_reply(error: BaseException, name: str, number: int = 0) -> Reply:
    """The reply that carries an error."""
    return Reply(number=number, error=encode_error(error, name))


def error_of(reply: Reply | Progress) -> WorkerError | None:
    """The error that a message carries."""
    return None if reply.error is None else decode_error(reply.error)


class Channel:
    """One end of a connection. Any thread may send; one receives.

    Args:
        end: A connected stream socket, which is the channel's from now on.
    """

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(None)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(FRAME_STALL_S))
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
            for part in (_HEAD.pack(PROTOCOL, len(data)), data):
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
            IncompatiblePluginError: It has another version of the protocol.
            msgspec.MsgspecError: It sends what is no message.
        """
        version, size = _HEAD.unpack(self._exactly(_HEAD.size, begun=False))
        if version != PROTOCOL:
            raise IncompatiblePluginError(
                f"the other side uses protocol {version} of rl-hosting, this side {PROTOCOL}",
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
        data = bytearray()  # grows with what came, not with what the other side says
        while len(data) < size:
            try:
                new = self._end.recv(min(size - len(data), _PIECE))
            except BlockingIOError:
                if not (begun or data):
                    continue
                raise DeadlineError(
                    f"the other process sent {len(data)} of {size} bytes of a message, and no more "
                    f"within {FRAME_STALL_S:.0f} s",
                    fix="look at its log",
                    seconds=FRAME_STALL_S,
                ) from None
            except OSError as error:
                raise EOFError(str(error)) from error
            if not new:
                raise EOFError("the other side has closed the connection")
            data += new
        return data

    def _late(self, timeout_s: float) -> DeadlineError:
        return DeadlineError(
            f"the other process did not read a message within {timeout_s:.0f} s",
            fix="look at its log",
            seconds=timeout_s,
        )


def _timeval(seconds: float) -> bytes:
    """For the kernel, to which 0 means for ever."""
    seconds = max(seconds, 0.001)
    return _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
