"""Refits through the older methods: a ticket is for one refit, of all tensors or none."""

from __future__ import annotations

import time

import pytest
from simple_pair import SOON, Engine, Replicas, blank, go

from rl_core.errors import (
    ConfigError,
    RefitAborted,
    RefitError,
)


def ticket(trainer, **options):
    [keys] = trainer.prepare_weights_for_ipc(1024)
    return trainer.get_weights_ipc_handles(keys, **{"deadline_s": SOON} | options)


def test_one_ticket_is_for_as_many_engines_as_it_says(pair, keep):
    trainer, engine = pair
    both = Replicas(engine, keep(Engine(blank(trainer.source.tensor))))
    with pytest.raises(ConfigError, match="receivers=1, but this engine has") as error:
        both.update_weights(ticket(trainer))
    assert "receivers=2" in str(error.value.fix)
    assert both.update_weights(ticket(trainer, receivers=2))
    assert [e.receiver.version for e in both.engines] == [1, 1]


def test_a_ticket_that_nobody_takes_ends_at_its_deadline(pair):
    trainer, engine = pair
    ticket(trainer, deadline_s=0.3)
    [job] = trainer.sender.jobs
    with pytest.raises(RefitError, match="DISCOVER"):
        job.future.result(SOON)
    assert go(trainer, engine).version == 1


def test_a_ticket_that_was_taken_is_refused_at_once(pair):
    """Also once it is not the last one, and it does not set the engine back."""
    trainer, engine = pair
    tickets = []
    for _ in range(2):
        tickets.append(ticket(trainer))
        assert engine.update_weights(tickets[-1])
    began = time.monotonic()
    for taken in tickets:
        with pytest.raises(RefitAborted, match="already requested"):
            engine.update_weights(taken)
    assert time.monotonic() - began < SOON / 2
    assert engine.receiver.number == trainer.sender.number == 2
    assert engine.update_weights(ticket(trainer))
