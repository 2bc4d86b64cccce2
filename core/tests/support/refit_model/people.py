"""Those who ask for refits and generation at the same time, as threads that the search moves."""

from __future__ import annotations

import concurrent.futures
from typing import TYPE_CHECKING, Any

from refit_model.parties import BUCKET_BYTES
from refit_model.tasks import DEADLINE_S, UNTIL_IT_GOES_ON, gone, running, world
from rl_backends.rank_job import follow
from rl_core.errors import RLError, WeightsTornError, WorkerDiedError
from rl_core.weights import refit

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from refit_model.parties import Engine, Trainer
    from refit_model.world import Refit, Request, World


def overtaken(at: str, grain: int = 0) -> None:
    """Here somebody else may go first, if the scenario looks as closely as this."""
    task = running()
    if task is not None and task.asks and grain <= world().scenario.grain:
        task.stop(at, lambda: True)


def reach(process: Trainer | Engine) -> None:
    """Here a call of another process begins, which waits while that one is paused.

    Raises:
        WorkerDiedError: It is gone.
    """
    here, task = world(), running()
    if here.paused == process.name and task is not None:
        begun = here.now
        task.stop(UNTIL_IT_GOES_ON, lambda: here.paused != process.name)
        task.deadline += here.now - begun
    if not here.has(process):
        raise gone(process.name)
    here.constructing = process.name


def ask(what: str, grain: int, processes: Iterable[Any], call: Callable[[Any], Any]) -> list[Any]:
    """Futures of calls of several processes, as a cluster makes them.

    None waits for one that is paused or gone.
    """
    found: dict[str, concurrent.futures.Future[Any]] = {}
    for process in sorted(processes, key=lambda process: process.name == world().paused):
        overtaken(f"{what} {process.name}", grain)
        try:
            reach(process)
            found[process.name] = call(process)
        except WorkerDiedError as error:
            found[process.name] = concurrent.futures.Future()
            found[process.name].set_exception(error)
    return [found[process.name] for process in processes]


class Policy:
    """What a driver needs of a trainer."""

    def __init__(self, trainer: Trainer) -> None:
        self.request: Request = (0, 0)
        self._trainer = trainer

    def prepare_refit_info(self) -> dict[str, Any]:
        reach(self._trainer)
        info = self._trainer.sender.prepare()
        self.request = (self._trainer.number, info["number"])
        world().drivers_requests.append(self.request)
        return info

    def send_weights(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        return ask("send", 1, self._ranks, lambda rank: self._send(rank, options))

    @property
    def _ranks(self) -> list[Trainer]:
        others = [one for one in world().others if one.number == self._trainer.number]
        return [self._trainer, *others]

    def _send(self, trainer: Trainer, options: dict[str, Any]) -> concurrent.futures.Future[Any]:
        here = world()
        if trainer is not self._trainer:
            future = follow(trainer.sender, **options)
            trainer.sender.jobs[-1].wanted = here.versions.get(self.request)
            return future
        future = trainer.sender.send(**options)
        job = trainer.sender.jobs[-1]
        here.newest = trainer.number, job.number
        here.versions[here.newest] = job.wanted = job.version
        here.offered[job.version] = trainer.weights if trainer.whole else {}
        return future

    def cancel_refit(self, number: int) -> None:
        ask("cancel", 2, self._ranks, lambda trainer: trainer.sender.cancel(number))


class Generation:
    """What a driver needs of the engines."""

    def __init__(self, engines: list[Engine]) -> None:
        self.receiver_count = len(engines)
        self._engines = engines

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        for engine in self._engines:
            overtaken(f"prepare {engine.name}", 3)
            reach(engine)
            engine.front.prepare(info)

    def receive_weights(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        return ask("receive", 1, self._engines, lambda engine: engine.front.receive(**options))

    def cancel_refit(self, number: int) -> None:
        ask("cancel", 2, self._engines, lambda engine: engine.front.cancel(number))


def drive(here: World, step: Refit) -> Any:
    """Asks for a refit as :func:`rl_core.weights.refit` does, which it calls."""
    options = {"deadline_s": DEADLINE_S, "bucket_bytes": BUCKET_BYTES} | step.options
    trainer = here.trainer_of(step.trainer)
    policy, generation = Policy(trainer), Generation([here.engines[n] for n in step.engines])
    if not here.scenario.apart:
        policy = here.policies.setdefault(trainer.number, policy)
        generation = here.generations.setdefault(step.engines, generation)
    alone, left = not here.jobs and here.paused is None, len(here.left)
    try:
        return refit(policy, generation, **options)  # type: ignore[arg-type]
    except RLError as error:
        quiet = not here.wrong_since or (alone and len(here.left) == left)
        hopeless = here.scenario.apart or not trainer.whole or policy.request in here.given_up
        if quiet and policy.request == here.newest and not hopeless:
            here.fails(f"the newest refit, to which nothing happened, ends with {error!r}")
        raise


def give_up(here: World, number: int) -> None:
    """Gives the refit of a driver up on both sides, as that one does where one side failed."""
    task = running()
    assert task is not None
    task.stop("give up", lambda: len(here.drivers_requests) > number)
    request = here.drivers_requests[number]
    sender, engines = here.trainer.sender, list(here.engines.values())
    sender.cancel(request[1])
    jobs = [job for job in sender.jobs if job.number == request[1]]
    waits = all(job in sender.waiting() for job in jobs) if jobs else request not in here.versions
    if waits:
        here.given_up.add(request)
    ask("give up at", 0, engines, lambda engine: engine.front.cancel(request[1]))


def read(here: World, engine: Engine) -> None:
    """Generates: no weights change meanwhile, and none are half written."""
    lock = engine.lock
    most = lock.writes + len(lock._waiting)  # who waits in line already, and nobody else
    with lock.reading():
        if lock.writes > most:
            here.fails(f"{engine.name}: a writer goes before a reader who came before it")
        try:
            engine.front.check()
        except WeightsTornError:
            return
        version = engine.front.version
        engine.rows += 1
        for _ in range(here.scenario.tokens):
            overtaken("decode")
            if not here.has(engine):
                break
            engine.decodes(version)
        engine.rows -= 1


def keep(engine: Engine) -> None:
    """Keeps others from generating, without a refit."""
    with engine.lock:
        overtaken("keep")
