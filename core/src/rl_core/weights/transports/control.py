"""Control messages over ZeroMQ, and the knowledge of which peers still live.

Both ends see within milliseconds that a process died, because its connection closes, and within
seconds that one is stopped or cut off, because its heartbeats do not come.
:mod:`rl_core.weights.protocol.frames` decodes and authenticates the frames. On a network
connections are encrypted besides (CurveZMQ), with a key that only those know who have the trainer's
introduction: others can neither read the messages nor fill the receiver's memory.
"""

from __future__ import annotations

import os
import resource
import time
import weakref

import zmq

from rl_core.errors import RefitError
from rl_core.futures import spawn
from rl_core.weights.protocol.frames import MAX_FRAME_BYTES
from rl_core.weights.protocol.timing import HEARTBEAT_S, LINGER_S, SILENCE_S

__all__ = ["ControlClient", "ControlServer"]

_HEARTBEAT_MS, _SILENCE_MS = int(1000 * HEARTBEAT_S), int(1000 * SILENCE_S)
#: A lost connection ends its refit long before it would be made again. Not -1 (never), with which
#: ZeroMQ throws away what was received on it and not yet read.
_NEVER_MS = 3_600_000
#: Connections that may wait to be accepted: as many engines as may start a refit at once.
_BACKLOG = 1024
#: Frames that are read before somebody looks at the clock.
_AT_ONCE = 1000
#: What encryption adds to a frame, at most.
_ENCRYPTION_BYTES = 64
#: What shows a client that it lost its server. A refused connection is as good as a broken one,
#: because a server's endpoint is known only once it listens.
_LOST = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_CONNECT_RETRIED
#: Seconds for which a loss may be known before the socket knows its connection, and the pause
#: between two looks.
_IDENTIFY_S = 1.0
_LOOK_S = 0.005
#: File descriptors that an end and its next connections take.
_SPARE = 16

_Socket = zmq.Socket[bytes]


def require_room(*, first: bool = False) -> None:
    """Makes sure that ZeroMQ finds what it needs: it aborts the process where that is lacking.

    Raises the process's soft limit of file descriptors to the hard one, once it is needed.

    Args:
        first: Of a context, the first socket follows, with which ZeroMQ starts its threads.
    """
    taken: list[int] = []
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        while len(taken) < _SPARE:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        if first:
            spawn("rl-refit-room", bool).result()
    except (OSError, ValueError) as error:
        raise RefitError(
            f"process {os.getpid()} is at a limit: a refit needs {_SPARE} free file descriptors: "
            f"{error}",
            fix="raise its limit (ulimit -n), or close files",
        ) from error
    finally:
        for descriptor in taken:
            os.close(descriptor)


class _MonitoredSocket:
    """A socket, and how many of its connections were lost."""

    def __init__(self, context: zmq.Context[_Socket], kind: int, events: int) -> None:
        # Before a socket is bound: its connections keep the value of that time. Without a limit a
        # connection that is lost while the socket closes would keep the context from ending.
        context.setsockopt(zmq.LINGER, int(1000 * LINGER_S))
        # Without a limit of frames, as who connects is trusted (this user, or who has the key): a
        # full queue ends its connection, and the monitor's, read in refits alone, all connections.
        context.setsockopt(zmq.RCVHWM, 0)
        context.setsockopt(zmq.SNDHWM, 0)
        self.socket = context.socket(kind)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        self.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
        self.socket.setsockopt(zmq.HANDSHAKE_IVL, _SILENCE_MS)
        self._monitor: _Socket = self.socket.get_monitor_socket(events)
        self.sockets = [self.socket, self._monitor]
        self.losses = 0

    def wait(self, timeout_s: float) -> None:
        """Until a frame is there or a connection is lost, or for so long."""
        zmq.select(self.sockets, [], [], timeout_s)
        self.look()

    def look(self) -> None:
        """Takes note of lost connections."""
        while _received(self._monitor) is not None:
            self.losses += 1

    def close(self) -> None:
        """Closes; what was sent is delivered in the background, or a moment has passed."""
        if not self.socket.closed:
            self.socket.disable_monitor()
            self._monitor.close(0)
            self.socket.close()


