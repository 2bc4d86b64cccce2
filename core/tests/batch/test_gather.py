"""all_gather: real process groups, jagged batches, no pickle."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

RANK = """
import sys
from datetime import timedelta
import torch
import torch.distributed as dist
from rl_core.batch import BatchedDataDict

rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group(
    "gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
)
rows, width = rank + 1, 3 - rank
gathered = BatchedDataDict({
    "ids": torch.full((rows, width), rank + 1),
    "flags": torch.tensor([True] * rows),
    "half": torch.full((rows,), rank + 0.5, dtype=torch.bfloat16),
    "notes": [{"rank": rank, "text": ["x", None, 1.5, b"y"], "t": torch.ones(2, rank)}] * rows,
}).all_gather()
torch.save(gathered, f"{result}{rank}")
dist.destroy_process_group()
"""


def test_ranks_with_different_rows_and_widths_all_get_everything(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store"), str(tmp_path / "out")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=280)
            assert process.returncode == 0, errors
    finally:
        for process in ranks:
            process.kill()
    for rank in range(2):
        got = torch.load(tmp_path / f"out{rank}", weights_only=True)
        assert got["ids"].tolist() == [[1, 1, 1], [2, 2, 0], [2, 2, 0]]
        assert got["flags"].tolist() == [True] * 3
        assert got["half"].dtype == torch.bfloat16
        assert got["half"].tolist() == [0.5, 1.5, 1.5]
        assert [note["rank"] for note in got["notes"]] == [0, 1, 1]
        assert got["notes"][0]["text"] == ["x", None, 1.5, b"y"]
        assert [note["t"].shape for note in got["notes"]] == [(2, 0), (2, 1), (2, 1)]


@pytest.fixture(scope="module")
def alone():
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield
    dist.destroy_process_group()


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.just(2**70)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def types_of(value):
    if isinstance(value, list):
        return [types_of(item) for item in value]
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return type(value)


@given(items=st.lists(PLAIN, max_size=4))
def test_list_items_keep_values_and_types(alone, items):
    gathered = BatchedDataDict({"items": items}).all_gather()
    assert gathered["items"] == items
    assert types_of(gathered["items"]) == types_of(items)


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64],
)
def test_tensors_keep_their_bits(alone, dtype):
    odd = torch.tensor([True, False, True])  # 3 bytes: what follows is not aligned
    tensor = torch.randn(3, 2, 2).to(dtype)
    gathered = BatchedDataDict({"odd": odd, "x": tensor, "view": tensor[:, 0]}).all_gather()
    assert gathered["x"].dtype == dtype
    assert torch.equal(gathered["x"], tensor)
    assert torch.equal(gathered["view"], tensor[:, 0])


@pytest.mark.parametrize(
    "tensor", [torch.tensor(3), torch.empty(0, 4), torch.randn(2, 3).to(torch.bfloat16)]
)
def test_tensors_inside_lists_keep_dtype_and_shape(alone, tensor):
    received = BatchedDataDict({"log": [{"ids": tensor}]}).all_gather()["log"][0]["ids"]
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


@pytest.mark.parametrize("item", [(1, 2), {1: "a"}, {1, 2}, object(), 1j])
def test_a_value_that_cannot_travel_is_refused_with_its_key_and_type(alone, item):
    with pytest.raises(DataError, match=f"key 'bad': .* {type(item).__name__}"):
        BatchedDataDict({"bad": [[item]]}).all_gather()


def test_what_a_view_does_not_show_stays_where_it_is(alone, monkeypatch):
    """Only the rows of a slice travel, not the batch that they are of."""
    sent, save = [], torch.save
    monkeypatch.setattr(
        torch, "save", lambda columns, file: sent.append(columns) or save(columns, file)
    )
    part = BatchedDataDict({"x": torch.zeros(1000, 4)}).slice(5, 6)
    assert torch.equal(part.all_gather()["x"], torch.zeros(1, 4))
    assert sent[0]["x"].untyped_storage().nbytes() == 16
