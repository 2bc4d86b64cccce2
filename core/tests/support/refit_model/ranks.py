"""Another rank of the trainer, with its connections to rank 0, which the search reads and cuts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from refit_model.tasks import OTHER, dead
from refit_model.wire import EngineEnd
from rl_core.errors import LifecycleError, RefitPeerError, RefitProtocolError
from rl_core.weights.protocol.frames import Channel, read_hello
from rl_core.weights.protocol.messages import Abort, Over
from rl_core.weights.sending.ranks import Ranks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from refit_model.parties import Trainer
    from refit_model.wire import TrainerEnd
    from refit_model.world import World
    from rl_core.weights.transports.base import SenderEnd


class Client(EngineEnd):
    """The other rank's end."""

    def open(self) -> None:
        self.disconnect()
        self.connect({"trainer": self._trainer})

    def close(self) -> None:
        self.disconnect()


class TwoRanks(Ranks):
    """The ranks of a trainer, as one of the two knows them.

    Attributes:
        ends: How refits ended, by number, to which the other rank has not come yet.
        sending: The refit that reads what arrives.
    """

    def __init__(self, world: World, rank: int, trainer: Trainer) -> None:
        self.rank = self.pid = rank
        self.token, self.host = f"ranks of {trainer.number}", "host"
        self.ends: dict[int, Over | Abort] = {}
        self.sending = 0
        self._number = trainer.number
        self._trainer = trainer
        self._world = world

    @property
    def names(self) -> Sequence[str]:
        return ["rank 0 of 2", "rank 1 of 2"]

    def lost(self, rank: int) -> RefitPeerError:
        return RefitPeerError(f"{self.names[rank]} has ended", peer=f"rank {rank}", rank=rank)

    def connect(self) -> Client:  # type: ignore[override]
        return Client(self._world, OTHER, self._number)

    # -- rank 0's connections to the other --------------------------------------------------------

    @property
    def _end(self) -> TrainerEnd:
        end: TrainerEnd = self._trainer.sender.connection("ipc").end  # type: ignore[assignment]
        return end

    def begin(self, number: int) -> None:
        self.sending = number

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        """The frame that the search wants read; on connections that are closed, all of them."""
        end, found = self._end, []
        if dead():
            return []
        for key, connection in self._world.connections.items():
            mine = self.has(key) and connection.trainer == self._number and not connection.broken
            while mine and connection.up and (connection.closed or end.chosen == key):
                end.chosen = None if end.chosen == key else end.chosen
                found.append((key, connection.up.popleft()))
        return [(key, frame) for key, frame in found if not self._comes_late(key, frame)]

    def wait(self, end: SenderEnd, timeout_s: float) -> None:
        if timeout_s and not dead():
            self._end.wait()

    def send(self, key: str, frame: bytes) -> bool:
        return self._end.send(key, frame)

    def departed(self) -> list[str]:
        return []  # the end of the receivers reports them all

    def has(self, key: str) -> bool:
        return key.startswith(OTHER)

    def ended(self) -> list[int]:
        return [1] if self._trainer.other is None else []

    def introduce(self, rank: int, pid: int, host: str) -> None:
        pass

    def check_state(self, rank: int, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise LifecycleError(f"rank 1 is at step {theirs}", fix="train all", rank=1)

    def end(
        self, number: int, message: Over | Abort, here: Mapping[int, str], late: set[int]
    ) -> None:
        if self.sending == number:
            self.sending = 0
        if 1 not in here and 1 not in late:
            self.ends.setdefault(number, message)

    def see_off(self) -> bool:
        """Answers the other rank where it comes to a refit that is over, while none is sent."""
        if self.sending or not self.ends:
            return False
        for key, connection in self._world.connections.items():
            mine = self.has(key) and connection.trainer == self._number and not connection.gone
            if mine and connection.up and self._comes_late(key, connection.up[0]):
                connection.up.popleft()
                return True
        return False

    def _comes_late(self, key: str, frame: bytes) -> bool:
        try:
            hello = read_hello(frame, self.token)
        except RefitProtocolError:
            return False
        due = [] if hello is None else [number for number in self.ends if number >= hello.number]
        if hello is None or not due:
            return False
        ours = self.ends.pop(hello.number, None)
        answer = ours or Abort("", "RefitAborted", "that refit is over", max(due))
        self.send(key, Channel(self.token, hello.nonce, "sender").encode(answer))
        return True

    def close(self) -> None:
        pass