class ControlServer:
    """The sender's end, for any number of clients over its whole life.

    Attributes:
        endpoint: Where clients connect.
        key: The server's public key, which clients need; empty if not encrypted.
    """

    def __init__(self, bind: str, *, encrypted: bool = False) -> None:
        require_room(first=True)
        context = zmq.Context()
        held: list[_MonitoredSocket] = []
        #: Runs once, at the latest when the process ends.
        self._destroy = weakref.finalize(self, _destroy, context, held, os.getpid())
        self._monitored = _MonitoredSocket(context, zmq.ROUTER, zmq.EVENT_DISCONNECTED)
        held.append(self._monitored)
        self._socket = self._monitored.socket
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.BACKLOG, _BACKLOG)
        self._socket.setsockopt(zmq.IPV6, "[" in bind)
        self.key = ""
        try:
            if encrypted:
                public, secret = _key_pair()
                self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _ENCRYPTION_BYTES)
                self._socket.setsockopt(zmq.CURVE_SERVER, 1)
                self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
                self.key = public.decode()
            self._socket.bind(bind)
        except zmq.ZMQError as error:
            self._destroy()
            raise RefitError(
                f"the socket {bind} cannot be bound: {error}",
                fix="set TMPDIR to a short path on a local disk"
                if bind.startswith("ipc:")
                else "give an address of this host",
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._connections: set[str] = set()
        self._departed: list[str] = []
        self._unidentified = 0
        self._identify_until = 0.0

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """Frames that are there, each with its connection.

        Waits for the first up to the timeout, or until a connection is lost.
        """
        self._monitored.wait(min(timeout_s, _LOOK_S) if self._unidentified else timeout_s)
        self._identify_lost()  # before the frames are read, so that last words come before the loss
        frames = []
        for _ in range(_AT_ONCE):
            if (parts := _received(self._socket)) is None:
                break
            if len(parts) == 2:  # anything else is not from one of our clients
                frames.append((parts[0].hex(), parts[1]))
        self._connections.update({key for key, _ in frames}.difference(self._departed))
        return frames

    def wait(self, other: object, timeout_s: float) -> None:
        """Until there is something to receive here or at another server, or for so long."""
        both = [one for one in (self, other) if isinstance(one, ControlServer)]
        sockets = [socket for one in both for socket in one._monitored.sockets]
        if len(both) == 1 or any(one._unidentified for one in both):  # some other thing, or a loss
            timeout_s = min(timeout_s, _LOOK_S)
        zmq.select(sockets, [], [], timeout_s)

    def send(self, key: str, frame: bytes) -> bool:
        """Sends to one connection; False if it was lost, or no longer reads."""
        try:
            self._socket.send_multipart([bytes.fromhex(key), frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                return False
            raise
        return True

    def departed(self) -> list[str]:
        """Connections that :meth:`receive` found lost since the last call.

        All that was sent on them was received.
        """
        departed, self._departed = self._departed, []
        return departed

    def check_room(self) -> None:
        """See :meth:`SenderEnd.check_room`."""
        require_room()

    def close(self) -> None:
        """Closes all connections, once what was sent is delivered or a moment has passed."""
        self._destroy()

    def _identify_lost(self) -> None:
        """Finds out which connections were lost.

        The monitor counts losses but cannot name them; the socket refuses to send to a connection
        that was lost, a moment later. So it sends an empty frame to all, which clients pass over.
        """
        now = time.monotonic()
        if self._monitored.losses:
            self._unidentified += self._monitored.losses
            self._monitored.losses, self._identify_until = 0, now + _IDENTIFY_S
        elif now > self._identify_until:
            self._unidentified = 0  # those were strangers
        if self._unidentified:
            lost = [key for key in self._connections if not self.send(key, b"")]
            self._connections.difference_update(lost)
            self._departed += lost
            self._unidentified = max(self._unidentified - len(lost), 0)


class ControlClient:
    """A receiver's end, for its whole life; each refit has a new connection."""

    def __init__(self, endpoint: str, key: str = "") -> None:
        self.endpoint = endpoint
        self.key = key
        self._context = zmq.Context()
        self._held: list[_MonitoredSocket] = []
        self._destroy = weakref.finalize(self, _destroy, self._context, self._held, os.getpid())
        self._monitored: _MonitoredSocket | None = None
        self._unused = True

    def open(self) -> None:
        """Begins a refit: a new connection, on which nothing of earlier refits arrives."""
        self.disconnect()
        require_room(first=self._unused)
        self._unused = False
        monitored = _MonitoredSocket(self._context, zmq.DEALER, _LOST)
        self._held[:] = [monitored]
        monitored.socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
        monitored.socket.setsockopt(zmq.IPV6, "[" in self.endpoint)
        try:
            if self.key:
                public, secret = _key_pair()
                monitored.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES + _ENCRYPTION_BYTES)
                monitored.socket.setsockopt(zmq.CURVE_SERVERKEY, self.key.encode())
                monitored.socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
                monitored.socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
            monitored.socket.connect(self.endpoint)
        except zmq.ZMQError as error:
            monitored.close()
            fix = "call refit again; if it fails again, check the trainer's address"
            raise RefitError(f"cannot connect to {self.endpoint}: {error}", fix=fix) from error
        self._monitored = monitored

    def disconnect(self) -> None:
        """Ends it; what was sent is delivered in the background, or a moment has passed."""
        monitored, self._monitored = self._monitored, None
        if monitored is not None and not self._context.closed:
            monitored.close()
        self._held.clear()

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame; None after the timeout, or when the server is lost."""
        assert self._monitored is not None, "open() first"
        end, losses = time.monotonic() + timeout_s, self._monitored.losses
        frame = _frame(self._monitored)
        while frame is None:
            # What the monitor reports of the connection ends a wait, too.
            self._monitored.wait(max(0.0, end - time.monotonic()))
            frame = _frame(self._monitored)
            if self._monitored.losses > losses or time.monotonic() >= end:
                break
        return frame

    def send(self, frame: bytes) -> None:
        """Sends a frame; dropped silently if the server is lost, which :meth:`lost` shows."""
        assert self._monitored is not None, "open() first"
        try:
            self._monitored.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._monitored.look()

    def lost(self) -> bool:
        """Whether the server was lost, and all that it sent before was received.

        Its connection broke or was refused, or it was silent for some seconds.
        """
        if self._monitored is None:
            return False
        self._monitored.look()
        return self._monitored.losses > 0 and not self._monitored.socket.poll(0)

    def close(self) -> None:
        """Closes, once what was sent is delivered or a moment has passed. Idempotent."""
        self.disconnect()
        self._destroy()


def _key_pair() -> tuple[bytes, bytes]:
    """A public and a secret key."""
    if not zmq.has("curve"):
        raise RefitError(
            "this build of ZeroMQ cannot encrypt, and a refit between hosts needs that",
            fix="install pyzmq from its wheel, or build libzmq with libsodium",
        )
    return zmq.curve_keypair()


def _frame(monitored: _MonitoredSocket) -> bytes | None:
    """The next frame with anything in it."""
    while (parts := _received(monitored.socket)) is not None:
        if parts[-1]:
            return parts[-1]
    return None


def _received(socket: _Socket) -> list[bytes] | None:
    """The parts of the next message, if one is there."""
    try:
        return socket.recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return None


def _destroy(context: zmq.Context[_Socket], held: list[_MonitoredSocket], owner: int) -> None:
    """Closes all sockets of a context, which waits for them.

    It knows them weakly, and would not find those of garbage: so what holds them is handed over.
    """
    if os.getpid() == owner:  # not in a forked child that ends: it does not own these sockets
        for monitored in held:
            monitored.close()
        context.destroy()
    held.clear()
