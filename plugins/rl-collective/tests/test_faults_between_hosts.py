"""As on one host, over the transport that reaches other hosts; and what survivors hold."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from killable import (
    LATE,
    Cast,
    EngineParty,
    TrainerParty,
    assert_names,
    assert_names_the_sender,
    begin,
    census,
    gained,
    introduce,
    refit,
)
from simple_pair import until

from rl_core.errors import RefitAborted, RefitPeerError, WeightsTornError

pytestmark = [pytest.mark.concerns("core/"), pytest.mark.usefixtures("nothing_is_left")]

OLD, NEXT = 0, 2


@pytest.mark.parametrize(
    ("at", "phase"), [("device", "PREPARE"), (LATE, "TRANSFER"), ("confirm", "TRANSFER")]
)
def test_an_engine_elsewhere_survives_a_trainer_that_is_killed(stack, at, phase):
    cast = Cast(stack, transport="collective")
    engine, trainer = cast.here(EngineParty), cast.elsewhere(TrainerParty)
    introduce(trainer, engine)
    trainer.stall(at)
    begin(trainer, engine)
    trainer.reached()
    until(lambda: engine.phase() == phase)
    trainer.kill()
    assert_names_the_sender(engine.failure(), phase)
    assert engine.torn() == (phase == "TRANSFER")
    refit(cast.elsewhere(TrainerParty), engine, seed=NEXT)


def test_an_engine_that_meets_another_trainer_clears_away_what_the_first_left(stack):
    cast = Cast(stack)
    engine, victim = cast.here(EngineParty), cast.elsewhere(TrainerParty)
    introduce(victim, engine)
    victim.kill()
    (left,) = Path(tempfile.gettempdir()).iterdir()
    introduce(cast.here(TrainerParty), engine)
    assert not left.exists()


def test_the_next_trainer_clears_away_what_one_left_that_no_engine_saw_die(stack):
    cast = Cast(stack)
    victim = cast.elsewhere(TrainerParty)
    victim.info()
    victim.kill()
    (left,) = Path(tempfile.gettempdir()).iterdir()
    cast.here(TrainerParty).info()
    assert left.exists()  # it could be one that is just being made
    os.utime(left, (0, 0))
    cast.here(TrainerParty).info()
    assert not left.exists()


@pytest.mark.parametrize("bystanders", [0, 1])
@pytest.mark.parametrize(
    ("at", "phase"),
    [(None, "PREPARE"), ("write", "TRANSFER"), ("finish", "INSTALL"), ("commit", "COMMIT")],
)
def test_a_trainer_and_engines_elsewhere_survive_an_engine_that_is_killed(
    stack, at, phase, bystanders
):
    cast = Cast(stack, transport="collective")
    trainer, victim = cast.here(TrainerParty), cast.elsewhere(EngineParty)
    others = [cast.here(EngineParty) for _ in range(bystanders)]
    introduce(trainer, victim, *others)
    if at is None:
        victim.generate()
    else:
        victim.stall(at)
    begin(trainer, victim, *others)
    if at is not None:
        victim.reached()
    until(lambda: trainer.phase() == phase)
    victim.kill()
    assert_names(victim, trainer.failure(), phase)
    for other in others:
        assert isinstance(other.failure(), RefitAborted | WeightsTornError | None)
        assert other.version() == trainer.version() == (phase == "COMMIT")
    refit(trainer, cast.elsewhere(EngineParty), *others, seed=NEXT)


# -- what survivors hold ---------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "collective"])
@pytest.mark.parametrize("survivor", ["trainer", "engine"])
def test_who_survives_many_deaths_holds_no_more_than_after_the_first(stack, survivor, transport):
    cast = Cast(stack, transport=transport)
    here = cast.here(TrainerParty if survivor == "trainer" else EngineParty)
    after_first: Counter[str] | None = None
    for _ in range(3):
        there = cast.elsewhere(EngineParty if survivor == "trainer" else TrainerParty)
        trainer, engine = (here, there) if survivor == "trainer" else (there, here)
        refit(trainer, engine, seed=OLD)
        there.stall("finish" if there is engine else "confirm")
        begin(trainer, engine)
        there.reached()
        there.kill()
        assert isinstance(here.failure(), RefitPeerError)
        there.end()
        if after_first is None:
            after_first = census()
    assert gained(after_first) == {}
