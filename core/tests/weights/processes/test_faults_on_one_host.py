"""Processes that are killed or stopped in every phase of a refit, and what the others make of it.

Whoever survives gets a typed error that names phase and peer long before the refit's deadline,
keeps nothing, and takes the next refit as it is.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from killable import (
    FIRST,
    LATE,
    Cast,
    EngineParty,
    TrainerParty,
    assert_names,
    assert_names_the_sender,
    assert_whole_unless,
    begin,
    introduce,
    refit,
)
from simple_pair import until

from rl_core.errors import RefitAborted, RefitPeerError, WeightsTornError

pytestmark = pytest.mark.usefixtures("nothing_is_left")


ISOLATIONS = ["quiesced", pytest.param("staged", marks=pytest.mark.full)]
OLD, NEW, NEXT = 0, 1, 2


# -- the sender dies -------------------------------------------------------------------------------


class SenderDies(NamedTuple):
    """Where the trainer is stopped, and what the engine then says."""

    at: str | None
    phase: str
    torn: bool


SENDER_DIES = {
    "before it offers anything": SenderDies(None, "DISCOVER", torn=False),
    "while it prepares": SenderDies("device", "PREPARE", torn=False),
    "before the first byte": SenderDies(FIRST, "TRANSFER", torn=False),
    "in the middle": SenderDies(LATE, "TRANSFER", torn=True),
    "before it seals": SenderDies("confirm", "TRANSFER", torn=True),
}


@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("case", SENDER_DIES.values(), ids=SENDER_DIES)
def test_an_engine_survives_a_trainer_that_is_killed(stack, case, isolation):
    cast = Cast(stack)
    engine, trainer = cast.here(EngineParty), cast.elsewhere(TrainerParty)
    refit(trainer, engine, seed=OLD)
    trainer.load(NEW)
    engine.begin()
    if case.at is not None:
        trainer.stall(case.at)
        trainer.begin(isolation=isolation)
        trainer.reached()
    until(lambda: engine.phase() == case.phase)
    trainer.kill()
    assert_names_the_sender(engine.failure(), case.phase)
    assert_whole_unless(case.torn and isolation == "quiesced", engine, old=OLD)
    refit(cast.elsewhere(TrainerParty), engine, seed=NEXT)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_engine_that_generates_hears_all_the_same_that_its_trainer_was_killed(stack, isolation):
    cast = Cast(stack)
    engine, trainer = cast.here(EngineParty), cast.elsewhere(TrainerParty)
    refit(trainer, engine, seed=OLD)
    trainer.load(NEW)
    engine.generate()
    begin(trainer, engine, isolation=isolation)
    # A staged refit needs the engine to stop only when all is there.
    phase = "PREPARE" if isolation == "quiesced" else "INSTALL"
    until(lambda: engine.phase() == phase)
    trainer.kill()
    assert_names_the_sender(engine.failure(), phase)
    assert_whole_unless(False, engine, old=OLD)
    engine.end_generation()
    refit(cast.elsewhere(TrainerParty), engine, seed=NEXT)


# -- a receiver dies -------------------------------------------------------------------------------


class ReceiverDies(NamedTuple):
    """Who stops the refit and where, and whether other engines were written to by then.

    When the trainer goes on, they may get what it was about to send before it sees who is gone.
    """

    by: str
    at: str
    phase: str
    torn: bool | None


RECEIVER_DIES = {
    "before it is prepared": ReceiverDies("engine", "pieces", "PREPARE", torn=False),
    "before the first byte": ReceiverDies("trainer", FIRST, "TRANSFER", torn=None),
    "in the middle": ReceiverDies("trainer", LATE, "TRANSFER", torn=True),
    "before it has sealed": ReceiverDies("engine", "finish", "INSTALL", torn=True),
}


@pytest.mark.parametrize("bystanders", [0, 1])
@pytest.mark.parametrize("isolation", ISOLATIONS)
@pytest.mark.parametrize("case", RECEIVER_DIES.values(), ids=RECEIVER_DIES)
def test_a_trainer_and_its_other_engines_survive_an_engine_that_is_killed(
    stack, case, isolation, bystanders
):
    cast = Cast(stack)
    trainer, victim = cast.here(TrainerParty), cast.elsewhere(EngineParty)
    others = [cast.here(EngineParty) for _ in range(bystanders)]
    refit(trainer, victim, *others, seed=OLD)
    trainer.load(NEW)
    stopped = trainer if case.by == "trainer" else victim
    stopped.stall(case.at)
    begin(trainer, victim, *others, isolation=isolation)
    stopped.reached()
    until(lambda: trainer.phase() == case.phase)
    victim.kill()
    if stopped is trainer:
        trainer.release()
    assert_names(victim, trainer.failure(), case.phase)
    assert trainer.version() == 1
    for other in others:
        assert isinstance(other.failure(), RefitAborted | WeightsTornError)
        assert other.version() == 1
        torn = other.torn() if case.torn is None else case.torn
        assert_whole_unless(torn and isolation == "quiesced", other, old=OLD)
    refit(trainer, cast.elsewhere(EngineParty), *others, seed=NEXT)


@pytest.mark.parametrize("bystanders", [0, 1])
@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_version_counts_although_an_engine_was_killed_while_it_committed(
    stack, isolation, bystanders
):
    cast = Cast(stack)
    trainer, victim = cast.here(TrainerParty), cast.elsewhere(EngineParty)
    others = [cast.here(EngineParty) for _ in range(bystanders)]
    refit(trainer, victim, *others, seed=OLD)
    trainer.load(NEW)
    victim.stall("commit")
    begin(trainer, victim, *others, isolation=isolation)
    victim.reached()
    victim.kill()
    assert_names(victim, trainer.failure(), "COMMIT")
    assert trainer.version() == 2
    for other in others:
        assert other.outcome()["version"] == 2
        assert_whole_unless(False, other, old=NEW)
    refit(trainer, cast.elsewhere(EngineParty), *others, seed=NEXT)


# -- tensors that are read where the trainer keeps them --------------------------------------------


def test_an_engine_killed_while_it_reads_the_trainers_own_tensors_does_them_no_harm(stack):
    cast = Cast(stack, at_home=True)
    trainer, victim = cast.here(TrainerParty), cast.elsewhere(EngineParty)
    introduce(trainer, victim)
    victim.stall("write")
    begin(trainer, victim, mode="direct")
    victim.reached()
    victim.kill()
    assert_names(victim, trainer.failure(), "TRANSFER")
    assert trainer.holds(OLD)
    refit(trainer, cast.elsewhere(EngineParty), seed=NEXT)


# -- not dead, but stopped -------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_an_engine_gives_up_a_trainer_that_hangs_and_both_can_go_on(stack, transport):
    cast = Cast(stack, transport=transport)
    engine, trainer = cast.here(EngineParty), cast.elsewhere(TrainerParty)
    introduce(trainer, engine)
    trainer.stall(LATE)
    begin(trainer, engine)
    trainer.reached()
    trainer.stop()
    assert_names_the_sender(engine.failure(), "TRANSFER")
    assert_whole_unless(True, engine, old=OLD)
    trainer.go_on()
    trainer.release()
    assert isinstance(trainer.failure(), RefitPeerError)
    refit(trainer, engine, seed=NEXT)


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_a_trainer_gives_up_an_engine_that_hangs_and_both_can_go_on(stack, transport):
    cast = Cast(stack, transport=transport)
    trainer, engine = cast.here(TrainerParty), cast.elsewhere(EngineParty)
    introduce(trainer, engine)
    engine.stall("write")
    begin(trainer, engine)
    engine.reached()
    engine.stop()
    assert_names(engine, trainer.failure(), "TRANSFER")
    engine.go_on()
    engine.release()
    assert isinstance(engine.failure(), RefitPeerError | RefitAborted | WeightsTornError)
    assert_whole_unless(True, engine, old=OLD)
    refit(trainer, engine, seed=NEXT)
