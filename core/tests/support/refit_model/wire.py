"""Connections and shared memory of the model, and what an eavesdropper keeps of them.

Each refit of an engine has a connection of its own, which keeps the order of its frames; among
connections there is no order: frames of one that is closed may be read after those of a later one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from refit_model.promises import check_depth, check_write
from refit_model.tasks import OTHER, TRAINERS, dead, point, running
from rl_core.errors import RefitPeerError, RefitProtocolError
from rl_core.weights.data.plan import DataMode
from rl_core.weights.transports.base import CPU, Lane, ReceiverEnd, SenderEnd, Transport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from refit_model.world import World


@dataclass
class Connection:
    """One engine's, for one refit.

    Attributes:
        key: Its name.
        trainer: Number of the trainer's process that it leads to.
        up: Frames that the trainer has not read.
        down: Frames that the engine has not read.
        closed: By the engine.
        broken: Cut off: both sides see that, and nothing passes any more.
        reported: The trainer was told that it is gone.
        forged: Another one's frames that a stranger plays to the engine, who thinks that it
            speaks with the trainer.
    """

    key: str
    trainer: int
    up: deque[bytes] = field(default_factory=deque)
    down: deque[bytes] = field(default_factory=deque)
    closed: bool = False
    broken: bool = False
    reported: bool = False
    forged: deque[bytes] | None = None

    @property
    def gone(self) -> bool:
        return self.closed or self.broken


@dataclass
class Recording:
    """What an eavesdropper has of one connection."""

    up: list[bytes] = field(default_factory=list)
    down: list[bytes] = field(default_factory=list)
    #: What lay in the lane at each bucket's announcement, by the bytes' place.
    bytes: dict[tuple[int, int], bytes] = field(default_factory=dict)


class SharedLane(Lane):
    """Bytes that every process sees at once, whoever writes them, and whenever."""

    def __init__(self, world: World, number: int, engine: EngineEnd | None = None) -> None:
        self.memory = world.lanes[number]
        self.data = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.ref = {"lane": number}
        self._world = world
        self._engine = engine

    def allocate_view(self, start: int, stop: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, offset=start, count=stop - start)

    def publish(self, start: int, stop: int, runs: Any = None) -> None:
        task = running()
        assert task is not None
        if task.job._share.buckets.plan.mode is not DataMode.DIRECT:
            check_write(self._world, self.ref["lane"], task.job.wanted)
        self._world.overhear((start, stop), bytes(self.memory[start:stop]))
        point("packed")

    def expect(self, start: int, stop: int, runs: Any = None) -> None:
        """Whoever plays a refit also gives the bytes that belong to it."""
        assert self._engine is not None
        assert self._engine.connection is not None
        played = self._world.played.get(self._engine.connection.key)
        if played is not None:
            self.memory[start:stop] = self._world.recordings[played].bytes[start, stop]

    def arrived(self) -> bool:
        point("load")
        return True

    def close(self) -> None:
        pass


class GroupLane(SharedLane):
    """Bytes that every member has for itself, as in a process group.

    One that leaves breaks it for all of them, who see so when bytes are to come.
    """

    reusable_after_failure = False

    def __init__(self, world: World, number: int, engine: EngineEnd | None = None) -> None:
        super().__init__(world, number, engine)
        self._group = world.groups.setdefault(number, Group())
        self._taken = len(self._group.spans)
        self._expected: deque[tuple[int, int]] = deque()
        if engine is not None:
            self.memory = bytearray(len(self.memory))
            self.data = torch.frombuffer(self.memory, dtype=torch.uint8)

    def publish(self, start: int, stop: int, runs: Any = None) -> None:
        self._group.spans.append(bytes(self.memory[start:stop]))
        point("packed")

    def expect(self, start: int, stop: int, runs: Any = None) -> None:
        self._expected.append((start, stop))

    def arrived(self) -> bool:
        point("load")
        if self._group.left:
            raise RefitPeerError("the broadcast failed: a member has left", peer="a member")
        start, stop = self._expected[0]
        self.memory[start:stop] = self._group.spans[self._taken]
        self._taken += 1
        return True

    def release(self) -> None:
        self._expected.popleft()

    def close(self) -> None:
        self._group.left = True


@dataclass
class Group:
    """What was broadcast in one, and whether a member has left."""

    spans: list[bytes] = field(default_factory=list)
    left: bool = False


class TrainerEnd(SenderEnd):
    def __init__(self, world: World, number: int) -> None:
        self.reads_memory = self.private = not world.scenario.group
        self.address = {"trainer": number}
        self.number = number
        self.chosen: str | None = None  # from which connection the next frame is read
        self.gone: list[str] = []
        self._world = world

    def wait(self) -> None:
        """Stops until the search chooses a frame, or something else happens."""
        world, task = self._world, running()
        assert task is not None
        now = world.now
        task.stop(
            "receive",
            lambda: bool(self.chosen or self.gone or task.job.given_up or world.now != now),
        )

    def receive(self, timeout_s: float) -> list[tuple[str, bytes]]:
        if dead():
            return []
        if timeout_s:
            self.wait()
        connections, key = self._world.connections, self.chosen
        if key is not None and not key.startswith(OTHER):  # those of ranks are read beside this
            self.chosen = None
            return [(key, connections[key].up.popleft())]
        if timeout_s:
            return []
        return [  # the last frames of connections that were closed
            (key, connection.up.popleft())
            for key, connection in connections.items()
            if connection.closed and self._mine(key) and connection.up
        ]

    def _mine(self, key: str) -> bool:
        return self._world.connections[key].trainer == self.number

    def send(self, key: str, frame: bytes) -> bool:
        if dead():
            return True
        connection = self._world.connections[key]
        if connection.gone:
            check_depth(self._world)
            return False
        connection.down.append(frame)
        self._world.recordings[key].down.append(frame)
        return True

    def departed(self) -> list[str]:
        gone, self.gone = self.gone, []
        return gone

    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> Lane:
        self._world.lanes.append(bytearray(nbytes))
        return self._world.wire.lane(self._world, len(self._world.lanes) - 1)

    def close(self) -> None:
        pass


class EngineEnd(ReceiverEnd):
    def __init__(self, world: World, party: str, trainer: int) -> None:
        self.private = not world.scenario.group
        self.connection: Connection | None = None
        self._world = world
        self._party = party
        self._trainer = trainer

    def connect(self, address: Mapping[str, Any]) -> None:
        if not dead():
            self._trainer = address["trainer"]
            self.connection = self._world.connect(self._party, self._trainer)

    def disconnect(self) -> None:
        if not dead() and self.connection is not None:
            self.connection.closed = True

    def receive(self, timeout_s: float) -> bytes | None:
        world, task, connection = self._world, running(), self.connection
        if dead():
            return None
        assert connection is not None
        assert task is not None
        down = connection.down
        if timeout_s and not down and not connection.forged:
            now = world.now
            task.stop(
                "receive",
                lambda: bool(down or self.lost() or task.job.given_up or world.now != now),
            )
            if task.killed:
                return None
        if timeout_s and not down and connection.forged:
            return connection.forged.popleft()
        return down.popleft() if down else None

    def send(self, frame: bytes) -> None:
        connection = self.connection
        if dead() or connection is None or connection.broken:
            return
        if connection.forged is None:  # what he is told does not matter to the stranger
            connection.up.append(frame)
            self._world.recordings[connection.key].up.append(frame)

    def lost(self) -> bool:
        connection = self.connection
        if dead() or connection is None:
            return False
        gone = connection.broken or not self._world.lives(connection.trainer)
        return gone and not connection.down and connection.forged is None

    def attach(self, ref: Mapping[str, Any], receiver: str, device: torch.device = CPU) -> Lane:
        number = ref.get("lane", -1)
        if number not in range(len(self._world.lanes)):
            raise RefitProtocolError(f"there is no lane {dict(ref)}")
        return self._world.wire.lane(self._world, number, self)

    def close(self) -> None:
        pass


class Wire(Transport):
    """Makes the ends of whoever asks next."""

    def __init__(self, world: World) -> None:
        self.lane = GroupLane if world.scenario.group else SharedLane
        self._world = world

    def sender(self, **options: Any) -> SenderEnd:
        world = self._world
        party = world.constructing if world.constructing in TRAINERS else "T"
        return TrainerEnd(world, world.trainer_of(party).number)

    def rank(self, address: Mapping[str, Any], **options: Any) -> SenderEnd:
        return TrainerEnd(self._world, address["trainer"])

    def receiver(self, address: Mapping[str, Any], **options: Any) -> ReceiverEnd:
        task = running()
        party = self._world.constructing if task is None else task.party
        return EngineEnd(self._world, party, address["trainer"])
