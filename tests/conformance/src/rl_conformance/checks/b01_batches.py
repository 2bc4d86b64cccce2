"""B1, B2 and B3: what a batch is, how batches are joined, and their rows."""

from __future__ import annotations

import copy
import pickle
import random
from collections import UserDict
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.checks.common import (
    leaves_alone,
    must_equal,
    plain_rows,
    random_batch,
    seeded_batch,
)
from rl_conformance.expect import fail, raises, require, same, same_tensor
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


_LENGTHS = (7, 3, 30, 12, 5, 5, 18, 22, 9, 1, 14, 6)


@check("B1")
def size_is_the_number_of_rows(ctx: Context) -> None:
    """A UserDict; its size is the batch size."""
    data = seeded_batch()
    require(isinstance(data, UserDict), "BatchedDataDict", "a UserDict", type(data).__mro__)
    same(data.size, 12, "size of twelve rows")


@check("B1")
def unequal_sizes_are_named(ctx: Context) -> None:
    """Columns of unequal length raise, naming both and their sizes."""
    data = BatchedDataDict[Any]({"five": torch.zeros(5), "four": [1, 2, 3, 4]})
    with raises(ValueError, "five", "four", "5", "4"):
        _ = data.size


@check("B2")
def batches_are_padded_to_the_longest(ctx: Context) -> None:
    """Wider tensors are right-padded with 0 or the key's value; the rest is concatenated."""
    parts = [
        {
            "ids": torch.tensor([[1, 2]]),
            "mask": torch.tensor([[1, 1]]),
            "n": torch.tensor([7]),
            "s": ["a"],
        },
        {
            "ids": torch.tensor([[3, 4, 5]]),
            "mask": torch.ones(1, 3).long(),
            "n": torch.tensor([8]),
            "s": ["b"],
        },
    ]
    merged = BatchedDataDict[Any].from_batches(parts, pad_value_dict={"ids": 9})
    same_tensor(merged["ids"], torch.tensor([[1, 2, 9], [3, 4, 5]]), "ids")
    same_tensor(merged["mask"], torch.tensor([[1, 1, 0], [1, 1, 1]]), "mask")
    same_tensor(merged["n"], torch.tensor([7, 8]), "n")
    same(merged["s"], ["a", "b"], "from_batches: a column of lists")


