"""Their batch's methods and arguments: they work, or what is not supported is named."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch

import rl_core.batch
from rl_core.errors import ConfigError, DataError
from rl_nemo import BatchedDataDict


class PackedTensor:
    """Theirs holds images or sound (data/multimodal_utils.py)."""

    def __len__(self) -> int:
        return 3


def rows(**more: Any) -> BatchedDataDict[Any]:
    ids = torch.arange(12).reshape(3, 4)
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.tensor([2, 4, 3]), "log": [["a"], [], []], **more}
    )


def test_text_has_no_images() -> None:
    types = torch.zeros(3, 4)
    assert rows().get_multimodal_dict(as_tensors=True, device="cpu") == {}
    assert rows(token_type_ids=types).get_multimodal_dict() == {"token_type_ids": types}


def test_their_arguments() -> None:
    both = BatchedDataDict.from_batches([rows(), rows()], allow_missing_packed_tensors=True)
    assert type(both) is BatchedDataDict
    assert both.size == 6
    twice = rows().repeat_interleave(2, share_immutable_media=True)
    assert twice["input_lengths"].tolist() == [2, 2, 4, 4, 3, 3]
    assert twice["log"][0] is not twice["log"][1]
    (batch := rows()).reorder_data(reorded_indices=[2, 0, 1])
    assert batch["input_lengths"].tolist() == [4, 3, 2]


def test_a_packed_tensor_is_named() -> None:
    batch = rows(pixels=PackedTensor())
    for call in (
        batch.get_multimodal_dict,
        lambda: batch.repeat_interleave(2, share_immutable_media=True),
        lambda: BatchedDataDict.from_batches([batch, rows()], allow_missing_packed_tensors=True),
    ):
        with pytest.raises(DataError, match="'pixels' holds a PackedTensor"):
            call()


def test_the_largest_microbatch_comes_first() -> None:
    args: Any = {"max_tokens_per_microbatch": 5, "microbatch_order": "largest_first"}
    [shard], _ = rows().shard_by_batch_size(1, sequence_packing_args=args)
    assert shard.micro_batch_lengths == [[5, 4]]
    with pytest.raises(ConfigError, match="microbatch_order"):
        rows().shard_by_batch_size(1, sequence_packing_args={**args, "microbatch_order": "packer"})


def test_it_is_read_where_rl_nemo_is_not_installed() -> None:
    torch.save(rows(), file := io.BytesIO())
    assert b"rl_nemo" not in file.getvalue()
    file.seek(0)
    read = torch.load(file, weights_only=True)
    assert type(read) is rl_core.batch.BatchedDataDict
    assert torch.equal(read["input_ids"], rows()["input_ids"])
