"""What ``rl refit plan`` takes a model to be, against transformers, FSDP2 and megatron."""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import AutoConfig, AutoModelForCausalLM

from rl_backends.pieces import held_boxes
from rl_cli.planning import Shape, model_of
from rl_cli.planning.families import FAMILIES
from rl_core.interfaces import Box
from rl_megatron.architectures import Architecture
from rl_megatron.sizes import Sizes
from rl_megatron.table import Table

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 50,
}
EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}


def held(shape: Shape, config: dict[str, Any]) -> dict[int, set[tuple[str, Box]]]:
    """The boxes of each rank, tensor by tensor."""
    found: dict[int, set[tuple[str, Box]]] = defaultdict(set)
    for name, _, _, shards in shape.stacks(model_of(config)):
        numbers = name.count("{}")
        for box, ranks in shards:
            for at in product(*(range(*each) for each in box[:numbers])):
                for rank in ranks:
                    found[rank].add((name.format(*at), box[numbers:]))
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"kimi_k2"}))
def test_the_tensors_are_those_of_transformers(family: str, tied: bool) -> None:
    more = LATENT if family == "deepseek_v3" else {}
    given = {**SMALL, **EXPERTS, **more, "model_type": family, "tie_word_embeddings": tied}
    config = AutoConfig.for_model(**given)
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config).state_dict()
    if tied:
        del built["lm_head.weight"]
    model = model_of(config.to_dict())
    assert model.parameters == sum(tensor.numel() for tensor in built.values())
    planned = {
        name for each in held(Shape.parse("tp1", ""), config.to_dict()).values() for name, _ in each
    }
    apart = (".experts.", "block_sparse_moe.")  # transformers stacks experts
    assert {n for n in planned if not any(word in n for word in apart)} == {
        n for n in built if ".experts." not in n and not (family == "mixtral" and ".mlp." in n)
    }


@pytest.mark.parametrize("sizes", [(2, 2, 2, 2), (1, 4, 2, 1), (2, 1, 4, 4), (2, 2, 1, 1)])
@pytest.mark.parametrize("tied", [False, True])
def test_a_trainer_has_the_boxes_of_megatron(sizes: tuple[int, ...], tied: bool) -> None:
    for family in ("llama", "qwen2", "qwen3", "qwen3_moe"):
        tensor, pipeline, data, expert = sizes if "moe" in family else (*sizes[:3], 1)
        given = {**SMALL, "model_type": family, "tie_word_embeddings": tied}
        given |= EXPERTS if "moe" in family else {}
        text = f"tp{tensor}pp{pipeline}dp{data}" + f"ep{expert}" * (expert > 1)
        found = held(Shape.parse(text, "--trainer"), given)
        table = Table(Architecture.of(given, "m"), "separate")
        spread = Sizes(tensor, pipeline, data, expert)
        for rank in range(tensor * pipeline * data):
            pieces = table.pieces(spread.coordinates(rank))
            assert found[rank] == {(piece.name, piece.box) for piece in pieces}, (text, rank)


@pytest.mark.parametrize("sizes", [(1, 3, 1), (2, 5, 1), (1, 2, 2), (2, 3, 4)])
def test_a_trainer_has_the_boxes_of_fsdp(sizes: tuple[int, int, int]) -> None:
    copies, shards, tensor = sizes
    given = {**SMALL, "model_type": "llama", "num_key_value_heads": 4}
    found = held(Shape.parse(f"dp{copies}fsdp{shards}tp{tensor}", "--trainer"), given)
    tensors = [each for each in model_of(given).tensors if each.units]  # no padded vocabulary
    for rank in range(math.prod(sizes)):
        at = (rank // tensor // shards, rank // tensor % shards, rank % tensor)
        for name, shape, cut, *_ in tensors:
            first = Shard(0) if cut != 0 or tensor == 1 else _StridedShard(0, split_factor=tensor)
            placements = [Replicate(), first, Replicate() if cut is None else Shard(cut)]
            boxes = [box for box, _ in held_boxes(shape, placements, sizes, at)]
            single = name.format(0)
            assert [box for n, box in found[rank] if n == single] == boxes
