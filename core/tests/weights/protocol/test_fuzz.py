"""A short run of the fuzzer, which reads what others wrote in many ways that are wrong."""

from __future__ import annotations

import pytest
from fuzz_messages import fuzz

from rl_core.weights.protocol import messages


def test_what_is_wrong_is_refused_and_nothing_else_happens():
    seen = fuzz(20_000, seed=1)
    # The inputs get everywhere: else their being harmless would say little.
    sides = (messages.FromSender, messages.FromReceiver, messages.ToRank, messages.FromRank)
    for kind in [kind for side in sides for kind in side.__args__]:
        assert seen[f"read {kind.__name__}"] > 20
    for end in ("COMMITTED", "ABORTED", "TORN"):
        assert seen[f"receiver {end}"] > 20
        assert seen[f"sender {end}"] > 20
        assert seen[f"of two {end}"] > 20
        assert end == "TORN" or seen[f"rank {end}"] > 20
    for what in ("receiver's refit", "sender's refit", "rank's refit", "prepare"):
        assert seen[f"{what}: done"] > 20
        assert seen[f"{what}: RefitProtocolError"] > 20
    assert seen["reference: RefitProtocolError"] > 20
    assert seen["refused"] > 2000


def test_a_run_is_the_same_again_and_differs_by_its_seed():
    assert fuzz(200, seed=1) == fuzz(200, seed=1) != fuzz(200, seed=2)


def test_a_finding_tells_how_it_is_repeated(monkeypatch):
    monkeypatch.setattr("fuzz_target.TARGETS", [lambda choices, seen: 1 / 0])
    with pytest.raises(ZeroDivisionError) as caught:
        fuzz(1, seed=1)
    assert "--replay" in caught.value.__notes__[0]
