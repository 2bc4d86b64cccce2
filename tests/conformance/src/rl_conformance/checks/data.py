"""B1 to B7: the batch that crosses every interface."""

from __future__ import annotations

import io
import pickle
from collections import UserDict
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import random_prompts
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict, verify_right_padding

if TYPE_CHECKING:
    from rl_conformance.context import Context

_LENGTHS = (7, 3, 30, 12, 5, 5, 18, 22, 9, 1, 14, 6)
_ALGORITHMS = (
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
)


def _batch() -> BatchedDataDict[Any]:
    """Twelve ragged rows that carry their number as a tensor and as a string."""
    numbers = torch.arange(len(_LENGTHS))
    return random_prompts(_LENGTHS, number=numbers, name=[f"row {n}" for n in numbers.tolist()])


def _same(got: BatchedDataDict[Any], expected: BatchedDataDict[Any]) -> None:
    require(got.keys() == expected.keys(), f"keys differ: {got.keys() ^ expected.keys()}")
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            same_tensor(got[key], value, key)
        else:
            require(got[key] == value and type(got[key]) is type(value), f"{key} differs")


@check("B1")
def size_is_the_number_of_rows(ctx: Context) -> None:
    """A UserDict whose size is the batch size."""
    data = _batch()
    require(isinstance(data, UserDict), "BatchedDataDict is no UserDict")
    require(data.size == 12, f"the size of twelve rows is {data.size}")


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
    require(merged["s"] == ["a", "b"], f"the lists became {merged['s']}")


@check("B2")
def a_missing_key_is_named(ctx: Context) -> None:
    """A key that a batch with rows lacks raises KeyError naming key and batch."""
    parts = [{"a": torch.ones(2), "b": torch.ones(2)}, {"a": torch.ones(1)}]
    with raises(KeyError, "b", "1"):
        BatchedDataDict[Any].from_batches(parts)


@check("B2")
def no_batches_are_an_empty_batch(ctx: Context) -> None:
    """from_batches([]) has no keys."""
    require(not BatchedDataDict[Any].from_batches([]), "from_batches([]) is not empty")


@check("B3")
def rows_stay_together(ctx: Context) -> None:
    """slice, select_indices, repeat_interleave and chunk take whole rows."""
    data = _batch()
    require(data.slice(2, 4)["name"] == ["row 2", "row 3"], "slice took other rows")
    chosen = data.select_indices([5, 0])
    require(chosen["number"].tolist() == [5, 0], "select_indices took other rows")
    require(chosen["name"] == ["row 5", "row 0"], "select_indices tore rows apart")
    repeated = data.slice(0, 2).repeat_interleave(2)
    require(repeated["name"] == ["row 0", "row 0", "row 1", "row 1"], "rows are not repeated")
    require(data.chunk(1, 3)["number"].tolist() == [4, 5, 6, 7], "chunk 1 of 3 is wrong")


@check("B3")
def reorder_sends_row_i_to_its_place(ctx: Context) -> None:
    """Row i goes to place idx[i]."""
    data = _batch().slice(0, 3)
    data.reorder_data([2, 0, 1])
    require(data["name"] == ["row 1", "row 2", "row 0"], f"the order is {data['name']}")
    require(data["number"].tolist() == [1, 2, 0], "the tensors were not reordered alike")


@check("B3")
def nothing_is_truncated_silently(ctx: Context) -> None:
    """A slice past the end raises."""
    with raises(ValueError):
        _batch().slice(10, 13)


@check("B3")
def truncation_narrows_tensors_only(ctx: Context) -> None:
    """truncate_tensors cuts the given dimension of tensors that have it."""
    data = _batch()
    data.truncate_tensors(1, 4)
    require(data["input_ids"].shape == (12, 4), f"the shape is {list(data['input_ids'].shape)}")
    require(data["number"].shape == (12,), "a tensor without that dimension was cut")


@check("B3")
def batches_move_and_are_plain_dicts_inside(ctx: Context) -> None:
    """to(device) moves the tensors, get_dict is the dict, get_batch counts in batches."""
    data = _batch()
    require(data.to("cpu")["input_ids"].device.type == "cpu", "to(cpu) did not move")
    require(type(data.get_dict()) is dict, "get_dict is no dict")
    require(data.get_batch(1, 4)["number"].tolist() == [4, 5, 6, 7], "get_batch(1, 4) is wrong")


