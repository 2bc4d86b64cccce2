"""The table of pieces, against whole tensors laid out by formulas of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from rl_backends.changes import WeightChanges
from rl_core.errors import RefitError
from rl_megatron.architectures import FAMILIES, Architecture
from rl_megatron.sizes import Sizes
from rl_megatron.source import MegatronSource, RankTensors
from rl_megatron.table import Table, padded_vocabulary
from rl_megatron.weights import owned_pieces

Tensors = dict[str, torch.Tensor]


@st.composite
def spreads(draw: st.DrawFn) -> tuple[Architecture, Sizes]:
    """A model, and ranks that it can be dealt to."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    tensor, pipeline = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    expert = draw(st.sampled_from([1, 2])) if family == "qwen3_moe" else 1
    data = expert * draw(st.sampled_from([1, 2]))
    biased = family == "llama" and draw(st.booleans())
    groups = tensor * draw(st.sampled_from([1, 2]))
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": pipeline * draw(st.sampled_from([1, 2])),
        "num_attention_heads": groups * draw(st.sampled_from([1, 2, 3])),
        "num_key_value_heads": groups,
        "head_dim": draw(st.sampled_from([2, 4])),
        "intermediate_size": tensor * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 60)),
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": biased,
        "mlp_bias": biased,
    }
    # transformers wants a multiple of the heads, whatever head_dim says.
    config["hidden_size"] = config["num_attention_heads"] * tensor
    if family == "qwen3_moe":
        config |= {
            "num_experts": expert * draw(st.sampled_from([1, 2])),
            "num_experts_per_tok": 1,
            "moe_intermediate_size": config["intermediate_size"],
        }
    return Architecture.of(config, "m"), Sizes(tensor, pipeline, data, expert)


def numbered(shapes: dict[str, tuple[int, ...]]) -> Tensors:
    """Tensors in which no number stands twice."""
    made, start = {}, 1
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = torch.arange(start, start + count).reshape(shape)
        start += count
    return made


