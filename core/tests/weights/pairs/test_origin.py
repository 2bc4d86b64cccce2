"""Whose version an engine has: two trainers count theirs for themselves."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from simple_pair import SOON, Trainer, go

from rl_core import LoopWarning
from rl_core.weights.protocol.frames import origin_of


@pytest.fixture
def anew(keep, pair) -> Trainer:
    """A trainer of the same tensors, as one that was started again."""
    return keep(Trainer(pair[0].source.tensor))


def taken_over(trainer: Trainer, engine: Any, **options: Any) -> list[dict[str, Any]]:
    """What the report of a refit says, which nothing warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LoopWarning)
        return go(trainer, engine, **options).taken_over


def test_an_origin_is_what_a_token_gives_and_does_not_give_it_away():
    tokens = [f"token {number}" for number in range(1000)]
    origins = {origin_of(token) for token in tokens}
    assert len(origins) == len(tokens)
    assert all(0 < origin < 1 << 63 for origin in origins)
    assert origin_of(tokens[3]) == origin_of(tokens[3])


def test_a_loop_is_told_once_that_its_engine_had_another_trainer(pair, anew):
    trainer, engine = pair
    go(trainer, engine, version=4)  # nobody was here before
    assert go(trainer, engine).taken_over == []
    with pytest.warns(LoopWarning, match="trainer") as said:
        report = go(anew, engine)
    before = {"origin": trainer.sender.origin, "version": 5}
    assert report.taken_over == [{"name": "engine", **before}]
    assert f"engine had version 5 of origin {trainer.sender.origin}" in str(said[0].message)
    assert f"now has version 1 of origin {report.origin}" in str(said[0].message)
    assert said[0].filename.endswith("simple_pair.py")  # where refit was called
    assert go(anew, engine).taken_over == []
    assert go(trainer, engine).taken_over == [
        {"name": "engine", "origin": anew.sender.origin, "version": 2}
    ]


def test_a_module_has_one_origin_as_long_as_it_lives():
    from torch import nn

    from rl_backends.modules import ModuleSender, end_of
    from rl_core.weights import refit

    trained, other, engine = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    report = refit(trained, engine, deadline_s=SOON)
    assert report.origin == end_of(trained, sends=True).weights_origin
    assert end_of(engine, sends=False).weights_origin == report.origin
    trained.load_state_dict(other.state_dict())  # as a checkpoint is loaded
    assert refit(trained, engine, deadline_s=SOON).origin == report.origin
    with pytest.warns(LoopWarning, match="Linear had version 2 of origin"):
        assert refit(other, engine, deadline_s=SOON).origin != report.origin
    sender = ModuleSender(nn.Linear(2, 2))
    assert sender.weights_origin not in (0, report.origin)
    sender.shutdown()
