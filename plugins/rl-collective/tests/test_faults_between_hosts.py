"""As on one host, over the transport that reaches other hosts; and what survivors hold."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from killable import (
    Cast,
    EngineParty,
    TrainerParty,
    begin,
    census,
    gained,
    introduce,
    refit,
)

from rl_core.errors import RefitPeerError

pytestmark = pytest.mark.usefixtures("nothing_is_left")

OLD, NEXT = 0, 2


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
