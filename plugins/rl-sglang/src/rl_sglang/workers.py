"""Between the engine's process and its schedulers: frames of refits, and why one did not start.

SGLang's own calls to its schedulers return nothing, and some of them are pickles. So each scheduler
connects to a socket in the directory of the engine's, which is this user's alone, for bytes.
"""

from __future__ import annotations

from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import TYPE_CHECKING

import msgspec

from rl_core.errors import PluginError, WorkerDiedError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["SchedulerFailure", "Workers", "connect"]

#: Seconds for schedulers that are ready to have connected, which they do first of all.
_CONNECT_S = 60.0


class SchedulerFailure(msgspec.Struct):
    """Why a scheduler could not start.

    Attributes:
        kind: Of the exception: the name of its class.
        text: Its words.
        loading: It was raised while weights were loaded.
    """

    kind: str
    text: str
    loading: bool


def connect(address: str, rank: int) -> Connection:
    """Connects a scheduler to the engine's process, and says which it is."""
    connection = Client(address, family="AF_UNIX")
    connection.send_bytes(msgspec.msgpack.encode(rank))
    return connection


class Workers:
    """The schedulers of an engine, in the order of their ranks.

    Args:
        directory: For the socket.
        count: How many there are.
    """

    def __init__(self, directory: Path, count: int) -> None:
        self.address = str(directory / "schedulers")
        self._count = count
        self._listener = Listener(self.address, family="AF_UNIX", backlog=count)
        self._connections: dict[int, Connection] = {}

    def accept(self) -> None:
        """Waits for every scheduler to connect.

        Raises:
            PluginError: One did not.
        """
        while len(self._connections) < self._count:
            if not self._accept_one(_CONNECT_S):
                raise PluginError(
                    f"{self._count - len(self._connections)} of SGLang's {self._count} schedulers "
                    f"did not connect within {_CONNECT_S:.0f} s",
                    fix="look at the end of the engine's log",
                )

    def _accept_one(self, timeout_s: float) -> bool:
        # multiprocessing's listener has no deadline; its socket can be waited for.
        if not wait([self._listener._listener._socket], timeout_s):  # type: ignore[attr-defined]
            return False
        connection = self._listener.accept()
        self._connections[msgspec.msgpack.decode(connection.recv_bytes())] = connection
        return True

    def failure(self) -> SchedulerFailure | None:
        """Why a scheduler could not start, if one said so."""
        while self._accept_one(0):
            pass
        for connection in self._connections.values():
            with suppress(EOFError, ConnectionError):
                if connection.poll():
                    return msgspec.msgpack.decode(connection.recv_bytes(), type=SchedulerFailure)
        return None

    def call(self, frame: bytes) -> list[bytes]:
        """Hands a frame to the receiver of refits in every scheduler; their answers.

        Raises:
            WorkerDiedError: A scheduler is gone.
        """
        ordered = [self._connections[rank] for rank in sorted(self._connections)]
        try:
            for connection in ordered:
                connection.send_bytes(frame)
            return [connection.recv_bytes() for connection in ordered]
        except (EOFError, OSError) as error:
            raise WorkerDiedError(
                "a scheduler of SGLang has ended during a call",
                fix="look at the end of the engine's log, and build a new backend",
            ) from error

    def close(self) -> None:
        """Lets go of the schedulers."""
        for connection in self._connections.values():
            connection.close()
        self._listener.close()
