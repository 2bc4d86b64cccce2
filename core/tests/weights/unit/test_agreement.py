"""What refits keep of each other: the same for the same pieces, made anew for all others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from rl_core.errors import ManifestMismatchError, RefitProtocolError
from rl_core.interfaces import TensorSpec
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.sending.agreement import Agreement
from rl_core.weights.sending.kept import Kept

WIRE = WeightManifest((TensorSpec("w", (4, 6), "float32"), TensorSpec("b", (4,), "float32")))
TOP, BOTTOM = ((0, 2), (0, 6)), ((2, 4), (0, 6))
RANKS = {0: {0: [TOP]}, 1: {0: (BOTTOM,), 1: ()}}
ENGINES = {"left": {0: [((0, 4), (0, 3))]}, "right": {0: [((0, 4), (3, 6))]}}
HOSTS: dict[Any, str] = dict.fromkeys([0, 1, "left", "right", "new"], "a")
NAMES: dict[Any, str] = {0: "rank 0", 1: "rank 1", "left": "left", "right": "right", "new": "new"}


def agreed(
    kept: Kept, wire: Any = WIRE, ranks: Any = RANKS, engines: Any = ENGINES, hosts: Any = HOSTS
) -> Agreement:
    of = (wire, ranks, engines, hosts)
    return kept.same("agreement", of, partial(Agreement, *of, NAMES, compared=True))


def test_the_same_pieces_are_agreed_on_once_in_any_order():
    kept = Kept()
    first = agreed(kept)
    again = {1: {1: (), 0: (BOTTOM,)}, 0: {0: [TOP]}}
    assert agreed(kept, ranks=again, engines=dict(reversed(ENGINES.items()))) is first


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": {0: {}, 1: {0: (BOTTOM,), 1: ()}}},
        {"ranks": {0: {}}},
        {"ranks": {**RANKS, 0: {0: [TOP], 1: [((0, 2),)]}, 1: {0: [BOTTOM], 1: [((2, 4),)]}}},
        {"engines": {"left": {}}},
        {"engines": {"left": ENGINES["right"], "right": ENGINES["left"]}},
        {"engines": {"left": ENGINES["left"], "new": ENGINES["right"]}},
        {"hosts": {**HOSTS, 1: "b", "left": "b"}},
        {"wire": WIRE.cast({"w": "bfloat16"})},
    ],
)
def test_whatever_changes_is_agreed_on_anew(change):
    kept = Kept()
    first = agreed(kept)
    other = agreed(kept, **change)
    fresh = agreed(Kept(), **change)
    assert other is not first
    assert (other.parts, other.takes, other.keeps) == (fresh.parts, fresh.takes, fresh.keeps)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"ranks": {0: {0: [TOP]}}}, ManifestMismatchError, "the trainer has no w.2:4,0:3., which"),
        ({"engines": {"left": ENGINES["left"]}}, ManifestMismatchError, "no engine keeps w"),
        ({"ranks": {**RANKS, 1: {0: [((0, 9), (0, 6))]}}}, RefitProtocolError, "rank 1 has boxes"),
        ({"engines": {"new": {7: []}}}, RefitProtocolError, "new has boxes"),
    ],
)
def test_what_does_not_fit_is_refused_each_time(change, error, text):
    kept = Kept()
    for _ in range(2):
        with pytest.raises(error, match=text):
            agreed(kept, **change)
