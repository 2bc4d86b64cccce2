"""What the model of a checkpoint looks like, and which models megatron-core can build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["FAMILIES", "Architecture"]

#: By ``model_type``, the class of transformers that reads its configuration, and whether each head
#: of queries and keys has a norm.
FAMILIES: dict[str, tuple[str, bool]] = {
    "llama": ("LlamaConfig", False),
    "qwen2": ("Qwen2Config", False),
    "qwen3": ("Qwen3Config", True),
    "qwen3_moe": ("Qwen3MoeConfig", True),
}
#: Kinds of rotary embeddings with frequencies that do not depend on the length of a row.
_ROPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a model.

    Attributes:
        layers: Transformer layers.
        hidden: Features between layers.
        heads: Of queries.
        groups: Heads of keys and values.
        head: Features of a head.
        ffn: Features of an MLP, of an expert if there are any.
        vocabulary: Tokens.
        context: Most tokens of a row.
        epsilon: Of the norms.
        tied: Whether the embedding is the output layer, too.
        qkv_bias: Whether queries, keys and values have biases.
        linear_bias: Whether all other matrices have, too.
        head_norm: Whether heads of queries and keys have norms.
        attention_dropout: Share of attention weights that training drops.
        experts: Of each layer; 0 where it has one MLP.
        experts_per_token: Experts that a token goes to.
        normalised_experts: Whether the weights of a token's experts add up to 1.
        config: The configuration that transformers reads.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    ffn: int
    vocabulary: int
    context: int
    epsilon: float
    tied: bool
    qkv_bias: bool
    linear_bias: bool
    head_norm: bool
    attention_dropout: float
    experts: int
    experts_per_token: int
    normalised_experts: bool
    config: transformers.PreTrainedConfig

    @classmethod
    def of(cls, settings: Mapping[str, Any], name: str, family: str | None = None) -> Architecture:
        """Reads a ``config.json``.

        Args:
            settings: Its contents.
            name: The model's, for errors.
            family: One of :data:`FAMILIES`; None: that of its ``model_type``.

        Raises:
            ConfigError: No mapping is known for the architecture.
            CapabilityError: The model has something that is not implemented; names it.
        """
        kind = family or settings.get("model_type", "")
        if kind not in FAMILIES:
            raise ConfigError(
                f"{name} has the architecture {kind!r}; rl-megatron supports {', '.join(FAMILIES)}",
                fix="use another policy backend; or set architecture to a supported one that has "
                "the same layers and tensor names",
                key="architecture" if family else "model_name",
            )
        class_name, head_norm = FAMILIES[kind]
        reader = getattr(transformers, class_name)
        config = reader(**{k: v for k, v in settings.items() if k != "model_type"})
        attention, mlp = (bool(getattr(config, k, False)) for k in ("attention_bias", "mlp_bias"))
        experts = int(getattr(config, "num_experts", 0) or 0)
        kinds = set(getattr(config, "layer_types", None) or ())
        windows = kinds - {"full_attention"} if kinds else getattr(config, "sliding_window", None)
        unable = [
            (attention != mlp, "biases in attention but not in the MLP, or the reverse"),
            (config.hidden_act != "silu", f"the activation {config.hidden_act}"),
            (windows, "layers with a sliding window"),
            (_rope(config)["rope_type"] not in _ROPES, f"{_rope(config)['rope_type']} positions"),
            (
                (_rope(config).get("partial_rotary_factor") or 1.0) != 1.0,
                "rotary positions in only a part of each head",
            ),
            (
                bool(experts) and (bool(config.mlp_only_layers) or config.decoder_sparse_step != 1),
                "both layers with experts and layers without",
            ),
            (
                bool(experts) and config.num_experts_per_tok == 1 and config.norm_topk_prob,
                "one expert for each token with normalised weights, which are always 1",
            ),
        ]
        if missing := [what for found, what in unable if found]:
            raise CapabilityError(
                f"{name} has {'; '.join(missing)}: rl-megatron does not support this",
                fix="use another policy backend for this model",
                key="model_name",
            )
        heads = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            heads=heads,
            groups=config.num_key_value_heads,
            head=getattr(config, "head_dim", None) or config.hidden_size // heads,
            ffn=config.moe_intermediate_size if experts else config.intermediate_size,
            vocabulary=config.vocab_size,
            context=config.max_position_embeddings,
            epsilon=config.rms_norm_eps,
            tied=bool(config.tie_word_embeddings),
            qkv_bias=kind == "qwen2" or attention,
            linear_bias=mlp,
            head_norm=head_norm,
            attention_dropout=float(config.attention_dropout or 0.0),
            experts=experts,
            experts_per_token=config.num_experts_per_tok if experts else 0,
            normalised_experts=bool(experts and config.norm_topk_prob),
            config=config,
        )

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """``[head / 2]`` float32 rotary frequencies, and what rotated heads are multiplied by."""
        rope = _rope(self.config)
        if rope["rope_type"] == "default":
            import torch

            steps = torch.arange(0, self.head, 2, dtype=torch.float32) / self.head
            return 1.0 / rope["rope_theta"] ** steps, 1.0
        frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](self.config, "cpu")
        return frequencies.float(), float(factor)


def _rope(config: Any) -> dict[str, Any]:
    return {"rope_type": "default", **(config.rope_parameters or {})}
