"""The plan, against what a look at every element says."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_cli.planning import Devices, Move, Shard, Stack, moves_of
from rl_core.errors import ManifestMismatchError
from rl_core.interfaces import Box

#: For each name, number and index of an element the ranks of one side.
Held = dict[tuple[str, tuple[int, ...]], set[int]]


def places(box: Box) -> list[tuple[int, ...]]:
    return [*product(*(range(first, after) for first, after in box))]


def held(stacks: list[Stack]) -> Held:
    found: Held = defaultdict(set)
    for stack in stacks:
        for box, ranks in stack.shards:
            for place in places(box):
                found[stack.name, place] |= {*ranks}
    return found


@st.composite
def boxes(draw: st.DrawFn, sizes: tuple[int, ...]) -> Box:
    box = []
    for size in sizes:
        first = draw(st.integers(0, size - 1))
        box.append((first, draw(st.integers(first + 1, size))))
    return tuple(box)


@st.composite
def grids(draw: st.DrawFn, sizes: tuple[int, ...]) -> list[Box]:
    """Boxes that cover everything once."""
    edges = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in sizes]
    return [*product(*(pairwise(each) for each in edges))]


@st.composite
def refits(draw: st.DrawFn) -> tuple[list[Stack], list[Stack], Devices]:
    sources, sinks = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    some = st.sets(st.integers(0, sources - 1), min_size=1)
    trainer, engine = [], []
    for number in range(draw(st.integers(1, 3))):
        numbers = draw(st.integers(0, 2))
        sizes = tuple(draw(st.lists(st.integers(1, 4), min_size=numbers, max_size=numbers + 2)))
        name, dtype = f"t{number}" + ".{}" * numbers, draw(st.sampled_from(["int8", "float32"]))
        shape = sizes[numbers:]
        cells = [Shard(box, tuple(sorted(draw(some)))) for box in draw(grids(sizes))]
        cells += [
            Shard(box, tuple(sorted(draw(some))))
            for box in draw(st.lists(boxes(sizes), max_size=3))
        ]
        wanted = [
            Shard(box, tuple(sorted(draw(st.sets(st.integers(0, sinks - 1), min_size=1)))))
            for box in draw(st.lists(boxes(sizes), max_size=4))
        ]
        cut = draw(st.integers(0, len(cells)))
        trainer += [Stack(name, shape, dtype, part) for part in (cells[:cut], cells[cut:])]
        engine.append(Stack(name, shape, dtype, wanted))
    at = [draw(st.lists(st.integers(0, 7), min_size=n, max_size=n)) for n in (sources, sinks)]
    return trainer, engine, Devices(at[0], at[1], draw(st.integers(1, 4)))


@settings(deadline=None)
@given(refits())
def test_each_wanted_element_comes_once_from_the_nearest_that_has_it(
    refit: tuple[list[Stack], list[Stack], Devices],
) -> None:
    trainer, engine, devices = refit
    moves = [*moves_of(trainer, engine, devices)]
    assert moves == [*moves_of(trainer, engine, devices)]
    had, got = held(trainer), Counter[tuple[str, tuple[int, ...], int]]()
    link: Counter[tuple[int, int]] = Counter()
    by_element: Counter[tuple[int, int]] = Counter()
    for move in moves:
        for sink in move.sinks:
            link[move.source, sink] += move.nbytes
        for place in places(move.box):
            holders = had[move.stack.name, place]
            assert move.source in holders
            for sink in move.sinks:
                got[move.stack.name, place, sink] += 1
                by_element[move.source, sink] += {"int8": 1, "float32": 4}[move.stack.dtype]
                near = min(devices.distance(holder, sink) for holder in holders)
                assert devices.distance(move.source, sink) == near
    assert link == by_element
    assert got == Counter(
        (name, place, sink) for (name, place), sinks in held(engine).items() for sink in sinks
    )


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