@check("B4", cases={f"into_{n}": {"shards": n} for n in (1, 2, 3)})
def every_row_lands_in_one_shard(ctx: Context, shards: int) -> None:
    """Plain shards have equal sizes and lose nothing."""
    data = _batch()
    parts = data.shard_by_batch_size(shards)
    require([p.size for p in parts] == [12 // shards] * shards, "shards are not equal")
    rows = [n for part in parts for n in part["number"].tolist()]
    require(sorted(rows) == list(range(12)), f"rows {rows}")


@check("B4")
def global_batches_are_dealt_in_turn(ctx: Context) -> None:
    """With batch_size 2 and two shards, rows 0 1 2 3 become 0 2 and 1 3."""
    parts = _batch().slice(0, 4).shard_by_batch_size(2, batch_size=2)
    require([p["number"].tolist() for p in parts] == [[0, 2], [1, 3]], "dealt otherwise")


@check("B4")
def rows_that_do_not_divide_are_refused(ctx: Context) -> None:
    """Uneven shards need allow_uneven_shards."""
    data = _batch().slice(0, 11)
    with raises(ValueError):
        data.shard_by_batch_size(2)
    parts = data.shard_by_batch_size(2, allow_uneven_shards=True)
    require(sorted(p.size for p in parts) == [5, 6], "11 rows are not dealt 5 and 6")


@check("B4")
def dynamic_microbatches_keep_their_bound(ctx: Context) -> None:
    """Equal counts per shard, none above the bound after rounding, no row lost."""
    data = _batch()
    parts, order = data.shard_by_batch_size(
        2, dynamic_batching_args={"max_tokens_per_microbatch": 64, "sequence_length_round": 8}
    )
    counts = [p.get_microbatch_iterator_dynamic_shapes_len() for p in parts]
    require(len(set(counts)) == 1, f"microbatches per shard: {counts}")
    for part in parts:
        for micro in part.make_microbatch_iterator_with_dynamic_shapes():
            rows, width = micro["input_ids"].shape
            require(rows * width <= 64, f"a microbatch has {rows} x {width} tokens")
            require(width % 8 == 0 or width == data["input_ids"].shape[1], f"width {width}")
    _undone(data, parts, order)


@check("B4", cases={name: {"algorithm": name} for name in _ALGORITHMS})
def packed_bins_keep_their_bound(ctx: Context, algorithm: str) -> None:
    """Equal counts per shard, padded lengths within the bound, no row lost."""
    data = _batch()
    args: Any = {
        "max_tokens_per_microbatch": 40,
        "sequence_length_pad_multiple": 4,
        "algorithm": algorithm,
    }
    parts, order = data.shard_by_batch_size(2, sequence_packing_args=args)
    counts = [part.get_microbatch_iterator_for_packable_sequences_len()[0] for part in parts]
    require(len(set(counts)) == 1, f"bins per shard: {counts}")
    for part in parts:
        for micro in part.make_microbatch_iterator_for_packable_sequences():
            padded = ((micro["input_lengths"] + 3) // 4 * 4).sum()
            require(padded <= 40, f"a bin holds {int(padded)} padded tokens")
    _undone(data, parts, order)


@check("B4")
def shuffled_packing_is_seeded(ctx: Context) -> None:
    """The same seed packs alike and the global random state is not touched."""
    args: Any = {"max_tokens_per_microbatch": 40, "algorithm": "first_fit_shuffle"}
    before = torch.get_rng_state()
    first, second = (_batch().shard_by_batch_size(2, sequence_packing_args=args) for _ in "ab")
    same_tensor(torch.get_rng_state(), before, "the global random state")
    require(first[1] == second[1], "two packings with one seed differ")


def _undone(data: BatchedDataDict[Any], parts: list[Any], order: list[int]) -> None:
    """The order that came with the shards brings the rows back."""
    merged = BatchedDataDict[Any].from_batches(parts)
    require(sorted(merged["number"].tolist()) == list(range(12)), "rows were lost or doubled")
    merged.reorder_data(order)
    require(merged["number"].tolist() == list(range(12)), "the order does not undo the sharding")
    require(merged["name"] == data["name"], "lists were torn from their rows")


@check("B5")
def fixed_microbatches_yield_every_row(ctx: Context) -> None:
    """Runs of the given size, in order."""
    micros = list(_batch().make_microbatch_iterator(4))
    rows = [n for micro in micros for n in micro["number"].tolist()]
    require(rows == list(range(12)) and len(micros) == 3, f"rows {rows}")


@check("B5")
def dynamic_microbatches_are_narrowed(ctx: Context) -> None:
    """Each microbatch is as wide as its rounded longest row, and all rows come."""
    (part,), _ = _batch().shard_by_batch_size(
        1, dynamic_batching_args={"max_tokens_per_microbatch": 64, "sequence_length_round": 4}
    )
    seen = []
    for micro in part.make_microbatch_iterator_with_dynamic_shapes():
        longest = int(micro["input_lengths"].max())
        width = micro["input_ids"].shape[1]
        require(longest <= width < longest + 4, f"width {width} for a longest row of {longest}")
        seen += micro["number"].tolist()
    require(sorted(seen) == list(range(12)), f"rows {seen}")


@check("B5")
def packable_microbatches_yield_every_row(ctx: Context) -> None:
    """All rows come, and the announced numbers are right."""
    args: Any = {"max_tokens_per_microbatch": 40}
    (part,), _ = _batch().shard_by_batch_size(1, sequence_packing_args=args)
    micros = list(part.make_microbatch_iterator_for_packable_sequences())
    count, longest = part.get_microbatch_iterator_for_packable_sequences_len()
    loads = [int(micro["input_lengths"].sum()) for micro in micros]
    require(count == len(micros), f"{count} microbatches were announced, {len(micros)} came")
    require(longest >= max(loads), f"the longest was announced as {longest}, it is {max(loads)}")
    rows = sorted(n for micro in micros for n in micro["number"].tolist())
    require(rows == list(range(12)), f"rows {rows}")


def _planned() -> BatchedDataDict[Any]:
    """A shard with everything that must survive a journey."""
    args: Any = {"max_tokens_per_microbatch": 64, "sequence_length_round": 8}
    data = _batch()
    data["bfloat16"] = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    data["tuples"] = [(n, str(n)) for n in range(12)]
    shards, _ = data.shard_by_batch_size(2, dynamic_batching_args=args)
    planned: BatchedDataDict[Any] = shards[0]
    return planned


def _survived(got: Any, expected: BatchedDataDict[Any]) -> None:
    require(type(got) is type(expected), f"it became a {type(got).__name__}")
    _same(got, expected)
    for name in ("micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"):
        require(getattr(got, name) == getattr(expected, name), f"{name} was lost")


@check("B6")
def a_batch_survives_pickling(ctx: Context) -> None:
    """Bit for bit, microbatch metadata and list types included."""
    _survived(pickle.loads(pickle.dumps(_planned())), _planned())


@check("B6")
def a_batch_survives_torch_save(ctx: Context) -> None:
    """Also read back with weights_only=True."""
    file = io.BytesIO()
    torch.save(_planned(), file)
    file.seek(0)
    _survived(torch.load(file, weights_only=True), _planned())


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
    require(verify_right_padding(_batch()) == (True, None), "a right-padded batch was refused")


@check("B7")
def row_and_positions_are_named(ctx: Context) -> None:
    """The message names the row and where the stray tokens stand."""
    data = _batch()
    data["input_ids"][3, 14] = 5
    ok, message = verify_right_padding(data, raise_error=False)
    require(not ok, "a stray token was accepted")
    require("3" in str(message) and "14" in str(message), f"row 3, position 14: {message}")
    with raises(ValueError, "3", "14"):
        verify_right_padding(data)


@check("B7")
def the_pad_value_counts(ctx: Context) -> None:
    """Another pad value than the one that was used is not padding."""
    ok, _ = verify_right_padding(_batch(), pad_value=1, raise_error=False)
    require(not ok, "zeros passed for padding with 1")
