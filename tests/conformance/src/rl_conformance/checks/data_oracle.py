"""B1 to B7 again: batches of any kind against plain lists of rows, by seeds."""

from __future__ import annotations

import copy
import io
import pickle
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_conformance.expect import fail, raises, require
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict, verify_right_padding
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_conformance.context import Context

    Row = dict[str, Any]

_SEEDS = range(24)
_ALGORITHMS = (
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
)
_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float64)


def _random_batch(rng: random.Random, rows: int, width: int | None = None) -> BatchedDataDict[Any]:
    """Ragged rows of several kinds of columns."""
    width = rng.randint(1, 30) if width is None else width
    lengths = torch.tensor([rng.randint(1, width) for _ in range(rows)], dtype=torch.int64)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    ids = torch.randint(1, 99, (rows, width), generator=generator)
    ids[torch.arange(width) >= lengths[:, None]] = 0
    dtype = rng.choice(_DTYPES)
    wide = torch.randn(rows, width, 3, generator=generator).to(dtype)
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "number": torch.arange(rows),
            "wide": wide,
            "turned": torch.randn(5, rows, generator=generator).t(),  # of strides that few expect
            "text": [f"row {n}" for n in range(rows)],
            "things": [{"n": n, "list": [n]} if n % 2 else (n, None) for n in range(rows)],
        }
    )


def _rows(data: BatchedDataDict[Any]) -> list[Row]:
    """The rows as plain values; floats of any dtype as they print."""
    return [
        {
            key: (str(v[n].dtype), v[n].tolist()) if isinstance(v, torch.Tensor) else v[n]
            for key, v in data.items()
        }
        for n in range(data.size)
    ]


def _equal(got: Sequence[Row], expected: Sequence[Row], what: str) -> None:
    require(len(got) == len(expected), f"{what}: {len(got)} rows, expected {len(expected)}")
    for n, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        wrong = [key for key in theirs if ours.get(key) != theirs[key]]
        require(not wrong and ours.keys() == theirs.keys(), f"{what}: row {n}: {wrong}")


def _untouched(data: BatchedDataDict[Any], act: Callable[[], Any], what: str) -> Any:
    """What an operation gives that must leave its batch, and the plans in it, alone."""
    before, plans = copy.deepcopy(_rows(data)), copy.deepcopy(_plans(data))
    found = act()
    _equal(_rows(data), before, f"{what} changed its own batch")
    require(_plans(data) == plans, f"{what} changed the plans of its own batch")
    return found


def _plans(data: BatchedDataDict[Any]) -> list[Any]:
    return [data.micro_batch_indices, data.micro_batch_lengths, data.elem_counts_per_gb]


