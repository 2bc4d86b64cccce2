"""The boxes of shapes, against arrays that are cut in other ways; and the size of large plans."""

from __future__ import annotations

import tracemalloc
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_cli.planning import Devices, Links, Shape, model_of, moves_of, predict
from rl_core.errors import ConfigError

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 19,
}
BIASED = LLAMA | {"attention_bias": True, "mlp_bias": True}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "moe_intermediate_size": 4,
    "tie_word_embeddings": True,
}
LATENT = LLAMA | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 3,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 1,
    "v_head_dim": 3,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "moe_intermediate_size": 4,
    "first_k_dense_replace": 2,
}
KIMI = LATENT | {
    "model_type": "kimi_k2",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 1,
    "vocab_size": 163840,
}
ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "q_b_proj", "kv_b_proj")
COLUMNS = ("o_proj", "down_proj")


def expected(config: dict[str, Any], shape: Shape, rank: int) -> dict[str, set[int]]:
    """The elements of each tensor that a rank has, of the whole tensors of the model."""
    model, found = model_of(config), {}
    rest, t = divmod(rank, shape.tp)
    rest, f = divmod(rest, shape.fsdp)
    rest, d = divmod(rest, shape.dp)
    stage, dp_rank = rest % shape.pp, d * shape.tp * shape.fsdp + f * shape.tp + t
    first, after = (model.layers * n // shape.pp for n in (stage, stage + 1))
    for each in model.tensors:
        ids = np.arange(np.prod(each.shape)).reshape(each.shape)
        word = each.name.split(".")[-2]
        expert = ".experts." in each.name
        count, number = (shape.etp, dp_rank % shape.etp) if expert else (shape.tp, t)
        if "embed" in each.name or "lm_head" in each.name:
            rows = -(-each.shape[0] // (8 * count)) * 8
            ids = ids[number * rows : (number + 1) * rows]
        elif word in ("k_proj", "v_proj") and count > 2:
            ids = np.split(ids, 2)[number * 2 // count]
        elif word in ROWS:
            ids = np.split(ids, count)[number]
        elif word in COLUMNS and ids.ndim == 2:
            ids = np.split(ids, count, axis=-1)[number]
        if shape.fsdp > 1 and not expert:
            size = -(-len(ids) // shape.fsdp)
            ids = ids[f * size : (f + 1) * size]
        for layer in range(model.layers):
            single = "{}" not in each.name
            if not first <= layer < after or not each.layers[0] <= layer < each.layers[1]:
                tied = model.tied and "embed" in each.name and first <= layer < after
                if not (tied and after == model.layers and layer == after - 1):
                    continue
            for e in range(each.experts or 1):
                if expert and shape.fsdp > 1:
                    size = -(-each.experts // shape.fsdp)
                    if e // size != f:
                        continue
                elif expert and e // (each.experts // shape.ep) != dp_rank // shape.etp % shape.ep:
                    continue
                name = each.name if single else each.name.format(layer, e)
                if ids.size:
                    found[name] = {*ids.ravel().tolist()}
    return found


def actual(config: dict[str, Any], shape: Shape) -> dict[int, dict[str, set[int]]]:
    found: dict[int, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for stack in shape.stacks(model_of(config)):
        numbers = stack.name.count("{}")
        ids = np.arange(np.prod(stack.shape)).reshape(stack.shape)
        for box, ranks in stack.shards:
            inside = {*ids[tuple(slice(*each) for each in box[numbers:])].ravel().tolist()}
            for at in np.ndindex(*(after - first for first, after in box[:numbers])):
                place = [first + n for (first, _), n in zip(box, at, strict=False)]
                for rank in ranks:
                    found[rank][stack.name.format(*place)] |= inside
    return found


SHAPES = ["tp2", "tp4", "pp2", "pp5", "dp2", "tp2pp2dp2x2", "fsdp3", "fsdp5tp2", "fsdp2dp2", "x3"]
EXPERTS = ["ep2", "tp2ep3", "tp2ep2etp1", "tp2dp6ep3", "tp4ep3pp2x2"]


@pytest.mark.parametrize(
    ("config", "text"),
    [
        *((config, text) for config in (BIASED, MOE, LATENT) for text in SHAPES),
        *((config, text) for config in (MOE, LATENT) for text in EXPERTS),
    ],
)
def test_each_rank_has_what_arrays_that_are_cut_say(config: dict[str, Any], text: str) -> None:
    shape = Shape.parse(text, "--trainer")
    found = actual(config, shape)
    for rank in range(shape.ranks):
        assert found[rank] == expected(config, shape, rank), rank


@settings(deadline=None)
@given(st.sampled_from([MOE, LATENT]), st.data())
def test_a_refit_between_any_shapes_gives_each_rank_what_it_keeps_once(
    config: dict[str, Any], data: st.DataObject
) -> None:
    trainer = Shape.parse(data.draw(st.sampled_from([*SHAPES, *EXPERTS])), "--trainer")
    texts = st.sampled_from([*SHAPES, "tp2ep2x2", "tp2dp3ep6", "tp4pp2ep2"])
    engine = Shape.parse(data.draw(texts), "--engine", whole_experts=True)
    first, per_host = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 8))
    devices = Devices(range(trainer.ranks), range(first, first + engine.ranks), per_host)
    model, got = model_of(config), Counter[tuple[int, str, int]]()
    has = actual(config, trainer)
    pairs = [0] * (trainer.ranks * engine.ranks)
    for move in moves_of(trainer.stacks(model), engine.stacks(model), devices):
        numbers = move.stack.name.count("{}")
        ids = np.arange(np.prod(move.stack.shape)).reshape(move.stack.shape)
        inside = ids[tuple(slice(*each) for each in move.box[numbers:])].ravel().tolist()
        for at in np.ndindex(*(after - begin for begin, after in move.box[:numbers])):
            place = [begin + n for (begin, _), n in zip(move.box, at, strict=False)]
            name = move.stack.name.format(*place)
            assert {*inside} <= has[move.source][name]
            for sink in move.sinks:
                pairs[move.source * engine.ranks + sink] += 2 * len(inside)
                got.update((sink, name, element) for element in inside)
    assert got == Counter(
        (rank, name, element)
        for rank, tensors in actual(config, engine).items()
        for name, all_ in tensors.items()
        for element in all_
    )
    found = predict(model, trainer, engine, devices, Links())
    assert [*found.pairs] == pairs
    assert found.facts()["received_over_kept"] == 1


@pytest.mark.full
@pytest.mark.slow
def test_one_trillion_parameters_on_1024_and_256_ranks_are_a_small_plan() -> None:
    model = model_of(KIMI)
    assert 1.0e12 < model.parameters < 1.05e12
    trainer = Shape.parse("pp16ep64", "--trainer")
    engine = Shape.parse("tp16ep16x16", "--engine", whole_experts=True)
    assert (trainer.ranks, engine.ranks) == (1024, 256)
    tracemalloc.start()
    try:
        found = predict(model, trainer, engine, Devices(range(1024), range(1024, 1280), 8), Links())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found.moves < 200_000
    assert peak < 100e6
    assert found.facts()["received_over_kept"] == 1


def test_the_busiest_rank_and_the_broadcast() -> None:
    model = model_of(LLAMA)
    trainer, engine = Shape.parse("fsdp2", "--trainer"), Shape.parse("x2", "--engine")
    far = predict(model, trainer, engine, Devices(range(2), range(2, 4), 2), Links(8, 4))
    facts = far.facts()
    assert far.received[0].between == far.received[1].between == model.nbytes
    assert facts["lower_bound_s"] == (far.pairs[0] + far.pairs[1]) / 4e9 > model.nbytes / 4e9
    # Rank 0 lacks what rank 1 has, on its host; the engines' host gets all tensors once.
    assert far.gathered.within == far.received[1].between - far.pairs[0]
    assert facts["gather_and_broadcast"] == {
        "bytes_between_hosts": model.nbytes,
        "received_over_kept": 1,
        "lower_bound_s": model.nbytes / 4e9,
    }
    near = predict(model, trainer, engine, Devices(range(2), range(2), 2), Links(8, 4))
    assert near.sent[0].device == near.pairs[0]
    assert near.facts()["lower_bound_s"] == max(near.pairs[1], near.pairs[2]) / 8e9
    assert near.facts()["bytes_between_hosts"] == 0
    assert near.facts()["gather_and_broadcast"]["lower_bound_s"] == model.nbytes / 8e9
    apart = predict(model, trainer, engine, Devices(range(2), range(2, 4), 1), Links(8, 4))
    between = apart.facts()["gather_and_broadcast"]["bytes_between_hosts"]
    assert between == apart.gathered.between + 2 * model.nbytes > 2 * model.nbytes


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        (LLAMA, "tp3", "tp 3 does not divide the 4 parts of model.layers.{}.self_attn.q_proj"),
        (LLAMA, "pp6", "pp 6 is more than the 5 layers"),
        (LLAMA, "ep2", "ep 2 is more than the 0 experts"),
        (MOE, "ep6etp3", "etp 3 does not divide the 4 parts of model.layers.{}.mlp.experts"),
    ],
)
def test_shapes_that_do_not_fit_a_model(config: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        [*Shape.parse(text, "--engine").stacks(model_of(config))]
    assert f"--engine: {text!r} does not fit the model: {message}" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no shape"),
        ("tp0", "is no shape"),
        ("tp2,pp2", "is no shape"),
        ("tp2tp2", "has a size twice"),
        ("fsdp2ep2", "has both fsdp and ep"),
        ("tp2etp2", "has etp without ep"),
        ("dp3ep2", "has 3 ranks in a stage, which ep 2 x etp 1 does not divide"),
        ("tp8x1000000000", "has 8,000,000,000 ranks; at most 16,384 can be planned"),
        ("ep32dp32768", "has 32,768 ranks; at most 16,384 can be planned"),
    ],
)
def test_shapes_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Shape.parse(text, "--trainer")
    assert f"--trainer: {text!r} {message}" in str(caught.value)
    assert "tp8pp8dp2" in str(caught.value.fix)


def test_experts_need_as_many_copies_unless_dp_says_otherwise() -> None:
    assert Shape.parse("tp2ep4", "--trainer").dp == 4
    assert Shape.parse("tp2ep4", "--engine", whole_experts=True).dp == 2
    assert Shape.parse("tp8ep8", "--engine", whole_experts=True).ranks == 8
