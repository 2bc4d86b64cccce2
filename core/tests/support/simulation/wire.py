"""A transport within one test: queues of frames and bytes that it can reach into."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import RefitProtocolError
from rl_core.weights.transports.base import CPU, Lane, ReceiverEnd, SenderEnd, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from simulation.network import Network
    from simulation.parties import Engine, Faults, Trainer


class MemoryLane(Lane):
    """Bytes that both sides see at once."""

    def __init__(self, memory: bytearray, number: int, faults: Faults) -> None:
        self.data = torch.frombuffer(memory, dtype=torch.uint8)
        self.ref = {"lane": number}
        self.memory = memory
        self.published: list[tuple[int, int]] = []
        self._faults = faults

    def allocate_view(self, start: int, stop: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=start, count=stop - start)

    def publish(self, start: int, stop: int, runs: Any = None) -> None:
        self._faults.reached("publish")
        self.published.append((start, stop))

    def expect(self, start: int, stop: int, runs: Any = None) -> None:
        self._faults.reached("expect")

    def release(self) -> None:
        self._faults.reached("release")

    def close(self) -> None:
        pass


class TrainerEnd(SenderEnd):
    reads_memory = True

    def __init__(self, network: Network, trainer: Trainer) -> None:
        self.address = {"trainer": trainer.number}
        self.inbox: list[tuple[str, bytes]] = []
        self.later: list[tuple[str, bytes]] = []  # what arrives after that
        self.gone: list[str] = []
        self._network = network
        self._trainer = trainer

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        frames, self.inbox, self.later = self.inbox, self.later, []
        return frames

    def send(self, key: str, frame: bytes) -> bool:
        if key in self._network.closed:
            return False
        self._network.down.append((key, frame))
        return True

    def departed(self) -> list[str]:
        arriving = {key for key, _ in self._network.up}  # a farewell overtakes no frame
        gone = [key for key in self.gone if key not in arriving]
        self.gone = [key for key in self.gone if key in arriving]
        return gone

    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> Lane:
        self._trainer.faults.reached("lane")
        number = len(self._network.lanes)
        lane = MemoryLane(bytearray(nbytes), number, self._trainer.faults)
        self._network.lanes.append(lane)
        return lane

    def close(self) -> None:
        pass


class EngineEnd(ReceiverEnd):
    def __init__(self, network: Network, engine: Engine) -> None:
        self.key = ""
        self.inbox: deque[bytes] = deque()
        self.is_lost = False
        self._network = network
        self._engine = engine

    def connect(self, address: Mapping[str, Any]) -> None:
        self._engine.end = self  # others are made to clear away what is left of a trainer
        self.key = f"connection {next(self._network.connections)}"
        self.inbox.clear()
        self.is_lost = False

    def disconnect(self) -> None:
        self._network.closed.add(self.key)
        self._network.trainer.end.gone.append(self.key)
        self.key = ""

    def receive(self, timeout_s: float) -> bytes | None:
        return self.inbox.popleft() if self.inbox else None

    def send(self, frame: bytes) -> None:
        self._network.sent(self._engine, self.key, frame)

    def lost(self) -> bool:
        return self.is_lost

    def attach(self, ref: Mapping[str, Any], receiver: str, device: torch.device = CPU) -> Lane:
        self._engine.faults.reached("attach")
        if ref.get("lane", -1) not in range(len(self._network.lanes)):
            raise RefitProtocolError(f"there is no lane {ref}")
        theirs = self._network.lanes[ref["lane"]]
        return MemoryLane(theirs.memory, ref["lane"], self._engine.faults)

    def close(self) -> None:
        pass


class Wire(Transport):
    """Makes the ends of whoever asks next."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.engine: Engine | None = None

    def sender(self, **options: Any) -> SenderEnd:
        return self.network.trainer.end

    def receiver(self, address: Mapping[str, Any], **options: Any) -> ReceiverEnd:
        assert self.engine is not None
        end = EngineEnd(self.network, self.engine)
        if not hasattr(self.engine, "end"):
            self.engine.end = end
        return end