@check("B3")
def rows_are_those_of_a_list(ctx: Context) -> None:
    """slice, select_indices, chunk, get_batch, repeat_interleave and reorder_data, by seeds."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        size = rng.randint(1, 9)
        data = _random_batch(rng, size)
        rows = _rows(data)
        start = rng.randint(0, size)
        end = rng.randint(start, size)
        indices = [rng.randrange(size) for _ in range(rng.randint(0, 2 * size))]
        mask = torch.tensor([rng.random() < 0.5 for _ in range(size)])
        times = rng.randint(0, 3)
        order = rng.sample(range(size), size)
        chunks = rng.choice([n for n in range(1, size + 1) if size % n == 0])
        rank = rng.randrange(chunks)
        share = size // chunks
        cases: dict[str, tuple[Callable[[], Any], list[Row]]] = {
            "slice": (lambda: data.slice(start, end), rows[start:end]),  # noqa: B023
            "select": (lambda: data.select_indices(indices), [rows[i] for i in indices]),  # noqa: B023
            "select by tensor": (
                lambda: data.select_indices(torch.tensor(indices, dtype=torch.int32)),  # noqa: B023
                [rows[i] for i in indices],
            ),
            "select by mask": (
                lambda: data.select_indices(mask),  # noqa: B023
                [row for row, taken in zip(rows, mask.tolist(), strict=True) if taken],
            ),
            "repeat": (
                lambda: data.repeat_interleave(times),  # noqa: B023
                [row for row in rows for _ in range(times)],
            ),
            "chunk": (lambda: data.chunk(rank, chunks), rows[rank * share : (rank + 1) * share]),  # noqa: B023
            "get_batch": (
                lambda: data.get_batch(rank, share),  # noqa: B023
                rows[rank * share : (rank + 1) * share],
            ),
        }
        for what, (act, expected) in cases.items():
            for _ in "ab":  # a second call is like the first
                _equal(_rows(_untouched(data, act, what)), expected, f"seed {seed}, {what}")
        for _ in range(2):
            data.reorder_data(order)
            moved: list[Any] = [None] * size
            for row, place in zip(rows, order, strict=True):
                moved[place] = row
            rows = moved
            _equal(_rows(data), rows, f"seed {seed}, reorder_data")


@check("B3")
def copies_are_copies(ctx: Context) -> None:
    """Who writes into a selection, a chunk, a shard or a repetition leaves the batch alone."""
    data = _random_batch(random.Random(1), 6, 8)
    kept = copy.deepcopy(_rows(data))
    args: Any = {"max_tokens_per_microbatch": 16}
    made: dict[str, list[BatchedDataDict[Any]]] = {
        "select_indices": [data.select_indices(list(range(6)))],
        "a mask": [data.select_indices(torch.ones(6, dtype=torch.bool))],
        "chunk": [data.chunk(0, 1), data.chunk(1, 2)],
        "repeat_interleave": [data.repeat_interleave(1), data.repeat_interleave(2)],
        "shard_by_batch_size": [*data.shard_by_batch_size(1), *data.shard_by_batch_size(2)],
        "dynamic shards": data.shard_by_batch_size(1, dynamic_batching_args=args)[0],
        "packed shards": data.shard_by_batch_size(1, sequence_packing_args=args)[0],
        "from_batches": [BatchedDataDict.from_batches([data.slice(0, 3), data.slice(3, 6)])],
        "a pickle": [pickle.loads(pickle.dumps(data))],
    }
    for what, parts in made.items():
        for part in parts:
            for value in part.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
                else:
                    value.clear()
            _equal(_rows(data), kept, f"who writes into what {what} gave writes into the batch")
    repeated = data.repeat_interleave(2)
    repeated["things"][2]["list"].append("new")
    require(repeated["things"][3]["list"] == [1], "repeated items share their insides")
    _equal(_rows(data), kept, "who changes a repeated item changes the batch")


@check("B3")
def wrong_rows_are_refused(ctx: Context) -> None:
    """Negative, missing, doubled and fractional indices raise, and nothing has moved."""
    data = _random_batch(random.Random(2), 5)
    kept = copy.deepcopy(_rows(data))
    wrong: dict[str, Callable[[], Any]] = {
        "slice(-1, 2)": lambda: data.slice(-1, 2),
        "slice(3, 2)": lambda: data.slice(3, 2),
        "slice(0, 6)": lambda: data.slice(0, 6),
        "select_indices([-1])": lambda: data.select_indices([-1]),
        "select_indices([5])": lambda: data.select_indices([5]),
        "select_indices([0.5])": lambda: data.select_indices(torch.tensor([0.5])),
        "a short mask": lambda: data.select_indices(torch.ones(4, dtype=torch.bool)),
        "reorder_data([0, 0, 1, 2, 3])": lambda: data.reorder_data([0, 0, 1, 2, 3]),
        "reorder_data([0, 1, 2])": lambda: data.reorder_data([0, 1, 2]),
        "reorder_data([-1, 0, 1, 2, 3])": lambda: data.reorder_data([-1, 0, 1, 2, 3]),
        "chunk(5, 5)": lambda: data.chunk(5, 5),
        "chunk(-1, 5)": lambda: data.chunk(-1, 5),
        "chunk(0, 2)": lambda: data.chunk(0, 2),
        "repeat_interleave(-1)": lambda: data.repeat_interleave(-1),
        "get_batch(2, 3)": lambda: data.get_batch(2, 3),
        "truncate_tensors(0, 2)": lambda: data.truncate_tensors(0, 2),
        "shard_by_batch_size(0)": lambda: data.shard_by_batch_size(0),
        "shard_by_batch_size(5, batch_size=2)": lambda: data.shard_by_batch_size(5, batch_size=2),
        "make_microbatch_iterator(2)": lambda: data.make_microbatch_iterator(2),
    }
    for what, call in wrong.items():
        try:
            call()
        except ValueError:
            _equal(_rows(data), kept, f"{what} was refused and changed the batch")
        else:
            fail(f"{what} was not refused")


@check("B2")
def merged_rows_are_padded_rows(ctx: Context) -> None:
    """from_batches of pieces of any widths, empty ones among them, against lists."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        pieces = [_random_batch(rng, rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]
        dtype = next((piece["wide"].dtype for piece in pieces if piece.size), torch.float32)
        for piece in pieces:
            piece["wide"] = piece["wide"].to(dtype)
        pad = {"input_ids": 7, "wide": 1}
        before = [copy.deepcopy(_rows(piece)) for piece in pieces]
        merged = BatchedDataDict[Any].from_batches(pieces, pad_value_dict=pad)
        require([_rows(p) for p in pieces] == before, f"seed {seed}: a piece was changed")
        whole = [piece for piece in pieces if piece.size]
        require(merged.size == sum(p.size for p in whole), f"seed {seed}: rows were lost")
        width = max((p["input_ids"].shape[1] for p in whole), default=0)
        row = 0
        for piece in whole:
            own = piece["input_ids"].shape[1]
            for n in range(piece.size):
                ids = piece["input_ids"][n].tolist() + [7] * (width - own)
                wide = piece["wide"][n].tolist() + torch.ones(width - own, 3, dtype=dtype).tolist()
                found = (merged["input_ids"][row].tolist(), merged["wide"][row].tolist())
                require(found == (ids, wide), f"seed {seed}: row {row} is not padded")
                require(merged["things"][row] == piece["things"][n], f"seed {seed}: things")
                require(merged["turned"][row].tolist() == piece["turned"][n].tolist(), "turned")
                row += 1
        require(merged["wide"].dtype == dtype or not whole, f"{merged['wide'].dtype}")


