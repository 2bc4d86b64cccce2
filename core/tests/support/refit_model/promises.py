"""What must hold, whatever happens."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from refit_model.tasks import DEADLINE_S, OTHER, TRAINERS
from rl_core.errors import RefitAborted, RLError
from rl_core.weights.protocol.session import Phase

if TYPE_CHECKING:
    from refit_model.parties import Engine
    from refit_model.tasks import Task
    from refit_model.world import World
    from rl_core.weights.job import Endpoint

#: How often the loop of a refit may be inside itself: an effect that waits, and why it fails.
_MOST_PUMPS = 3


def check_engines(world: World) -> None:
    """An engine that is not torn serves what was offered; what is known of it is what it has.

    While its lock is held nobody can look.
    """
    for engine in world.engines.values():
        receiver, front, weights = engine.receiver, engine.front, engine.weights
        engine.check_label()
        if engine.lock.held:
            continue
        expected = world.offered.get(front.version) if engine.own is None else engine.own
        if not front.torn and weights != expected:
            world.fails(
                f"{engine.name} serves version {front.version} as {weights}, not {expected}"
            )
        for name, digest in receiver.known.items():
            if world.digested[digest] != engine.tensor[name].numpy().tobytes():
                world.fails(f"{engine.name} knows {name} to be what it is not")


def check_commit(world: World, engine: Engine, task: Task, connection: tuple[int, str]) -> None:
    """An engine commits what it was asked for, once the trainer decided so on its connection."""
    version, key = connection
    if world.request_of(task.job) in world.given_up:
        world.fails(f"{engine.name} commits version {version}, which was given up before")
    if connection not in world.decided:
        world.fails(f"{engine.name} commits version {version}, which nobody decided on {key}")
    for party in ("T", OTHER) if world.scenario.ranks else ():
        if (party, *world.request_of(task.job)) not in world.confirmed:
            world.fails(f"{engine.name} commits version {version}, which {party} did not confirm")
    wanted = task.job.wanted
    if version != wanted:
        world.fails(f"{engine.name} commits version {version} where {wanted} was requested")


def check_frame(world: World, frame: bytes) -> None:
    """Whoever is not its author can say nothing a second time."""
    if frame in world.read:
        world.fails("a frame is taken twice")
    world.read.add(frame)


def check_write(world: World, lane: int, version: int) -> None:
    """Nothing is written to a buffer that an engine may still read for an earlier refit."""
    for task in world.jobs:
        if task.party not in world.engines or task.job.session.phase is not Phase.TRANSFER:
            continue
        read = any(its.ref == {"lane": lane} for its in task.job._lanes.values())
        if task.job.wanted < version and read and not task.over:
            world.fails(f"T writes what {task.party} reads for version {task.job.wanted}")


def check_end(world: World, task: Task) -> None:
    """A refit ends well or with an error of ours; well at the trainer means well everywhere."""
    error = task.future.exception()
    if not isinstance(error, RLError | None):
        world.fails(f"{task.party} ends with {type(error).__name__}: {error}")
    if task.party == "D":
        check_driver(world, task)
    if task.party == OTHER:
        check_rank(world, task)
    if error is not None or task.party not in TRAINERS:
        return
    version, peers = task.job.version, task.job.session.peers
    wanted = task.job.options.receivers
    if len({key.partition("#")[0] for key in peers}) != wanted or any(
        (version, key) not in world.committed for key in peers
    ):
        world.fails(f"{task.party} reports success of {version}, which not all committed")
    world.reported.add(world.request_of(task.job))


def check_rank(world: World, task: Task) -> None:
    """Another rank ends as rank 0 does, unless something happened to itself."""
    error, ended = task.future.exception(), world.request_of(task.job) in world.reported
    happened = any(f"{kind} {OTHER}" in world.happened for kind in ("pause", "quit", "replay"))
    if (error is None) > ended or (error is not None and ended and not happened):
        world.fails(f"{OTHER} ends with {error!r}, rank 0 {'well' if ended else 'otherwise'}")


def check_driver(world: World, task: Task) -> None:
    """A driver gets its refit, unless it was given up; one of another process may be refused."""
    error = task.future.exception()
    world.served |= error is None
    may_be_refused = world.given_up or world.scenario.apart
    fine = error is None or (isinstance(error, RefitAborted) and may_be_refused)
    if not fine and not world.wrong_since:
        world.fails(f"{task.ident} ends with {type(error).__name__}: {error}")


def check_depth(world: World) -> None:
    """What one frame leads to is over before the next: a peer does not say how deep that goes."""
    frame, depth = sys._getframe(), 0
    while frame.f_back is not None:
        frame = frame.f_back
        depth += frame.f_code.co_name == "pump"
    if depth > _MOST_PUMPS:
        world.fails(f"{depth} frames are taken inside each other")


def check_patience(world: World) -> None:
    """Nobody waits until the deadline if nothing is wrong.

    Where a driver is there to hear of it, one side giving up is no reason for the other to wait.
    And nobody waits for longer than that, whatever is wrong, unless it is stopped itself.
    """
    # One that has just got its turn looks at the clock when time passes next.
    least = world.now - DEADLINE_S - 1
    late = [task for task in world.tasks if world.bounds(task) and task.deadline < least]
    if late:
        world.fails(f"{', '.join(task.ident for task in late)} wait after their deadline")
    excused = world.unheard if world.people_came else world.wrong_since
    if world.paused is None and not excused:
        who = ", ".join(sorted(task.ident for task in world.tasks))
        world.fails(f"{who} wait until the deadline, though nothing is wrong")


def check_last(world: World) -> None:
    """A refit in which nothing went wrong, and nothing was going on before, commits everywhere."""
    if world.refit and world.clean_start and not world.wrong_since:
        for name in world.asked:
            if world.engines[name].receiver.version != world.refit:
                world.fails(f"{name} did not commit {world.refit}, though nothing was wrong")


def check_finish(world: World) -> None:
    """Nothing happens any more."""
    check_last(world)
    if world.tasks:
        world.fails("somebody waits for ever")
    excused = world.wrong_since or world.given_up or world.scenario.apart
    if world.scenario.drivers and not world.served and not excused:
        world.fails("no driver gets its refit")
    for trainer in [*world.trainers, *world.others]:
        described = [trainer.sender._described] if trainer.sender._described else []
        if trainer.open != described or _is_kept_busy(trainer.sender):
            world.fails(f"{trainer.name} has something of a refit that is over")
    if any(not connection.gone for connection in world.connections_of(OTHER)):
        world.fails(f"{OTHER} has a connection of a refit that is over")
    for name, engine in world.engines.items():
        lock, front = engine.lock, engine.front
        held = lock.held or lock.refit_waiting or engine.half_written or engine.rows
        connected = any(not connection.gone for connection in world.connections_of(name))
        if held or connected or _is_kept_busy(engine.receiver):
            world.fails(f"{name} has something of a refit that is over")
        if (front.version, front.torn) != (engine.receiver.version, engine.receiver.torn):
            world.fails(f"the driver takes {name} for something else than it is")
        [known, *others] = [trainer.sender.version for trainer in world.trainers]
        if front.version > known and world.trainer.number == 1 and not others:
            world.fails(f"{name} serves version {front.version}, the trainer knows of {known}")


def _is_kept_busy(endpoint: Endpoint[Any]) -> bool:
    return bool(endpoint.jobs or endpoint.turn.locked())
