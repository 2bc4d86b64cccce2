"""B4, B5, B6 and B7: shards and microbatches, batches that travel, and padding that is verified."""

from __future__ import annotations

import copy
import io
import pickle
import random
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from rl_conformance.checks.common import (
    leaves_alone,
    must_equal,
    plain_rows,
    plans_in,
    random_batch,
    seeded_batch,
)
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict, verify_right_padding
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.context import Context


_LENGTHS = (7, 3, 30, 12, 5, 5, 18, 22, 9, 1, 14, 6)


_ALGORITHMS = (
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
)


def _same(got: BatchedDataDict[Any], expected: BatchedDataDict[Any]) -> None:
    same(sorted(got), sorted(expected), "columns")
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            same_tensor(got[key], value, key)
        else:
            same((type(got[key]), got[key]), (type(value), value), f"column {key}")


@check("B4")
def rows_that_do_not_divide_are_refused(ctx: Context) -> None:
    """Uneven shards need allow_uneven_shards."""
    data = seeded_batch().slice(0, 11)
    with raises(ValueError):
        data.shard_by_batch_size(2)
    parts = data.shard_by_batch_size(2, allow_uneven_shards=True)
    same(sorted(p.size for p in parts), [5, 6], "sizes of the shards of 11 rows")


@check("B4", cases={name: {"algorithm": name} for name in _ALGORITHMS})
def few_short_rows_are_split(ctx: Context, algorithm: str) -> None:
    """Rows that fit into one bin are split, so that every shard has as many bins."""
    args: Any = {"max_tokens_per_microbatch": 400, "algorithm": algorithm}
    for shards in (2, 3, 4):
        parts, order = seeded_batch().shard_by_batch_size(shards, sequence_packing_args=args)
        counts = [part.get_microbatch_iterator_for_packable_sequences_len()[0] for part in parts]
        same(counts, [1] * shards, f"bins of {shards} shards")
        _undone(seeded_batch(), parts, order)


@check("B4")
def shuffled_packing_is_seeded(ctx: Context) -> None:
    """The same seed packs alike and the global random state is not touched."""
    args: Any = {"max_tokens_per_microbatch": 40, "algorithm": "first_fit_shuffle"}
    before = torch.get_rng_state()
    first, second = (
        seeded_batch().shard_by_batch_size(2, sequence_packing_args=args) for _ in "ab"
    )
    same_tensor(torch.get_rng_state(), before, "the global random state")
    same(second[1], first[1], "order of a second packing with one seed")


def _undone(data: BatchedDataDict[Any], parts: list[Any], order: list[int]) -> None:
    """The order that came with the shards brings the rows back."""
    merged = BatchedDataDict[Any].from_batches(parts)
    same(sorted(merged["number"].tolist()), list(range(12)), "rows of all shards")
    merged.reorder_data(order)
    same(merged["number"].tolist(), list(range(12)), "rows after reorder_data(order)")
    same(merged["name"], data["name"], "a column of lists after reorder_data(order)")


@check("B5")
def fixed_microbatches_yield_every_row(ctx: Context) -> None:
    """Runs of the given size, in order."""
    micros = list(seeded_batch().make_microbatch_iterator(4))
    rows = [n for micro in micros for n in micro["number"].tolist()]
    same(rows, list(range(12)), "rows of all microbatches")
    same(len(micros), 3, "microbatches of 4 of 12 rows")


@check("B5")
def dynamic_microbatches_are_narrowed(ctx: Context) -> None:
    """Each microbatch is as wide as its rounded longest row, and all rows come."""
    (part,), _ = seeded_batch().shard_by_batch_size(
        1, dynamic_batching_args={"max_tokens_per_microbatch": 64, "sequence_length_round": 4}
    )
    seen = []
    for micro in part.make_microbatch_iterator_with_dynamic_shapes():
        longest = int(micro["input_lengths"].max())
        width = micro["input_ids"].shape[1]
        fits = longest <= width < longest + 4
        require(fits, "width of a microbatch", f"{longest}, rounded up to a multiple of 4", width)
        seen += micro["number"].tolist()
    same(sorted(seen), list(range(12)), "rows of all microbatches")


