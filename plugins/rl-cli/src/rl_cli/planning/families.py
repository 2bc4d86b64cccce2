"""The tensors of each family of models, and how tensor parallelism cuts them.

The names are those of checkpoints with separate experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from rl_core.errors import ConfigError

__all__ = ["FAMILIES", "Tensors"]

#: Reads a value of a configuration by its key; where it is absent, a default or an error.
Read: TypeAlias = Callable[..., Any]


class Tensors(NamedTuple):
    """Tensors of one shape: one of each layer or of each expert of each layer, or a single one.

    Attributes:
        name: In the checkpoint, with ``{}`` for the number of the layer and of the expert.
        shape: Of each.
        cut: The dimension that tensor parallelism cuts; None where each rank has all of it.
        units: Equal parts, such as heads, which are not cut; 0 for rows of a vocabulary, to which
            padding is added.
        layers: The first layer and the one after the last; for a single tensor, the layer next
            to which it is.
        experts: Of each layer; 0 for tensors of no expert.
        repeats: Where there are fewer units than ranks, neighbours have the same one.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None
    units: int
    layers: tuple[int, int]
    experts: int = 0
    repeats: bool = False


def matrix(
    read: Read, name: str, shape: tuple[int, int], cut: int | None, units: int, bias: bool = False
) -> Iterator[Tensors]:
    """A matrix of each layer, whose bias is cut as its rows are."""
    layers = (0, read("num_hidden_layers"))
    yield Tensors(f"{name}.weight", shape, cut, units, layers)
    if bias:
        yield Tensors(f"{name}.bias", shape[:1], None if cut else cut, units, layers)


def vector(read: Read, name: str, size: int) -> Tensors:
    """A vector of each layer, which every rank has."""
    return Tensors(name, (size,), None, 1, (0, read("num_hidden_layers")))


def norms(read: Read) -> Iterator[Tensors]:
    """The norms before attention and before what follows it."""
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield vector(read, f"{name}.weight", read("hidden_size"))


def attention(read: Read, *, head_norm: bool = False, qkv_bias: bool = False) -> Iterator[Tensors]:
    """Attention, cut by heads; ranks have the same keys where these have fewer heads."""
    hidden, heads = read("hidden_size"), read("num_attention_heads")
    groups, head = read("num_key_value_heads", heads), read("head_dim", hidden // heads)
    bias = read("attention_bias", False)
    for letter, units in (("q", heads), ("k", groups), ("v", groups)):
        shape = (units * head, hidden)
        biased = qkv_bias or bias
        for each in matrix(read, f"self_attn.{letter}_proj", shape, 0, units, biased):
            yield each._replace(repeats=letter != "q")
    yield from matrix(read, "self_attn.o_proj", (hidden, heads * head), 1, heads, bias)
    for letter in "qk" if head_norm else "":
        yield vector(read, f"self_attn.{letter}_norm.weight", head)


def latent_attention(read: Read) -> Iterator[Tensors]:
    """MLA: what leads out of a latent is cut by heads, what leads into it is on every rank."""
    hidden, heads, latent = read("hidden_size"), read("num_attention_heads"), read("kv_lora_rank")
    nope, rope, value = (
        read(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    width = heads * (nope + rope)
    if rank := read("q_lora_rank", 0):
        yield from matrix(read, "self_attn.q_a_proj", (rank, hidden), None, 1)
        yield vector(read, "self_attn.q_a_layernorm.weight", rank)
        yield from matrix(read, "self_attn.q_b_proj", (width, rank), 0, heads)
    else:
        yield from matrix(read, "self_attn.q_proj", (width, hidden), 0, heads)
    yield from matrix(read, "self_attn.kv_a_proj_with_mqa", (latent + rope, hidden), None, 1)
    yield vector(read, "self_attn.kv_a_layernorm.weight", latent)
    up = (heads * (nope + value), latent)
    yield from matrix(read, "self_attn.kv_b_proj", up, 0, heads)
    yield from matrix(read, "self_attn.o_proj", (hidden, heads * value), 1, heads)


def mlp(
    read: Read,
    width: int | None = None,
    prefix: str = "mlp",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Tensors]:
    """An MLP, cut by its inner features."""
    hidden, width = read("hidden_size"), width or read("intermediate_size")
    bias = read("mlp_bias", False)
    gate, up, down = (f"{prefix}.{name}" for name in names)
    yield from matrix(read, gate, (width, hidden), 0, width, bias)
    yield from matrix(read, up, (width, hidden), 0, width, bias)
    yield from matrix(read, down, (hidden, width), 1, width, bias)


def experts(read: Read, count: int, router: str, one: Iterator[Tensors]) -> Iterator[Tensors]:
    """A router, and an MLP of each expert."""
    yield from matrix(read, router, (count, read("hidden_size")), None, 1)
    for each in one:
        yield each._replace(experts=count)


def qwen3_moe(read: Read) -> Iterator[Tensors]:
    """Experts in every layer."""
    if read("decoder_sparse_step", 1) != 1 or read("mlp_only_layers", []):
        raise ConfigError(
            "--model: decoder_sparse_step or mlp_only_layers leaves layers without experts, which "
            "the planner does not know",
            fix="use a model with experts in every layer",
            key="--model",
        )
    each = mlp(read, read("moe_intermediate_size"), "mlp.experts.{}")
    count = read("num_experts", 0) or read("num_local_experts")  # transformers 5 writes the latter
    yield from experts(read, count, "mlp.gate", each)


def mixtral(read: Read) -> Iterator[Tensors]:
    """Experts in every layer, under the names of Mixtral's checkpoints."""
    each = mlp(read, None, "block_sparse_moe.experts.{}", ("w1", "w3", "w2"))
    yield from experts(read, read("num_local_experts"), "block_sparse_moe.gate", each)


def deepseek(read: Read) -> Iterator[Tensors]:
    """Layers with an MLP, then layers with experts, of which some are for every token."""
    dense, layers = read("first_k_dense_replace", 0), read("num_hidden_layers")
    for each in mlp(read):
        yield each._replace(layers=(0, dense))
    width, count = read("moe_intermediate_size"), read("n_routed_experts")
    sparse = [*experts(read, count, "mlp.gate", mlp(read, width, "mlp.experts.{}"))]
    if read("topk_method", "noaux_tc") == "noaux_tc":
        sparse.append(vector(read, "mlp.gate.e_score_correction_bias", count))
    if shared := read("n_shared_experts", 0):
        sparse += mlp(read, width * shared, "mlp.shared_experts")
    for each in sparse:
        yield each._replace(layers=(dense, layers))


#: By ``model_type``, what gives the tensors of its layers.
FAMILIES: dict[str, tuple[Callable[[Read], Iterator[Tensors]], ...]] = {
    "llama": (norms, attention, mlp),
    "qwen2": (norms, partial(attention, qkv_bias=True), mlp),
    "qwen3": (norms, partial(attention, head_norm=True), mlp),
    "qwen3_moe": (norms, partial(attention, head_norm=True), qwen3_moe),
    "mixtral": (norms, attention, mixtral),
    "deepseek_v3": (norms, latent_attention, deepseek),
    "kimi_k2": (norms, latent_attention, deepseek),
}