@check("B2")
def a_missing_key_is_named(ctx: Context) -> None:
    """A key that a batch with rows lacks raises KeyError naming key and batch."""
    parts = [{"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(1)}]
    with raises(KeyError, "b", "1"):
        BatchedDataDict[Any].from_batches(parts)


@check("B2")
def from_batches_of_nothing_is_empty(ctx: Context) -> None:
    """from_batches([]) has no keys."""
    same(dict(BatchedDataDict[Any].from_batches([])), {}, "from_batches([])")


@check("B3")
def rows_stay_together(ctx: Context) -> None:
    """slice, select_indices, repeat_interleave and chunk take whole rows."""
    data = seeded_batch()
    same(data.slice(2, 4)["name"], ["row 2", "row 3"], "slice(2, 4)")
    chosen = data.select_indices([5, 0])
    same(chosen["number"].tolist(), [5, 0], "select_indices([5, 0]), a tensor")
    same(chosen["name"], ["row 5", "row 0"], "select_indices([5, 0]), a list")
    repeated = data.slice(0, 2).repeat_interleave(2)
    same(repeated["name"], ["row 0", "row 0", "row 1", "row 1"], "repeat_interleave(2)")
    same(data.chunk(1, 3)["number"].tolist(), [4, 5, 6, 7], "chunk(1, 3)")


@check("B3")
def reorder_sends_row_i_to_its_place(ctx: Context) -> None:
    """Row i goes to place idx[i]."""
    data = seeded_batch().slice(0, 3)
    data.reorder_data([2, 0, 1])
    same(data["name"], ["row 1", "row 2", "row 0"], "reorder_data([2, 0, 1]), a list")
    same(data["number"].tolist(), [1, 2, 0], "reorder_data([2, 0, 1]), a tensor")


@check("B3")
def nothing_is_truncated_silently(ctx: Context) -> None:
    """A slice past the end raises."""
    with raises(ValueError):
        seeded_batch().slice(10, 13)


@check("B3")
def truncation_narrows_tensors_only(ctx: Context) -> None:
    """truncate_tensors cuts the given dimension of tensors that have it."""
    data = seeded_batch()
    data.truncate_tensors(1, 4)
    same(data["input_ids"].shape, (12, 4), "truncate_tensors(1, 4): shape of 12 rows")
    same(data["number"].shape, (12,), "truncate_tensors(1, 4): shape of a tensor of one dimension")


@check("B3")
def batches_move_and_are_plain_dicts_inside(ctx: Context) -> None:
    """to(device) moves the tensors, get_dict is the dict, get_batch counts in batches."""
    data = seeded_batch()
    same(data.to("cpu")["input_ids"].device.type, "cpu", 'to("cpu"): device')
    require(type(data.get_dict()) is dict, "get_dict()", "a dict", type(data.get_dict()))
    same(data.get_batch(1, 4)["number"].tolist(), [4, 5, 6, 7], "get_batch(1, 4)")


Row = dict[str, Any]


_SEEDS = range(24)


_DTYPES = (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.float64)


@check("B3")
def row_operations_match_a_list(ctx: Context) -> None:
    """slice, select_indices, chunk, get_batch, repeat_interleave and reorder_data, by seeds."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        size = rng.randint(1, 9)
        data = random_batch(rng, size)
        rows = plain_rows(data)
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
                must_equal(
                    plain_rows(leaves_alone(data, act, what)), expected, f"seed {seed}, {what}"
                )
        for _ in range(2):
            data.reorder_data(order)
            moved: list[Any] = [None] * size
            for row, place in zip(rows, order, strict=True):
                moved[place] = row
            rows = moved
            must_equal(plain_rows(data), rows, f"seed {seed}, reorder_data")


@check("B3")
def selections_do_not_share_memory(ctx: Context) -> None:
    """Writing into a selection, a chunk, a shard or a repetition does not change the batch."""
    data = random_batch(random.Random(1), 6, 8)
    kept = copy.deepcopy(plain_rows(data))
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
            must_equal(plain_rows(data), kept, f"the batch, after a write into what {what} gave")
    repeated = data.repeat_interleave(2)
    repeated["things"][2]["list"].append("new")
    same(repeated["things"][3]["list"], [1], "a repeated item, after a write into its copy")
    must_equal(plain_rows(data), kept, "the batch, after a write into a repeated item")


@check("B3")
def wrong_rows_are_refused(ctx: Context) -> None:
    """Negative, missing, doubled and fractional indices raise, and nothing has moved."""
    data = random_batch(random.Random(2), 5)
    kept = copy.deepcopy(plain_rows(data))
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
            must_equal(plain_rows(data), kept, f"the batch, after {what} was refused")
        else:
            fail(what, "ValueError", "no exception")


@check("B2")
def merged_rows_are_padded_rows(ctx: Context) -> None:
    """from_batches of pieces of any widths, empty ones among them, against lists."""
    for seed in _SEEDS:
        rng = random.Random(seed)
        pieces = [random_batch(rng, rng.randint(0, 4)) for _ in range(rng.randint(1, 4))]
        dtype = next((piece["wide"].dtype for piece in pieces if piece.size), torch.float32)
        for piece in pieces:
            piece["wide"] = piece["wide"].to(dtype)
        pad = {"input_ids": 7, "wide": 1}
        before = [copy.deepcopy(plain_rows(piece)) for piece in pieces]
        merged = BatchedDataDict[Any].from_batches(pieces, pad_value_dict=pad)
        same([plain_rows(p) for p in pieces], before, f"seed {seed}: pieces, after from_batches")
        whole = [piece for piece in pieces if piece.size]
        same(merged.size, sum(p.size for p in whole), f"seed {seed}: rows of from_batches")
        width = max((p["input_ids"].shape[1] for p in whole), default=0)
        row = 0
        for piece in whole:
            own = piece["input_ids"].shape[1]
            for n in range(piece.size):
                ids = piece["input_ids"][n].tolist() + [7] * (width - own)
                wide = piece["wide"][n].tolist() + torch.ones(width - own, 3, dtype=dtype).tolist()
                place = f"seed {seed}, row {row} of from_batches"
                found = (merged["input_ids"][row].tolist(), merged["wide"][row].tolist())
                same(found, (ids, wide), f"{place}: padded input_ids and wide")
                same(merged["things"][row], piece["things"][n], f"{place}: things")
                same(
                    merged["turned"][row].tolist(), piece["turned"][n].tolist(), f"{place}: turned"
                )
                row += 1
        require(merged["wide"].dtype == dtype or not whole, "dtype", dtype, merged["wide"].dtype)