@check("B5")
def packable_microbatches_yield_every_row(ctx: Context) -> None:
    """All rows come, and the announced numbers are right."""
    args: Any = {"max_tokens_per_microbatch": 40}
    (part,), _ = seeded_batch().shard_by_batch_size(1, sequence_packing_args=args)
    micros = list(part.make_microbatch_iterator_for_packable_sequences())
    count, longest = part.get_microbatch_iterator_for_packable_sequences_len()
    loads = [int(micro["input_lengths"].sum()) for micro in micros]
    same(len(micros), count, "microbatches, and how many were announced")
    require(longest >= max(loads), "announced longest microbatch", f">= {max(loads)}", longest)
    rows = sorted(n for micro in micros for n in micro["number"].tolist())
    same(rows, list(range(12)), "rows of all microbatches")


def _planned() -> BatchedDataDict[Any]:
    """A shard with everything that must survive a journey."""
    args: Any = {"max_tokens_per_microbatch": 64, "sequence_length_round": 8}
    data = seeded_batch()
    data["bfloat16"] = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    data["tuples"] = [(n, str(n)) for n in range(12)]
    shards, _ = data.shard_by_batch_size(2, dynamic_batching_args=args)
    planned: BatchedDataDict[Any] = shards[0]
    return planned


def _survived(got: Any, expected: BatchedDataDict[Any]) -> None:
    same(type(got), type(expected), "type of the batch")
    _same(got, expected)
    for name in ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"):
        same(getattr(got, name), getattr(expected, name), name)


@check("B6", modules=("rl_ray",), timeout_s=300.0)
def a_batch_survives_ray(ctx: Context) -> None:
    """Through Ray's object store."""
    import ray

    from rl_ray import RayVirtualCluster

    store = {"object_store_memory": 100 << 20}
    with RayVirtualCluster([1], use_gpus=False, ray_options=store):
        _survived(ray.get(ray.put(_planned()), timeout=60), _planned())


@check("B7")
def right_padding_is_accepted(ctx: Context) -> None:
    """(True, None)."""
    same(verify_right_padding(seeded_batch()), (True, None), "verify_right_padding")


@check("B7")
def row_and_positions_are_named(ctx: Context) -> None:
    """The message names the row and where the stray tokens stand."""
    data = seeded_batch()
    data["input_ids"][3, 14] = 5
    ok, message = verify_right_padding(data, raise_error=False)
    require(not ok, "verify_right_padding with a token after row 3", "False", ok)
    named = "3" in str(message) and "14" in str(message)
    require(named, "the message", "it names row 3 and position 14", message)
    with raises(ValueError, "3", "14"):
        verify_right_padding(data)


@check("B7")
def the_pad_value_counts(ctx: Context) -> None:
    """Another pad value than the one that was used is not padding."""
    ok, _ = verify_right_padding(seeded_batch(), pad_value=1, raise_error=False)
    require(not ok, "verify_right_padding(pad_value=1) of rows padded with 0", "False", ok)


Row = dict[str, Any]


_SEEDS = range(24)


_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float64)


class _Sharded(NamedTuple):
    """The result of shard_by_batch_size, and its arguments."""

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
        data = random_batch(rng, 6 * rng.randint(1, 4))
        rows, before = plain_rows(data), _random_states()
        found = leaves_alone(data, partial(_sharded, data, seed), "sharding")
        again = _sharded(data, seed)
        what = f"seed {seed}, {'packed' if found.packed else 'dynamic'}"
        same(_random_states(), before, f"{what}: the global random states")
        plans = [plans_in(part) for part in found.parts]
        same(again.order, found.order, f"{what}: order of a second call")
        same([plans_in(p) for p in again.parts], plans, f"{what}: plans of a second call")
        below = [row for part in found.parts for row in plain_rows(part)]
        must_equal(below, [rows[i] for i in found.order], f"{what}: order")
        same(sorted(found.order), list(range(len(rows))), f"{what}: rows of all shards")
        dealt = [_microbatches(part, found.packed) for part in found.parts]
        counts = [len(micros) for micros in dealt]
        require(
            len(set(counts)) == 1, f"{what}: microbatches of the shards", "equally many", counts
        )
        for part, micros in zip(found.parts, dealt, strict=True):
            numbers = [n for micro in micros for n in micro["number"].tolist()]
            same(numbers, part["number"].tolist(), f"{what}: rows of the microbatches")
        for together in zip(*dealt, strict=True):
            _within_bounds(together, found, what)
        merged = BatchedDataDict[Any].from_batches(found.parts)
        merged.reorder_data(found.order)
        must_equal(plain_rows(merged), rows, f"{what}: undone")


