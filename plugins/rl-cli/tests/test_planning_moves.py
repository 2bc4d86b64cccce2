"""Which rank sends what, and what cannot be planned."""

from __future__ import annotations

import pytest

from rl_cli.planning import Devices, Move, Shard, Stack, moves_of
from rl_core.errors import ManifestMismatchError
from rl_core.interfaces import Box


def test_where_there_is_less_choice_is_chosen_first() -> None:
    box = ((0, 4), (0, 2))
    trainer = [one("any", box, 0, 1, 2), one("some", box, 0, 1), one("one", box, 0)]
    engine = [one(name, box, 0) for name in ("any", "some", "one")]
    moves = moves_of(trainer, engine, Devices(range(3), [9], 1))
    assert [(move.stack.name, move.source) for move in moves] == [
        ("one", 0),
        ("some", 1),
        ("any", 2),
    ]


def one(name: str, box: Box, *ranks: int, shape: tuple[int, ...] = (4, 2)) -> Stack:
    return Stack(name, shape, "bfloat16", [Shard(box, ranks)])


#: Trainer ranks 0 and 1 share host 0 with engine ranks 0 and 1, of which rank 0 is on GPU 1.
DEVICES = Devices([0, 1, 4], [1, 2, 5, 8], 4)


@pytest.mark.parametrize(
    ("trainer", "message", "key"),
    [
        (
            [Stack("l.{}.w", (4, 2), "bfloat16", [Shard(((0, 2), (0, 3), (0, 2)), (0,))])],
            "l.0.w[3:4,0:2]: no trainer rank has these elements, which engine ranks 1, 2 must get",
            "missing",
        ),
        ([], "l.0.w[0:4,0:2]: no trainer rank has these elements", "missing"),
        (
            [Stack("l.{}.w", (2, 4), "bfloat16", [Shard(((0, 2), (0, 2), (0, 4)), (0, 1))])],
            "l.{}.w: trainer ranks 0, 1: [2, 4] bfloat16; engine ranks 1, 2: [4, 2] bfloat16",
            "misshaped",
        ),
        (
            [Stack("l.{}.w", (4, 2), "float32", [Shard(((0, 2), (0, 4), (0, 2)), (1,))])],
            "l.{}.w: trainer rank 1: [4, 2] float32; engine ranks 1, 2: [4, 2] bfloat16",
            "mistyped",
        ),
        (
            [
                Stack("l.{}.w", (4, 2), "bfloat16", [Shard(((0, 2), (0, 4), (0, 2)), (0,))]),
                Stack("l.{}.w", (4, 2), "float32", [Shard(((0, 2), (0, 4), (0, 2)), (1,))]),
            ],
            "l.{}.w: trainer rank 0: [4, 2] bfloat16; trainer rank 1: [4, 2] float32",
            "mistyped",
        ),
        (
            [Stack("l.{}.w", (4, 2), "bfloat16", [Shard(((0, 2), (0, 5), (0, 2)), (0,))])],
            "l.0.w[0:5,0:2]: trainer rank 0: these elements are not in a tensor of shape [4, 2]",
            "misshaped",
        ),
    ],
)
def test_holes_and_contradictions_name_the_tensor_and_the_ranks(
    trainer: list[Stack], message: str, key: str
) -> None:
    engine = Stack("l.{}.w", (4, 2), "bfloat16", [Shard(((0, 2), (0, 4), (0, 2)), (1, 2))])
    with pytest.raises(ManifestMismatchError) as caught:
        [*moves_of(trainer, [engine], DEVICES)]
    assert message in str(caught.value)
    assert caught.value.details[key] == ["l.{}.w"]
    assert caught.value.fix


def test_a_hole_of_many_ranks_names_some() -> None:
    with pytest.raises(ManifestMismatchError, match="engine ranks 0, 1, 2, 3 and 96 more must"):
        [*moves_of([], [one("w", ((0, 4), (0, 2)), *range(100))], Devices([0], range(100), 8))]


def test_what_no_engine_keeps_is_not_sent() -> None:
    trainer = [one("w", ((0, 4), (0, 2)), 0), one("unused", ((0, 4), (0, 2)), 1)]
    assert [*moves_of(trainer, [one("w", ((1, 2), (0, 1)), 0)], DEVICES)] == [
        Move(one("w", ((1, 2), (0, 1)), 0), ((1, 2), (0, 1)), 0, (0,), 2)
    ]
