"""What a worker returns is read as values, or refused; nothing in it is loaded."""

from __future__ import annotations

import msgspec
import pytest
import torch

from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError
from rl_hosting._values import decode_result, encode_arguments, encode_result


def test_values_come_back_as_they_were():
    batch = BatchedDataDict({"ids": torch.arange(6).view(2, 3), "texts": ["a", "b"]})
    value = {"batch": batch, "pair": (1, {2}), "dtype": torch.bfloat16, 3: 1 << 70, "none": None}
    found = decode_result(encode_result(value))
    assert torch.equal(found["batch"]["ids"], batch["ids"])
    assert found["batch"]["texts"] == ["a", "b"]
    assert {k: v for k, v in found.items() if k != "batch"} == {
        k: v for k, v in value.items() if k != "batch"
    }


@pytest.mark.parametrize(
    "value",
    [
        {"\0kind": "dtype", "value": "save"},
        {"\0kind": "dtype", "value": 5},
        {"\0kind": "fields", "class": "os:system", "value": {}},
        {"\0kind": "fields", "class": "rl_core.nothing:Here", "value": {}},
        {"\0kind": "fields", "class": "rl_core.interfaces.worker:WorkerContext", "value": {"x": 1}},
        {"\0kind": "set", "value": [[1]]},
        {"\0kind": "int", "value": "one"},
        {"\0kind": "unheard of", "value": 1},
        {"\0kind": "tuple"},
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["float32", [3], b"abc"])),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["load", [1], b"abcd"])),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["float32", [1 << 20], b""])),
        msgspec.msgpack.Ext(1, b"\xff"),
    ],
)
def test_nonsense_is_an_error_of_ours(value):
    with pytest.raises(DataError, match="a worker's result"):
        decode_result(msgspec.msgpack.encode(value))


def test_objects_and_cut_frames_are_not_read():
    with pytest.raises(DataError, match="not loaded"):
        decode_result(encode_arguments([print]))
    with pytest.raises(DataError):
        decode_result(encode_result([1, 2, 3])[:-1])