def _within_bounds(together: Sequence[Any], found: _Sharded, what: str) -> None:
    """The microbatches that all shards work on at one time."""
    longest = max(int(micro["input_lengths"].max()) for micro in together)
    for micro in together:
        lengths, width = micro["input_lengths"], micro["input_ids"].shape[1]
        padded = int((-(-lengths // found.multiple) * found.multiple).sum())
        load = padded if found.packed else width * micro.size
        require(load <= found.bound, f"{what}: tokens of a microbatch", f"<= {found.bound}", load)
        if not found.packed:
            fits = longest <= width < longest + found.multiple
            require(fits, f"{what}: width of a microbatch", f"{longest}, rounded up", width)
            same(micro["wide"].shape[1], width, f"{what}: width of another column")


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
        data = random_batch(rng, size)
        rows = plain_rows(data)
        global_batch = shards * each
        for _ in "ab":
            parts = leaves_alone(
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
                must_equal(plain_rows(part), expected, f"seed {seed}, shard {shard}")
        uneven = data.slice(0, rng.randint(shards, size))
        sizes = [p.size for p in uneven.shard_by_batch_size(shards, allow_uneven_shards=True)]
        even = sum(sizes) == uneven.size and max(sizes) - min(sizes) <= 1
        require(even, f"shards of {uneven.size} rows", "sizes that differ by at most 1", sizes)
        joined = [
            row
            for part in uneven.shard_by_batch_size(shards, allow_uneven_shards=True)
            for row in plain_rows(part)
        ]
        must_equal(joined, rows[: uneven.size], f"seed {seed}, uneven")


@check("B5")
def each_global_batch_has_its_own_plan(ctx: Context) -> None:
    """get_batch of a shard of several global batches: its rows, its microbatches, each time."""
    for seed in list(_SEEDS)[:12]:
        rng = random.Random(seed)
        data = random_batch(rng, 24, 12)
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
                    batch = leaves_alone(part, lambda: part.get_batch(number), "get_batch")  # noqa: B023
                    micros = _microbatches(batch, packed=not seed % 2)
                    found = [n for micro in micros for n in micro["number"].tolist()]
                    same(found, batch["number"].tolist(), f"seed {seed}: rows of the microbatches")
                    inside = all(number * 8 <= n < number * 8 + 8 for n in found)
                    require(inside, f"seed {seed}: rows of global batch {number}", "its own", found)
                    seen[number] = found
                whole = [n for number in range(3) for n in seen[number]]
                same(whole, part["number"].tolist(), f"seed {seed}: rows of all global batches")


@check("B6")
def unusual_batches_survive_serialization(ctx: Context) -> None:
    """Plans, odd strides, slices of a large one and no rows at all, by pickle and torch.save."""
    for seed in list(_SEEDS)[:12]:
        rng = random.Random(seed)
        data = random_batch(rng, 12)
        parts = _sharded(data, seed).parts
        for batch in (*parts, data.slice(3, 5), data.slice(4, 4), BatchedDataDict()):
            file = io.BytesIO()
            torch.save(batch, file)
            file.seek(0)
            twice = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(batch))))
            for got in (twice, torch.load(file, weights_only=True), copy.deepcopy(batch)):
                must_equal(plain_rows(got), plain_rows(batch), f"seed {seed}")
                same(plans_in(got), plans_in(batch), f"seed {seed}: plans")
                kinds = [type(v) for v in got.values()]
                same(kinds, [type(v) for v in batch.values()], f"seed {seed}: types of the columns")
                same(list(got), list(batch), f"seed {seed}: order of the columns")
    large = BatchedDataDict[Any]({"x": torch.zeros(1 << 16, 8)})
    small = len(pickle.dumps(large.slice(5, 6)))
    require(small < 1 << 14, "pickled bytes of one row of a large batch", "< 16384", small)


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
        same(verify_right_padding(data, pad), (True, None), f"seed {seed}: verify_right_padding")
        row = rng.randrange(rows)
        place = rng.choice((int(lengths[row]), width - 1))
        ids[row, place] = pad + 1
        ok, message = verify_right_padding(data, pad, raise_error=False)
        named = str(row) in str(message) and str(place) in str(message)
        want = f"False, and a message that names row {row} and position {place}"
        require(not ok and named, f"seed {seed}: verify_right_padding", want, f"{ok}: {message}")
