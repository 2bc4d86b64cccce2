"""Control messages between processes of one host: ZeroMQ on a socket in a private directory."""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

import zmq

from rl_core.errors import RefitError
from rl_core.refit.messages import MAX_FRAME_BYTES

__all__ = ["IpcClient", "IpcServer", "remove_channel"]

_PREFIX = "rl-refit-"
#: Milliseconds in which last words are still delivered after a close.
_LINGER_MS = 200


class IpcServer:
    """The sender's end, for any number of clients over its whole life.

    Attributes:
        address: Where clients connect; only this user can.
    """

    def __init__(self) -> None:
        directory = tempfile.mkdtemp(prefix=_PREFIX)
        self.address = f"ipc://{directory}/socket"
        context = zmq.Context()
        #: Runs once, at the latest when the process ends.
        self.close = weakref.finalize(self, _shut, context, directory, os.getpid())
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        try:
            self._socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise RefitError(
                f"{self.address} cannot be bound: {error}",
                fix="set TMPDIR to a short path on a local disk",
            ) from error

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Frames that are there, with their connection; waits for the first up to the timeout."""
        frames = []
        if self._socket.poll(int(timeout_s * 1000)):
            while True:
                try:
                    parts = self._socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                if len(parts) == 2:  # anything else is not from one of our clients
                    frames.append((parts[0].hex(), parts[1]))
        return frames

    def send(self, key: str, frame: bytes) -> bool:
        """Sends to one connection; False if it is gone."""
        try:
            self._socket.send_multipart([bytes.fromhex(key), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True


class IpcClient:
    """The receiver's end, for one refit.

    Args:
        address: The server's.
    """

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.connect(address)

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame, or None after the timeout."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        return self._socket.recv_multipart()[-1]

    def send(self, frame: bytes) -> None:
        """Sends a frame."""
        self._socket.send(frame, zmq.NOBLOCK)

    def close(self) -> None:
        """Closes the socket, once what was sent is delivered or a moment has passed."""
        self._context.destroy(_LINGER_MS)


def _shut(context: zmq.Context[zmq.Socket[bytes]], directory: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # a forked child ends, not the server
    context.destroy(_LINGER_MS)
    shutil.rmtree(directory, ignore_errors=True)


def remove_channel(address: str) -> None:
    """Removes the directory of a server that died without doing so."""
    socket = Path(address.removeprefix("ipc://"))
    if socket.parent.name.startswith(_PREFIX):
        with suppress(OSError):
            socket.unlink()
        with suppress(OSError):
            socket.parent.rmdir()
