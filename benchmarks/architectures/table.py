"""Architectures that engines are tried with, each as a tiny configuration.

A name is a ``model_type`` of transformers, or such a type and what is special about this one. What
is not said here is as in :func:`rl_conformance.models.make_tiny_model`: two layers of width 128,
four heads, two with keys and values. Some keys are there for engines alone, which read them in the
published checkpoints.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rl_conformance.models import FAMILIES, make_tiny_model
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ARCHITECTURES", "choose", "make_architecture"]

_TIED = {"tie_word_embeddings": True}
_HEADS = {"num_key_value_heads": 4}
_HEAD_DIM = {"head_dim": 32}
#: Attention over latents; the sizes are those that kernels want.
_LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    **_HEADS,
}
#: Positions as DeepSeek's and Kimi's published checkpoints have them, for a context of 256.
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
}
#: Published ones have how many layers apart those with experts are, for engines alone.
_DEEPSEEK = {**_LATENT, **_YARN, "moe_layer_freq": 1}
_WIDTH = {"moe_intermediate_size": 32}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, **_WIDTH}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, **_WIDTH}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}
#: For engines, which make a bias for the choice of experts only then.
_BIASED_ROUTES = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_NO_EXPERTS = {**_ROUTED, **_ONE_GROUP, "first_k_dense_replace": 2}
_ALL_EXPERTS = {**_ROUTED, **_ONE_GROUP, "first_k_dense_replace": 1}
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
}
#: Published checkpoints have 0.001, which transformers takes for a lower limit.
_ANY_TIME_STEP = {"time_step_min": 1e-9}
_NEMOTRON_H = {
    "hybrid_override_pattern": "M*",
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 1,
    "ssm_state_size": 16,
    **_HEAD_DIM,
}
_ZAMBA2 = {
    "layers_block_type": ["mamba", "hybrid"],
    "n_mamba_heads": 8,
    "mamba_headdim": 32,
    "mamba_ngroups": 1,
    "num_mem_blocks": 1,
    "attention_hidden_size": 256,
    "attention_head_dim": 64,
    **_HEADS,
    **_TIED,
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    **_HEAD_DIM,
}
#: What vLLM's kernels for CPUs want; and no choice of experts, which rounding would change. With
#: smaller weights, rounding does not hide what is wrong.
_LINEAR_BFLOAT16 = {
    **_LINEAR,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "dtype": "bfloat16",
    "weight_scale": 1.5,
}
_EVERY_EXPERT = {**_EXPERTS, "num_experts_per_tok": 4}
_MIXED = {"layer_types": ["linear_attention", "full_attention"]}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}

#: The key for the class that published checkpoints name where transformers writes another name.
_CLASS = "published_class"

#: Configurations by name, in the order of the alphabet.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "afmoe": {
        **_EXPERTS,
        **_HEAD_DIM,
        **_ONE_GROUP,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.826,
        "mup_enabled": True,
    },
    "apertus": {},
    "arcee": {},
    "bamba": {**_MAMBA2, "attn_layer_indices": [1]},
    "biogpt": {**_HEADS, **_TIED},
    "bitnet": {},
    "bloom": {**_HEADS, **_TIED},
    "codegen": {"n_ctx": 256, "rotary_dim": 16, **_HEADS},
    "cohere": {"logit_scale": 1.0, **_TIED},
    "cohere2": {"logit_scale": 1.0, **_TIED},
    "cohere2_moe": {"logit_scale": 1.0, **_EXPERTS, **_TIED, **_HEAD_DIM},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": None, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {**_DEEPSEEK, **_NO_EXPERTS, "q_lora_rank": None, "head_dim": 64},
    "deepseek_v2 with experts": {
        **_DEEPSEEK,
        **_ALL_EXPERTS,
        "q_lora_rank": None,
        "head_dim": 64,
        "scoring_func": "softmax",
    },
    "deepseek_v3": {**_DEEPSEEK, **_NO_EXPERTS, **_BIASED_ROUTES, "q_lora_rank": 64},
    "deepseek_v3 with experts": {
        **_DEEPSEEK,
        **_ALL_EXPERTS,
        **_BIASED_ROUTES,
        "q_lora_rank": 64,
    },
    "diffllama": {},
    "dots1": {**_ALL_EXPERTS, **_HEAD_DIM},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, **_WIDTH},
    "exaone4": {},
    "exaone_moe": {
        **_EXPERTS,
        **_ONE_GROUP,
        "num_shared_experts": 1,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse"],
        **_SLIDING,
    },
    "falcon": _TIED,
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 256, **_HEAD_DIM},
    "falcon_mamba": {"state_size": 16},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "gemma": {**_HEAD_DIM, **_TIED},
    "gemma2": {**_HEAD_DIM, **_TIED, "hidden_act": "gelu_pytorch_tanh"},
    "gemma3": {
        **_HEAD_DIM,
        **_TIED,
        "image_token_id": 269,
        "vision_config": {
            "num_hidden_layers": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_attention_heads": 2,
            "image_size": 56,
            "patch_size": 14,
        },
        "mm_tokens_per_image": 4,
    },
    "gemma3_text": {**_HEAD_DIM, **_TIED},
    "gemma3n_text": {
        **_HEAD_DIM,
        **_TIED,
        "num_hidden_layers": 4,
        "intermediate_size": 256,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.0] * 4,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 272,
        "laurel_rank": 16,
    },
    "gemma4_text": {
        **_TIED,
        "head_dim": 32,
        "global_head_dim": 32,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": 272,
    },
    "glm": _HEAD_DIM,
    "glm4": _HEAD_DIM,
    "glm4_moe": {**_ALL_EXPERTS, **_HEAD_DIM},
    "glm4_moe_lite": {
        **_LATENT,
        **_ALL_EXPERTS,
        "q_lora_rank": 64,
        "mlp_layer_types": ["dense", "sparse"],
    },
    "gpt2": {**_HEADS, **_TIED},
    "gpt_bigcode": {"num_key_value_heads": 1, **_TIED},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, **_TIED},
    "gpt_neox": _HEADS,
    "gpt_oss": {
        **_LOCAL,
        **_HEAD_DIM,
        **_SLIDING,
    },
    "gptj": {"rotary_dim": 16, **_HEADS},
    "granite": {},
    "granitemoe": _LOCAL,
    "granitemoehybrid": {**_LOCAL, **_MAMBA2, "layer_types": ["mamba", "attention"]},
    "granitemoeshared": {**_LOCAL, "shared_intermediate_size": 64},
    "helium": _HEAD_DIM,
    "hunyuan_v1_dense": {**_HEAD_DIM, "use_qk_norm": True},
    "hunyuan_v1_moe": {
        "num_experts": 4,
        "moe_topk": 2,
        "moe_intermediate_size": 256,
        "use_qk_norm": True,
        **_HEAD_DIM,
    },
    "jais2": {},
    "jamba": {},
    "jetmoe": {**_LOCAL, "kv_channels": 32, "num_key_value_heads": 2},
    "laguna": {**_EXPERTS, **_HEAD_DIM, **_SLIDING},
    "lfm2": {
        **_TIED,
        "layer_types": ["conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_dim": 128,
        "block_dim": 128,
        "block_ff_dim": 128,
    },
    "lfm2_moe": {
        **_EXPERTS,
        **_TIED,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "llama": {},
    "llama4_text": {
        **_LOCAL,
        **_HEAD_DIM,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 256,
        "attention_chunk_size": 128,
        "layer_types": ["chunked_attention", "full_attention"],
        "no_rope_layers": [1, 0],
        "interleave_moe_layer_step": 2,
        "moe_layers": [1],
    },
    "longcat_flash": {
        **_LATENT,
        "q_lora_rank": 64,
        "num_layers": 2,
        "ffn_hidden_size": 64,
        "expert_ffn_hidden_size": 32,
        "n_routed_experts": 4,
        "zero_expert_num": 2,
        "zero_expert_type": "identity",
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "moe_topk": 2,
        "head_dim": 64,
    },
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 32, "n_groups": 1, "rms_norm": True},
    "mellum": {**_EXPERTS, **_HEAD_DIM, **_SLIDING},
    "mimo_v2_flash": {
        **_ROUTED,
        **_ONE_GROUP,
        **_BIASED_ROUTES,
        "head_dim": 32,
        "v_head_dim": 32,
        "hybrid_layer_pattern": [0, 1],
        "moe_layer_freq": [0, 1],
        "sliding_window_size": 64,
        "sliding_window": 64,
        "swa_head_dim": 32,
        "swa_v_head_dim": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False,
        "rope_theta": 5000000,
        "swa_rope_theta": 10000,
        "partial_rotary_factor": 0.334,
        "layernorm_epsilon": 1e-5,
        "rms_norm_eps": 1e-5,
    },
    "minicpm3": {
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        **_HEADS,
    },
    "minimax": {**_LOCAL, **_HEAD_DIM, **_MIXED, "block_size": 64},
    "minimax_m2": {
        **_LOCAL,
        **_HEAD_DIM,
        "intermediate_size": 64,
        "rotary_dim": 32,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "ministral": _HEAD_DIM,
    "ministral3": {},
    "mistral": {},
    "mixtral": _LOCAL,
    "mpt": {},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": _NEMOTRON_H,
    "nemotron_h with any time step": {**_NEMOTRON_H, **_ANY_TIME_STEP},
    "olmo": _HEADS,
    "olmo2": {},
    "olmo3": {},
    "olmo_hybrid": {**_LINEAR, **_MIXED},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, **_HEADS},
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 128, **_HEADS, **_TIED},
    "persimmon": _HEADS,
    "phi": {"intermediate_size": 512, **_HEADS},
    "phi3": {},
    "phimoe": {**_LOCAL, _CLASS: "PhiMoEForCausalLM"},
    "qwen2": {},
    "qwen2_5_vl": FAMILIES["qwen2_5_vl"].config,
    "qwen2_moe": {**_EXPERTS, "shared_expert_intermediate_size": 32},
    "qwen3": _HEAD_DIM,
    "qwen3_5_moe_text": {
        **_EXPERTS,
        **_LINEAR,
        **_MIXED,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_moe_text in bfloat16": {
        **_EVERY_EXPERT,
        **_LINEAR_BFLOAT16,
        **_MIXED,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_5_text": {**_LINEAR, **_MIXED},
    "qwen3_5_text in bfloat16": {**_LINEAR_BFLOAT16, **_MIXED},
    "qwen3_moe": {**_EXPERTS, **_HEAD_DIM},
    "qwen3_next": {**_EXPERTS, **_LINEAR, **_MIXED, "shared_expert_intermediate_size": 32},
    "qwen3_next in bfloat16": {
        **_EVERY_EXPERT,
        **_LINEAR_BFLOAT16,
        **_MIXED,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_vl": {
        **FAMILIES["qwen2_5_vl"].config,
        **_HEAD_DIM,
        "model_type": "qwen3_vl",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "out_hidden_size": 128,
            "num_heads": 2,
            "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "seed_oss": {},
    "smollm3": _TIED,
    "solar_open": {**_ALL_EXPERTS, **_HEAD_DIM},
    "stablelm": {},
    "starcoder2": _TIED,
    "vaultgemma": {**_HEAD_DIM, **_TIED},
    "xglm": {"d_model": 128, "ffn_dim": 256, "attention_heads": 4, **_TIED},
    "youtu": {**_LATENT, "q_lora_rank": 64},
    "zamba2": _ZAMBA2,
    "zamba2 with any time step": {**_ZAMBA2, **_ANY_TIME_STEP},
}


def choose(names: Sequence[str]) -> list[str]:
    """The architectures with these names; all of them without any.

    Raises:
        ConfigError: There is no such architecture.
    """
    if unknown := [name for name in names if name not in ARCHITECTURES]:
        raise ConfigError(
            f"there is no architecture {unknown[0]!r}",
            fix=f"use some of {', '.join(ARCHITECTURES)}",
            key="-k",
        )
    return [name for name in ARCHITECTURES if not names or name in names]


def make_architecture(path: Path, name: str, *, seed: int = 0, **changes: Any) -> Path:
    """Writes a tiny checkpoint of an architecture, with its tokenizer.

    Args:
        path: Directory to write; made if missing.
        name: One of :data:`ARCHITECTURES`.
        seed: Of the weights.
        **changes: Of ``config.json``.

    Returns:
        The directory.
    """
    settings = {"model_type": name.partition(" ")[0], **ARCHITECTURES[name], **changes}
    published = settings.pop(_CLASS, None)
    made = make_tiny_model(path, "llama", seed=seed, **settings)
    if published:
        config = json.loads((made / "config.json").read_text())
        (made / "config.json").write_text(json.dumps(config | {"architectures": [published]}))
    return made
