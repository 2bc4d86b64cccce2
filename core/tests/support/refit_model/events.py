"""What can happen in a world, and that it happens.

A choice is a line of text, which is what traces are made of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from refit_model.promises import check_engines
from refit_model.tasks import OTHER, TRAINERS, inhabit
from refit_model.world import Refit, Train

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refit_model.tasks import Task
    from refit_model.world import World

#: Faults of which all who wait hear at once.
HEARD = ("pose", "flood", "quit", "crash", "lose", "step", "drift")
#: Frames of a stranger, more than an innocent connection has unread.
_FLOOD = 6


def choices(world: World) -> list[str]:
    """What can happen next; first what happens if nothing goes wrong."""
    if world.broken:
        return []
    if world.interrupted is not None:
        task = world.interrupted
        return [f"{task.party} goes on", *interruptions(world, task)]
    found = [*_readings(world), *_driver(world), *_people(world)]
    quiet = not found
    if quiet and any(world.bounds(task) for task in world.tasks):
        found.append("time passes")
    if not found and world.paused is None:
        return []
    # Whoever is paused does, once it goes on, what touches nobody before they look; so it is enough
    # to let it go on when they can do nothing else, and after what it would see itself.
    if world.paused is not None and (quiet or world.stirred):
        found.append(f"{world.paused} resumes")
        if "silence" in world.left:
            found.append(f"{world.paused} is silent")
    if world.most:
        others = {OTHER for _ in world.others}
        for party in (*(trainer.name for trainer in world.trainers), *others, *world.engines):
            found += _faults(world, party)
        found += _replays(world)
    return found


def _readings(world: World) -> Iterator[str]:
    for task in world.jobs:
        if task.party in TRAINERS and task.at == "receive" and task.party != world.paused:
            yield from _readings_of(world, task)


def _readings_of(world: World, task: Task) -> Iterator[str]:
    peers = [*task.job.session.connections, *task.job.session.ranks.values()]
    number = world.trainer_of(task.party).number
    for key, connection in world.connections.items():
        if connection.trainer != number:
            continue
        if connection.up and not connection.broken:
            yield f"{task.party} reads {key}"
        elif connection.gone and key in peers and not connection.reported:
            yield f"{task.party} sees that {key} is gone"


def _driver(world: World) -> Iterator[str]:
    for party in world.to_ask:
        if party != world.paused:
            yield f"ask {party}"
    if world.to_ask or world.position == len(world.scenario.script):
        return
    step = world.scenario.script[world.position]
    asked = world.asked_tasks
    later = isinstance(step, Refit) and step.later
    if not all(task.over for task in asked) and (later or not any(task.failed for task in asked)):
        return
    if isinstance(step, Train):
        if world.paused != "T":
            yield "train"
    elif world.paused not in ("T", *step.engines):
        yield f"refit {world.refit + 1}"


def _people(world: World) -> Iterator[str]:
    people = world.scenario.drivers or world.scenario.readers
    if people and not world.people_came:
        if world.position == len(world.scenario.script) and not world.tasks and not world.paused:
            yield "all ask"
        return
    first: dict[str, Task] = {}  # of those who do the same, who begins does not matter
    for task in world.tasks:
        if task.asks and task.at == "start" and first.setdefault(task.party, task) is not task:
            continue
        if world.chosen(task) and world.ready(task):
            yield f"{task.ident}: {task.at}"


def interruptions(world: World, task: Task) -> list[str]:
    if not world.most:
        return []
    party, found = task.party, []
    if f"pause {party}" in world.left and world.paused is None:
        found.append(f"pause {party} at {task.at}")
    if f"crash {party}" in world.left:
        found.append(f"crash {party} at {task.at}")
    often = (f"{kind} {party}" for kind in ("lose", "step", "drift"))
    found += [f"{fault} at {task.at}" for fault in often if fault in world.left]
    return [*found, *_engine_events(world, party)]


def _engine_events(world: World, party: str) -> Iterator[str]:
    engine = world.engines.get(party)
    if engine is not None and not engine.lock.held:
        events = (f"drop {party}", f"load {party}")
        yield from (event for event in events if event in world.left)


def _faults(world: World, party: str) -> Iterator[str]:
    tasks = [task for task in world.jobs if task.party == party]
    busy = tasks or (world.people_came and world.tasks)
    if f"pause {party}" in world.left and world.paused is None and busy:
        yield f"pause {party}"
    goes_on = tasks and party != world.paused
    if f"quit {party}" in world.left and goes_on and not tasks[0].job.cancelled:
        yield f"quit {party}"
    for fault in (f"{kind} {party}" for kind in ("crash", "lose", "step", "drift")):
        if fault in world.left and busy:
            yield fault
    if party != world.paused and world.tasks:
        yield from _engine_events(world, party)


def _replays(world: World) -> Iterator[str]:
    old = [key for key, recording in world.recordings.items() if recording.down]
    if "play" in world.left:
        for party in world.to_ask:
            if party != "T" and party != world.paused:
                yield from (f"ask {party} and play {key}" for key in old)
    if "pose" in world.left and any(task.party == "T" for task in world.tasks):
        yield from (f"pose {key}" for key in old)
    if "flood" in world.left and any(task.party == "T" for task in world.tasks):
        yield "flood"
    if "replay" not in world.left:
        return
    for live, connection in world.connections.items():
        if connection.closed or connection.broken or connection.forged is not None:
            continue
        for key in old:
            recording = world.recordings[key]
            yield from (f"replay up {i} of {key} on {live}" for i in range(len(recording.up)))
            yield from (f"replay down {i} of {key} on {live}" for i in range(len(recording.down)))


def take(world: World, choice: str) -> None:
    """Makes it happen, and what follows at once."""
    inhabit(world)
    task, world.interrupted = world.interrupted, None
    world.ran.clear()
    world.stirred = choice.startswith(("ask", "train", "time", "crash")) or "silent" in choice
    match choice.split():
        case [_, "goes", "on"]:
            pass
        case [party, "reads", key]:
            world.trainer_of(party).sender.connection("ipc").end.chosen = key
        case [party, "sees", "that", key, "is", "gone"]:
            world.connections[key].reported = True
            world.trainer_of(party).sender.connection("ipc").end.gone.append(key)
        case ["ask", party]:
            world.ask(party)
        case ["ask", party, "and", "play", key]:
            _happens(world, "play")
            world.next_play = key
            world.ask(party)
        case ["all", "ask"]:
            world.people_come()
        case [ident, *_] if ident.endswith(":"):
            world.move(next(task for task in world.tasks if task.ident == ident[:-1]))
        case ["train"]:
            step = world.scenario.script[world.position]
            assert isinstance(step, Train)
            world.trainer.train(step.weights)
            world.position += 1
        case ["refit", _]:
            world.begin()
        case ["time", "passes"]:
            world.time_passes()
        case [party, "resumes"]:
            world.paused = None
            world.wrong_since = True
        case [party, "is", "silent"]:
            world.left.remove("silence")
            world.cut_off(party)
        case ["pause", party, *_]:
            _happens(world, f"pause {party}")
            world.paused = party
        case ["crash", party, *_]:
            _happens(world, f"crash {party}")
            world.crash(party)
        case ["quit", party]:
            _happens(world, f"quit {party}")
            next(t for t in world.jobs if t.party == party).job.cancelled = "given up"
        case ["lose", party, *_]:
            _happens(world, f"lose {party}")
            trainer = world.trainer_of(party)
            trainer.lost_rank = True
            trainer.sender.connection("ipc").end.gone.append("rank 1")
            world.interrupted = task
        case ["step", party, *_]:
            _happens(world, f"step {party}")
            world.others[-1].train({"a": 2.0, "b": 2.0})
            world.interrupted = task
        case ["drift", party, *_]:
            _happens(world, f"drift {party}")
            world.others[-1].tensor["b"].fill_(2.0)
            world.interrupted = task
        case ["drop", party]:
            _happens(world, f"drop {party}")
            world.engines[party].drop()
            world.interrupted = task
        case ["load", party]:
            _happens(world, f"load {party}")
            world.engines[party].load_own()
            world.interrupted = task
        case ["replay", way, number, "of", key, "on", live]:
            _happens(world, "replay")
            world.happened.append(f"replay {live.partition('#')[0]}")
            frame = getattr(world.recordings[key], way)[int(number)]
            getattr(world.connections[live], way).append(frame)
        case ["flood"]:
            _happens(world, "flood")
            stranger = world.connect("X", world.trainer.number)
            stranger.up.extend(f"frame {i} that is none".encode() for i in range(_FLOOD))
            stranger.closed = True
        case ["pose", key]:
            _happens(world, "pose")
            stranger = world.connect("X", world.trainer.number)
            stranger.up.extend(world.recordings[key].up)
        case _:
            raise ValueError(choice)
    if world.interrupted is None:
        world.advance()
    else:
        check_engines(world)


def _happens(world: World, fault: str) -> None:
    world.left.remove(fault)
    world.happened.append(fault)
    world.most -= 1
    # A stranger on a connection of his own is no reason for a refit to fail.
    world.wrong_since |= fault not in ("pose", "flood")
    # Who ends breaks its connections, which is noticed at once.
    world.unheard |= not fault.startswith(HEARD)
