"""Refits that end in the two workers of a hosted engine, each a process, and their failures."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from fake_backend import SIZES, SOON, filled, prompts, until
from patience import enough_for

from rl_conformance.doubles import Sink, Trainer
from rl_core import refit
from rl_core.errors import (
    DeadlineError,
    RefitError,
    RemoteError,
    RLError,
    WeightsTornError,
)
from rl_core.futures import wait
from rl_hosting import WorkerRefits

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ENGINE = "fake_backend:WorkersEngine"


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    with closing(Trainer(filled(1.0))) as made:
        yield made


@pytest.fixture
def pair(start: Callable[..., Any], trainer: Trainer) -> Callable[..., Any]:
    def build(**fake: Any) -> Any:
        return start(engine=ENGINE, fake=fake)

    return build


def installed(engine: Any) -> list[float]:
    """The value of every tensor in every worker, which must be the same everywhere in it."""
    found = []
    for per_worker in engine.call_in_workers("fake_backend:values"):
        assert len(per_worker) == len(SIZES)
        found += per_worker
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verify": "installed"},
        {"isolation": "staged"},
        {"mode": "packed", "bucket_bytes": 512},
        {"transport": "collective"},
    ],
    ids=lambda options: "-".join(map(str, options.values())) or "plain",
)
def test_both_workers_take_a_refit(pair, trainer, options):
    engine = pair()
    for version in (1, 2):
        trainer.tensors["b"].fill_(float(version))
        report = refit(trainer, engine, deadline_s=SOON, **options)
        assert (report.version, engine.weights_version) == (version, version)
        assert installed(engine) == [1.0, float(version), 1.0] * 2
    rows = engine.generate(prompts(5))
    assert rows["weights_version"].tolist() == [2]
    assert rows["weights_origin"].tolist() == [report.origin] == [engine.weights_origin]


def test_the_lock_that_is_granted_to_one_refit_lets_no_other_one_write(trainer):
    """The driver may still wait for it on behalf of a refit that another has followed."""
    weights = filled(0.0)
    worker = WorkerRefits(lambda: Sink(weights, {}), "a worker")

    def begin(key: str) -> list[Any]:
        info = trainer.prepare_refit_info()
        worker.prepare(msgspec.msgpack.encode(info))
        worker.receive(key, number=info["number"], deadline_s=SOON)
        return trainer.send_weights(number=info["number"], deadline_s=SOON)

    def wants_lock(key: str) -> bool:
        return bool(worker.done(key, 0.1).get("wants_lock"))

    begin("first")
    until(lambda: wants_lock("first"), "that the first one waits for generation")
    sending = begin("second")
    until(lambda: wants_lock("second"), "that the second one waits for generation")
    worker.grant("first")
    for _ in range(5):
        assert wants_lock("second")
    assert worker.done("first", 0.0)["done"]
    assert weights["a"].sum() == 0
    worker.grant("second")
    assert worker.state()["torn"]  # as long as it may write
    wait(sending, SOON)
    until(lambda: worker.done("second", 0.1)["done"], "the end of the second one")
    assert worker.state() == {
        "version": 1,
        "origin": trainer.sender.origin,
        "label": f"{trainer.sender.origin:x}-1",
        "torn": False,
    }
    worker._receiver.close()


@pytest.mark.parametrize("act", ["kill", "raise", "exit"])
@pytest.mark.parametrize("moment", ["begin", "write", "finish"])
def test_a_worker_that_fails_in_a_refit_fails_it_by_name(pair, trainer, moment, act):
    engine = pair(worker_acts={moment: act})
    begun = time.monotonic()
    with pytest.raises((RefitError, RemoteError), match=r"fake|WorkersEngine"):
        refit(trainer, engine, deadline_s=SOON)
    assert time.monotonic() - begun < SOON
    assert engine.weights_version == 0
    if act == "raise" and moment != "begin":
        with pytest.raises(WeightsTornError):
            engine.generate(prompts(5))
    elif act == "kill":
        with pytest.raises(RLError) as later:
            engine.generate(prompts(5))
        assert "the fake engine starts" in later.value.details["log"]


@pytest.mark.parametrize("act", [pytest.param("stop", marks=pytest.mark.full), "hang"])
def test_a_worker_that_hangs_in_a_refit_fails_it_within_the_deadline(pair, trainer, act):
    seconds = enough_for(lambda: refit(trainer, pair()), least=4.0)
    engine = pair(worker_acts={"write": act})
    with pytest.raises((RefitError, RemoteError, DeadlineError), match=r"fake|WorkersEngine"):
        refit(trainer, engine, deadline_s=seconds)
    with pytest.raises(RLError):
        engine.generate(prompts(5))


@pytest.mark.parametrize("victim", ["pid", "worker"])
def test_an_engine_that_is_killed_while_a_sender_is_awaited(pair, trainer, victim):
    engine = pair()
    engine.prepare_refit_info(trainer.prepare_refit_info())
    [taking] = engine.receive_weights(deadline_s=SOON)
    pid = engine.pid if victim == "pid" else engine.engine_facts["worker_pids"][1]
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RemoteError, match=r"fake engine|WorkersEngine"):
        wait(taking, SOON)


def test_a_shutdown_ends_a_refit_that_waits(pair, trainer):
    engine = pair()
    engine.prepare_refit_info(trainer.prepare_refit_info())
    [taking] = engine.receive_weights(deadline_s=SOON)
    engine.shutdown()
    with pytest.raises(RefitError, match="was shut down"):
        wait(taking, SOON)


def test_the_answers_of_another_number_of_workers_are_refused(start, trainer):
    engine = start(fake={"facts": {"workers": 3}})
    with pytest.raises(RLError, match="1 answers, expected 3"):
        engine.prepare_refit_info(trainer.prepare_refit_info())
