"""Those who ask for refits and generation at the same time, as threads that the search moves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from refit_model.parties import BUCKET_BYTES
from refit_model.tasks import DEADLINE_S, running, world
from rl_core.errors import WeightsTornError
from rl_core.refit import refit

if TYPE_CHECKING:
    import concurrent.futures

    from refit_model.parties import Engine
    from refit_model.world import Refit, World


def overtaken(at: str, grain: int = 0) -> None:
    """Here somebody else may go first, if the scenario looks as closely as this."""
    task = running()
    if task is not None and task.asks and grain <= world().scenario.grain:
        task.stop(at, lambda: True)


class Policy:
    """What a driver needs of a trainer."""

    def __init__(self, world: World, party: str) -> None:
        self._world = world
        self._party = party

    def prepare_refit_info(self) -> dict[str, Any]:
        self._world.constructing = self._party
        return self._world.trainer_of(self._party).sender.prepare()

    def stream_weights_via_ipc_zmq(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        overtaken("send", 1)
        here, refit_id = self._world, options["refit_id"]
        trainer = here.trainer_of(self._party)
        future = trainer.sender.send(**options)
        jobs = [task.job for task in here.jobs if task.party == self._party]
        [job] = [job for job in jobs if job.refit_id == refit_id]
        here.numbers[refit_id] = job.number = job.version
        here.offered[job.version] = trainer.weights
        return [future]

    def cancel_refit(self, refit_id: str) -> None:
        overtaken(f"cancel {self._party}", 2)
        self._world.trainer_of(self._party).sender.cancel(refit_id)


class Generation:
    """What a driver needs of the engines."""

    def __init__(self, engines: list[Engine]) -> None:
        self.receiver_count = len(engines)
        self._engines = engines

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        for engine in self._engines:
            overtaken(f"prepare {engine.name}", 3)
            engine.front.prepare(info)

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[concurrent.futures.Future[Any]]:
        futures = []
        for engine in self._engines:
            overtaken(f"receive {engine.name}", 1)
            futures.append(engine.front.receive(**options))
        return futures

    def cancel_refit(self, refit_id: str) -> None:
        for engine in self._engines:
            overtaken(f"cancel {engine.name}", 2)
            engine.front.cancel(refit_id)


def drive(here: World, step: Refit) -> Any:
    """Asks for a refit as :func:`rl_core.refit.refit` does, which it calls."""
    engines = [here.engines[name] for name in step.engines]
    generation = Generation(engines)
    options = {"deadline_s": DEADLINE_S, "bucket_bytes": BUCKET_BYTES} | step.options
    return refit(Policy(here, step.trainer), generation, **options)  # type: ignore[arg-type]


def read(here: World, engine: Engine) -> None:
    """Generates: no weights change meanwhile, and none are half written."""
    lock = engine.lock
    most = lock.writes + (not lock.held)  # who waits in line already, but nobody after a writer
    with lock.reading():
        if lock.writes > most:
            here.fails(f"{engine.name}: a writer goes before a reader whom another one kept out")
        try:
            engine.front.check()
        except WeightsTornError:
            return
        version = engine.front.version
        engine.rows += 1
        overtaken("decode")
        engine.rows -= 1
        engine.decodes(version)


def keep(engine: Engine) -> None:
    """Keeps others from generating, without a refit."""
    with engine.lock:
        overtaken("keep")