def checkpoint(a: Architecture) -> Tensors:
    """Whole tensors, with experts apart, of shapes that do not come from the table."""
    q, kv, h = a.heads * a.head, a.groups * a.head, a.hidden
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (a.vocabulary, h)}
    for layer in range(a.layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = (h,)
        shapes[at + "post_attention_layernorm.weight"] = (h,)
        for letter, size in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{at}self_attn.{letter}_proj.weight"] = (size, h)
            if a.qkv_bias:
                shapes[f"{at}self_attn.{letter}_proj.bias"] = (size,)
        shapes[at + "self_attn.o_proj.weight"] = (h, q)
        if a.head_norm:
            shapes |= {f"{at}self_attn.{letter}_norm.weight": (a.head,) for letter in "qk"}
        if a.linear_bias:
            shapes[at + "self_attn.o_proj.bias"] = shapes[at + "mlp.down_proj.bias"] = (h,)
            shapes |= {f"{at}mlp.{part}_proj.bias": (a.ffn,) for part in ("gate", "up")}
        for mlp in [f"experts.{e}." for e in range(a.experts)] or [""]:
            shapes |= {f"{at}mlp.{mlp}{part}_proj.weight": (a.ffn, h) for part in ("gate", "up")}
            shapes[f"{at}mlp.{mlp}down_proj.weight"] = (h, a.ffn)
        if a.experts:
            shapes[at + "mlp.gate.weight"] = (a.experts, h)
    shapes["model.norm.weight"] = (h,)
    if not a.tied:
        shapes["lm_head.weight"] = (a.vocabulary, h)
    return numbered(shapes)


def stacked(a: Architecture, whole: Tensors) -> Tensors:
    """The same, with all experts of a layer in two tensors."""
    made = {name: tensor for name, tensor in whole.items() if ".experts." not in name}
    for layer in range(a.layers if a.experts else 0):
        at = f"model.layers.{layer}.mlp.experts."
        each = [
            [whole[f"{at}{e}.{p}_proj.weight"] for p in ("gate", "up", "down")]
            for e in range(a.experts)
        ]
        made[at + "gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in each])
        made[at + "down_proj"] = torch.stack([down for _, _, down in each])
    return made


def megatron(a: Architecture, sizes: Sizes, rank: int, whole: Tensors) -> Tensors:
    """The parameters of a rank: neighbours share tensors, then come copies, then stages."""
    tp, stage = rank % sizes.tensor, rank // sizes.tensor // sizes.data
    expert = rank // sizes.tensor % sizes.data % sizes.expert
    made: Tensors = {}

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(sizes.tensor)[tp]

    def columns(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.chunk(sizes.tensor, 1)[tp]

    def tokens(tensor: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(
            padded_vocabulary(a.vocabulary, sizes.tensor), a.hidden, dtype=torch.int64
        )
        padded[: a.vocabulary] = tensor
        return rows(padded)

    def mlp(source: str, target: str, kind: str) -> None:
        gate, up = (rows(whole[f"{source}{part}_proj.{kind}"]) for part in ("gate", "up"))
        made[f"{target}linear_fc1.{kind}"] = torch.cat([gate, up])
        down = whole[f"{source}down_proj.{kind}"]
        made[f"{target}linear_fc2.{kind}"] = columns(down) if kind == "weight" else down

    if stage == 0:
        made["embedding.word_embeddings.weight"] = tokens(whole["model.embed_tokens.weight"])
    each = a.layers // sizes.pipeline
    for local in range(each):
        source = f"model.layers.{stage * each + local}."
        target = f"decoder.layers.{local}."
        made[target + "input_layernorm.weight"] = whole[source + "input_layernorm.weight"]
        made[target + "pre_mlp_layernorm.weight"] = whole[
            source + "post_attention_layernorm.weight"
        ]
        for kind in ("weight", "bias") if a.qkv_bias else ("weight",):
            heads = [whole[f"{source}self_attn.{x}_proj.{kind}"].chunk(a.groups) for x in "qkv"]
            groups = [torch.cat(group) for group in zip(*heads, strict=True)]
            made[f"{target}self_attention.linear_qkv.{kind}"] = rows(torch.cat(groups))
        output = whole[source + "self_attn.o_proj.weight"]
        made[target + "self_attention.linear_proj.weight"] = columns(output)
        for letter in "qk" if a.head_norm else "":
            norm = whole[f"{source}self_attn.{letter}_norm.weight"]
            made[f"{target}self_attention.{letter}_layernorm.weight"] = norm
        if a.experts:
            made[target + "mlp.router.weight"] = whole[source + "mlp.gate.weight"]
            here = a.experts // sizes.expert
            for e in range(here):
                experts = f"{target}mlp.experts.local_experts.{e}."
                mlp(f"{source}mlp.experts.{here * expert + e}.", experts, "weight")
            continue
        mlp(source + "mlp.", target + "mlp.", "weight")
        if a.linear_bias:
            mlp(source + "mlp.", target + "mlp.", "bias")
            bias = whole[source + "self_attn.o_proj.bias"]
            made[target + "self_attention.linear_proj.bias"] = bias
    if stage == sizes.pipeline - 1:
        made["decoder.final_layernorm.weight"] = whole["model.norm.weight"]
        if not a.tied or stage:
            output = "model.embed_tokens.weight" if a.tied else "lm_head.weight"
            made["output_layer.weight"] = tokens(whole[output])
    return made


@settings(max_examples=25, deadline=None)
@given(spreads())
def test_pieces_are_where_megatron_has_them_and_each_element_is_sent_once(spread):
    architecture, sizes = spread
    apart = checkpoint(architecture)
    for kind, whole in (("separate", apart), ("stacked", stacked(architecture, apart))):
        table = Table(architecture, kind)
        assert table.shapes() == {name: tuple(whole[name].shape) for name in table.shapes()}
        assert set(table.shapes()) == set(whole)
        sent = {
            name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()
        }
        for rank in range(sizes.world):
            at = sizes.coordinates(rank)
            assert at.rank == rank
            parameters = megatron(architecture, sizes, rank, apart)
            filled = {name: torch.zeros_like(tensor) for name, tensor in parameters.items()}
            for piece in table.pieces(at):
                name = next(name for name in piece.parameter if name in parameters)
                box = whole[piece.name][piece.index]
                assert piece.read(parameters[name]).equal(box), (rank, piece)
                piece.write(filled[name], box)
                assert piece.read(filled[name]).equal(box)
                if piece.sends:
                    sent[piece.name][piece.index] += 1
            for name, tensor in parameters.items():
                assert filled[name].equal(tensor), (rank, name)
            unfilled = {name for name, tensor in parameters.items() if not tensor.any()}
            assert unfilled <= table.padding(at)
        assert all(bool((count == 1).all()) for count in sent.values())


class _Model(torch.nn.Module):
    """One rank's parameters, each in memory of its own."""

    def __init__(self, parameters: Tensors) -> None:
        super().__init__()
        self.all = {
            name: torch.nn.Parameter(tensor.contiguous().clone(), requires_grad=False)
            for name, tensor in parameters.items()
        }

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return iter(self.all.items())


@settings(max_examples=25, deadline=None)
@given(spreads())
def test_what_all_ranks_give_to_refits_is_the_whole_and_lies_in_their_parameters(spread):
    architecture, sizes = spread
    apart = checkpoint(architecture)
    for kind, whole in (("separate", apart), ("stacked", stacked(architecture, apart))):
        table = Table(architecture, kind)
        total = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
        described = []
        for rank in range(sizes.world):
            model = _Model(megatron(architecture, sizes, rank, apart))
            owned = owned_pieces(table, sizes.coordinates(rank), model)
            source = MegatronSource(RankTensors.of(table, owned), WeightChanges())
            described.append(source.specs())
            memory = {each.untyped_storage().data_ptr() for each in model.all.values()}
            here = {name: torch.zeros_like(tensor) for name, tensor in whole.items()}
            for name, box, tensor in source.pieces():
                index = tuple(slice(*ends) for ends in box)
                assert tensor.equal(whole[name][index]), (rank, name, box)
                assert tensor.untyped_storage().data_ptr() in memory
                here[name][index] += 1
            for name, count in here.items():
                assert int(count.max()) <= 1, f"rank {rank} gives elements of {name} twice"
                total[name] += count
                if bool(count.all()):
                    assert next(source.tensors([name]))[1].equal(whole[name])
                else:
                    with pytest.raises(RefitError, match="others have parts"):
                        next(source.tensors([name]))
        assert all(bool((count >= 1).all()) for count in total.values())
        assert all(specs == described[0] for specs in described)
        aliases = {s.name: s.alias_of for s in described[0] if s.alias_of}
        assert aliases == ({table.tied[1]: table.tied[0]} if table.tied else {})
        shapes = {s.name: s.shape for s in described[0] if not s.alias_of}
        assert shapes == {name: tuple(tensor.shape) for name, tensor in whole.items()}


@settings(max_examples=25, deadline=None)
@given(spreads())
def test_a_parameter_counts_as_a_whole_and_every_element_once(spread):
    """The norm of all gradients is a sum over parameters that a rank sends."""
    architecture, sizes = spread
    total = sum(tensor.numel() for tensor in checkpoint(architecture).values())
    for kind in ("separate", "stacked"):
        table, counted = Table(architecture, kind), 0
        for rank in range(sizes.world):
            flags: dict[tuple[str, ...], set[bool]] = {}
            for piece in table.pieces(sizes.coordinates(rank)):
                flags.setdefault(piece.parameter, set()).add(piece.sends)
                counted += torch.Size(piece.sizes).numel() * piece.sends
            assert all(len(each) == 1 for each in flags.values())
        assert counted == total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"head_dim": 24}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 24}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 40}),
    ],
    ids=str,
)
def test_names_and_shapes_are_those_of_transformers(family, more, tied):
    config = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 101,
        "tie_word_embeddings": tied,
        **more,
    }
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **config))
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    table = Table(Architecture.of({"model_type": family, **config}, "m"))
    if tied:
        assert table.tied is not None
        embedding, output = table.tied
        assert expected.pop(output) == expected[embedding]
    assert table.shapes() == expected


@pytest.mark.parametrize("vocabulary", [1, 7, 8, 9, 269, 151_936])
@pytest.mark.parametrize("tensor", [1, 2, 3, 8])
def test_ranks_have_equal_numbers_of_rows_that_are_a_multiple_of_8(vocabulary, tensor):
    padded = padded_vocabulary(vocabulary, tensor)
    assert padded % (8 * tensor) == 0
    assert vocabulary <= padded < vocabulary + 8 * tensor