class _Sharded(NamedTuple):
    """What shard_by_batch_size gave, and what it was asked for."""

    parts: list[Any]
    order: list[int]
    bound: int
    multiple: int
    packed: bool


def _sharded(data: BatchedDataDict[Any], seed: int) -> _Sharded:
    """Shards with plans, by a seed."""
    rng = random.Random(seed)
    shards, packed, multiple = rng.choice((1, 2, 3)), rng.random() < 0.5, rng.choice((1, 3, 8))
    most = -(-data["input_ids"].shape[1] // multiple) * multiple
    bound = rng.randint(most, 4 * most)
    rounding = "sequence_length_pad_multiple" if packed else "sequence_length_round"
    args: dict[str, Any] = {"max_tokens_per_microbatch": bound, rounding: multiple}
    if packed:
        args["algorithm"] = rng.choice(_ALGORITHMS)
    way: dict[str, Any] = {"sequence_packing_args" if packed else "dynamic_batching_args": args}
    parts, order = data.shard_by_batch_size(shards, **way)
    return _Sharded(parts, order, bound, multiple, packed)


def _microbatches(part: Any, packed: bool) -> list[Any]:
    if packed:
        return list(part.make_microbatch_iterator_for_packable_sequences())
    return list(part.make_microbatch_iterator_with_dynamic_shapes())


@check("B4")
def planned_shards_keep_every_row_and_bound(ctx: Context) -> None:
    """Dynamic batching and packing of random lengths, by seeds: rows, bounds, counts and order."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        data = _random_batch(rng, 6 * rng.randint(1, 4))
        rows, before = _rows(data), _random_states()
        found = _untouched(data, partial(_sharded, data, seed), "sharding")
        again = _sharded(data, seed)
        what = f"seed {seed}, {'packed' if found.packed else 'dynamic'}"
        require(_random_states() == before, f"{what}: a global random state was used")
        plans = [_plans(part) for part in found.parts]
        require(again.order == found.order, f"{what}: a second call gives another order")
        require([_plans(p) for p in again.parts] == plans, f"{what}: a second call plans otherwise")
        below = [row for part in found.parts for row in _rows(part)]
        _equal(below, [rows[i] for i in found.order], f"{what}: order")
        require(sorted(found.order) == list(range(len(rows))), f"{what}: rows lost or doubled")
        dealt = [_microbatches(part, found.packed) for part in found.parts]
        counts = [len(micros) for micros in dealt]
        require(len(set(counts)) == 1, f"{what}: microbatches by shard: {counts}")
        for part, micros in zip(found.parts, dealt, strict=True):
            numbers = [n for micro in micros for n in micro["number"].tolist()]
            require(numbers == part["number"].tolist(), f"{what}: rows of the microbatches")
        for together in zip(*dealt, strict=True):
            _within_bounds(together, found, what)
        merged = BatchedDataDict[Any].from_batches(found.parts)
        merged.reorder_data(found.order)
        _equal(_rows(merged), rows, f"{what}: undone")


def _within_bounds(together: Sequence[Any], found: _Sharded, what: str) -> None:
    """The microbatches that all shards work on at one time."""
    longest = max(int(micro["input_lengths"].max()) for micro in together)
    for micro in together:
        lengths, width = micro["input_lengths"], micro["input_ids"].shape[1]
        padded = int((-(-lengths // found.multiple) * found.multiple).sum())
        load = padded if found.packed else width * micro.size
        require(load <= found.bound, f"{what}: a microbatch of {load}, the bound is {found.bound}")
        if not found.packed:
            fits = longest <= width < longest + found.multiple
            require(fits, f"{what}: a width of {width} for {longest} tokens")
            require(micro["wide"].shape[1] == width, f"{what}: a column is not narrowed")


def _random_states() -> list[Any]:
    numpy: Any = np.random.get_state()
    return [random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]


@check("B4")
def plain_shards_are_dealt_by_global_batch(ctx: Context) -> None:
    """With and without batch_size, even or not, against a count by hand."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        shards, each, batches = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 3)
        size = shards * each * batches
        data = _random_batch(rng, size)
        rows = _rows(data)
        global_batch = shards * each
        for _ in "ab":
            parts = _untouched(
                data,
                lambda: data.shard_by_batch_size(shards, batch_size=global_batch),  # noqa: B023
                "sharding",
            )
            for shard, part in enumerate(parts):
                expected = [
                    rows[batch * global_batch + shard * each + n]
                    for batch in range(batches)
                    for n in range(each)
                ]
                _equal(_rows(part), expected, f"seed {seed}, shard {shard}")
        uneven = data.slice(0, rng.randint(shards, size))
        sizes = [p.size for p in uneven.shard_by_batch_size(shards, allow_uneven_shards=True)]
        require(sum(sizes) == uneven.size and max(sizes) - min(sizes) <= 1, f"sizes {sizes}")
        joined = [
            row
            for part in uneven.shard_by_batch_size(shards, allow_uneven_shards=True)
            for row in _rows(part)
        ]
        _equal(joined, rows[: uneven.size], f"seed {seed}, uneven")


@check("B5")
def each_global_batch_has_its_own_plan(ctx: Context) -> None:
    """get_batch of a shard of several global batches: its rows, its microbatches, each time."""
    for seed in list(_SEEDS)[:12]:
        rng = random.Random(seed)
        data = _random_batch(rng, 24, 12)
        args: Any = {"max_tokens_per_microbatch": 24, "sequence_length_round": 4}
        way: dict[str, Any] = {"dynamic_batching_args": args}
        if not seed % 2:
            way = {"sequence_packing_args": {"max_tokens_per_microbatch": 24}}
        parts, _ = data.shard_by_batch_size(2, batch_size=8, **way)
        for part in parts:
            with raises(DataError):
                part.get_batch(3)
            for order in ((0, 1, 2), (2, 0, 1)):
                seen: dict[int, list[int]] = {}
                for number in order:
                    batch = _untouched(part, lambda: part.get_batch(number), "get_batch")  # noqa: B023
                    micros = _microbatches(batch, packed=not seed % 2)
                    found = [n for micro in micros for n in micro["number"].tolist()]
                    require(found == batch["number"].tolist(), f"seed {seed}: {found}")
                    inside = all(number * 8 <= n < number * 8 + 8 for n in found)
                    require(inside, f"seed {seed}: rows {found} in global batch {number}")
                    seen[number] = found
                whole = [n for number in range(3) for n in seen[number]]
                require(whole == part["number"].tolist(), f"seed {seed}: rows were lost")


@check("B6")
def any_batch_survives_a_journey(ctx: Context) -> None:
    """Plans, odd strides, slices of a large one and no rows at all, by pickle and torch.save."""
    for seed in list(_SEEDS)[:12]:
        rng = random.Random(seed)
        data = _random_batch(rng, 12)
        parts = _sharded(data, seed).parts
        for batch in (*parts, data.slice(3, 5), data.slice(4, 4), BatchedDataDict()):
            file = io.BytesIO()
            torch.save(batch, file)
            file.seek(0)
            twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(batch))))
            for got in (twice, torch.load(file, weights_only=True), copy.deepcopy(batch)):
                _equal(_rows(got), _rows(batch), f"seed {seed}")
                require(_plans(got) == _plans(batch), f"seed {seed}: the plans are lost")
                kinds = [type(v) for v in got.values()]
                require(kinds == [type(v) for v in batch.values()], f"kinds {kinds}")
                require(list(got) == list(batch), "the order of the keys is another")
    large = BatchedDataDict[Any]({"x": torch.zeros(1 << 16, 8)})
    small = len(pickle.dumps(large.slice(5, 6)))
    require(small < 1 << 14, f"one row of a large batch travels in {small} bytes")


@check("B7")
def stray_tokens_are_found_wherever_they_are(ctx: Context) -> None:
    """Any one token past a row's end, also right after it and in the last place, by seeds."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        rows, width, pad = rng.randint(1, 5), rng.randint(2, 9), rng.choice((0, 3, -1))
        lengths = torch.tensor([rng.randint(0, width - 1) for _ in range(rows)])
        ids = torch.randint(0, 5, (rows, width), generator=torch.Generator().manual_seed(seed))
        ids[torch.arange(width) >= lengths[:, None]] = pad
        pair = ("input_ids", "input_lengths")
        if seed % 2:
            pair = ("output_ids", "unpadded_sequence_lengths")
        data = BatchedDataDict[Any](dict(zip(pair, (ids, lengths), strict=True)))
        require(verify_right_padding(data, pad) == (True, None), f"seed {seed}: refused")
        row = rng.randrange(rows)
        place = rng.choice((int(lengths[row]), width - 1))
        ids[row, place] = pad + 1
        ok, message = verify_right_padding(data, pad, raise_error=False)
        named = str(row) in str(message) and str(place) in str(message)
        require(not ok and named, f"seed {seed}: row {row}, position {place}: {message}")
