"""Refits through the older methods: a ticket is for one refit, of all tensors or none."""

from __future__ import annotations

import pytest
from simple_pair import SOON, Engine, Replicas, Trainer, blank, go, make_tensors, same

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    ManifestMismatchError,
    RefitError,
    RefitProtocolError,
    WeightsTornError,
)


def ticket(trainer, **options):
    [keys] = trainer.prepare_weights_for_ipc(1024)
    return trainer.get_weights_ipc_handles(keys, **{"deadline_s": SOON} | options)


def test_a_ticket_brings_every_tensor_and_moves_the_version_once(pair):
    trainer, engine = pair
    assert trainer.prepare_weights_for_ipc() == [list(trainer.source.tensor)]
    for version in (1, 2):
        given = ticket(trainer, mode="packed", bucket_bytes=1024)
        assert engine.receiver.version == version - 1
        assert engine.update_weights(given) is True
        assert same(trainer.source.tensor, engine.sink.tensor)
        assert engine.receiver.version == version
        assert engine.receiver.origin == trainer.sender.origin
    assert go(trainer, engine, delta=True).version == 3


def test_one_ticket_is_for_as_many_engines_as_it_says(pair, keep):
    trainer, engine = pair
    both = Replicas(engine, keep(Engine(blank(trainer.source.tensor))))
    with pytest.raises(ConfigError, match="receivers=1, but this engine has") as error:
        both.update_weights(ticket(trainer))
    assert "receivers=2" in str(error.value.fix)
    assert both.update_weights(ticket(trainer, receivers=2))
    assert [e.receiver.version for e in both.engines] == [1, 1]


def test_keys_that_are_not_all_tensors_and_options_are_refused(pair):
    trainer, _ = pair
    [keys] = trainer.prepare_weights_for_ipc()
    for wrong in (keys[1:], [*keys, "no.such"], []):
        with pytest.raises(ConfigError, match="keys must name all 9 tensors"):
            trainer.get_weights_ipc_handles(wrong)
    with pytest.raises(ConfigError, match="unknown key"):
        trainer.get_weights_ipc_handles(keys, no_such=1)
    assert trainer.sender.jobs == []


@pytest.mark.parametrize("wrong", [{}, {"protocol": 0}, "text", None], ids=str)
def test_what_is_no_ticket_is_refused_and_changes_nothing(pair, wrong):
    trainer, engine = pair
    go(trainer, engine)
    with pytest.raises(RefitProtocolError):
        engine.update_weights(wrong)
    engine.receiver.check()
    assert engine.receiver.version == 1


def test_the_ticket_of_other_tensors_is_refused_before_anything_is_touched(pair, keep):
    _, engine = pair
    with pytest.raises(ManifestMismatchError):
        engine.update_weights(ticket(keep(Trainer({"other": make_tensors()["big"]}))))
    assert engine.sink.calls == []


def test_the_second_ticket_takes_the_place_of_the_first(pair):
    trainer, engine = pair
    first = ticket(trainer, deadline_s=1.0)
    trainer.source.tensor = make_tensors(7)
    second = ticket(trainer)
    with pytest.raises(RefitError):
        engine.update_weights(first)
    assert engine.receiver.version == 0
    assert engine.update_weights(second)
    assert same(make_tensors(7), engine.sink.tensor)
    with pytest.raises(RefitError):
        engine.update_weights(second | {"deadline_s": 0.5})
    assert engine.receiver.version == 1


def test_a_ticket_that_nobody_takes_ends_at_its_deadline(pair):
    trainer, engine = pair
    ticket(trainer, deadline_s=0.3)
    [job] = trainer.sender.jobs
    with pytest.raises(RefitError, match="DISCOVER"):
        job.future.result(SOON)
    assert go(trainer, engine).version == 1


def test_an_engine_that_fails_raises_and_the_next_ticket_recovers(pair):
    trainer, engine = pair
    engine.sink.on["finish"] = lambda: 1 / 0
    with pytest.raises(RefitError, match="ZeroDivisionError"):
        engine.update_weights(ticket(trainer))
    with pytest.raises(WeightsTornError):
        engine.idle().receiver.check()
    del engine.sink.on["finish"]
    assert engine.update_weights(ticket(trainer))
    engine.receiver.check()


def test_a_closed_trainer_gives_no_ticket(pair):
    trainer, _ = pair
    trainer.close()
    with pytest.raises(LifecycleError):
        trainer.prepare_weights_for_ipc()
