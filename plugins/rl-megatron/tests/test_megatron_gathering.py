"""What rank 0 holds while it puts tensors together; the other ranks are a test double."""

from __future__ import annotations

import math

import pytest
import torch

from rl_megatron import weights
from rl_megatron.architectures import Architecture
from rl_megatron.sizes import Sizes
from rl_megatron.table import Table

CONFIG = {
    "model_type": "qwen2",
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": 16,
    "intermediate_size": 12,
    "vocab_size": 30,
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("part", [100, 300])
def test_rank_0_has_one_tensor_and_at_most_a_part(monkeypatch, part):
    architecture, sizes = Architecture.of(CONFIG, "m"), Sizes(2, 1, 1, 1)
    table = Table(architecture)
    whole = {
        name: torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
        for name, shape in table.shapes().items()
    }
    arriving: list[torch.Tensor] = []
    beside: list[int] = []

    def receive(into: torch.Tensor, rank: int) -> None:
        assert rank == 1
        assert into.is_contiguous()
        into.copy_(arriving.pop(0))
        if into.untyped_storage().nbytes() == into.nbytes:
            beside.append(into.nbytes)

    monkeypatch.setattr(weights, "_PART_BYTES", part)
    monkeypatch.setattr(weights.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(weights.dist, "recv", receive)
    gathering = weights.Gathering(table, sizes, [], torch.float32, torch.device("cpu"))
    monkeypatch.setattr(gathering, "_box", lambda piece: whole[piece.name][piece.index])
    for name, senders in gathering._senders.items():
        boxes = [whole[name][piece.index] for rank, piece in senders if rank]
        arriving += [each for box in boxes for each in weights._parts(box)]
        assert torch.equal(gathering(name), whole[name])
        assert not arriving
    assert beside, "no tensor is divided by columns"
    assert max(beside) <= part
