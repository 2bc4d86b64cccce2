"""Tiny models of real architectures, made by code: no download, fixed seeds, a real tokenizer.

The directories are ordinary Hugging Face checkpoints, so every engine loads them its usual way.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_conformance.quiet import no_progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "FAMILIES",
    "Family",
    "families_of",
    "make_reciting_model",
    "make_reward_model",
    "make_tiny_model",
    "make_tokenizer",
]

_MERGES = ("an", "er", "in", "on", "re", "th", "the", "ing", "12", "34")
_PAD, _EOS, _BOS = "<pad>", "<eos>", "<bos>"
#: Keys that are not the language model's in a configuration for images and text.
_OF_IMAGES = (
    "vision_config",
    "image_token_id",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "mm_tokens_per_image",
    "tie_word_embeddings",
)

_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of published checkpoints, as a tiny model.

    Attributes:
        mechanism: What it has and the other families have not.
        clauses: The clauses that are checked with it, besides those that any model shows.
        config: Keys of its configuration, ``weight_scale`` of :func:`make_tiny_model` among them.
        required: Whether a backend must take it. Another one may be refused by a typed error.
    """

    mechanism: str
    clauses: str
    config: dict[str, Any]
    required: bool = False


#: Every family. Windows and first contexts are short, so that the suite's rows are longer.
FAMILIES = {
    "llama": Family(
        "an output head of its own",
        "G11 P1 R7",
        {"model_type": "llama", "tie_word_embeddings": False},
        required=True,
    ),
    "qwen2": Family(
        "biases of queries, keys and values; the head is the embeddings",
        "G11 P1",
        {"model_type": "qwen2", "tie_word_embeddings": True},
        required=True,
    ),
    "qwen3": Family(
        "queries and keys are normalised",
        "G11 P1 R7",
        {"model_type": "qwen3", "tie_word_embeddings": True, "head_dim": 32},
        required=True,
    ),
    "mistral": Family(
        "every layer attends to a window",
        "A3 G11 P1",
        {"model_type": "mistral", "tie_word_embeddings": False, "sliding_window": 9},
    ),
    "gemma2": Family(
        "scores and logits have soft caps; some layers attend to a window",
        "G11 P1 P9",
        {
            "model_type": "gemma2",
            "tie_word_embeddings": True,
            "head_dim": 32,
            "hidden_act": "gelu_pytorch_tanh",  # for engines alone
            "attn_logit_softcapping": 1.0,
            "final_logit_softcapping": 5.0,
            "query_pre_attn_scalar": 1,
            "sliding_window": 9,
            "weight_scale": 4.0,
        },
    ),
    "phi3": Family(
        "rows longer than the first context have other frequencies (longrope); fused projections",
        "G11 P1 P9",
        {
            "model_type": "phi3",
            "tie_word_embeddings": False,
            "weight_scale": 4.0,
            "original_max_position_embeddings": 16,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 16,
                "short_factor": [1.0] * 16,
                "long_factor": [1.0 + 0.5 * step for step in range(16)],
                "factor": 16.0,
            },
        },
    ),
    "gpt_oss": Family(
        "attention has sinks, in some layers within a window; stretched positions (yarn); experts",
        "G11 P1 P9",
        {
            "model_type": "gpt_oss",
            "tie_word_embeddings": False,
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 4,  # where two are nearly as good, bfloat16 takes either
            "sliding_window": 9,
            "rope_parameters": {**_YARN, "truncate": False},
            "weight_scale": 4.0,
        },
    ),
    "deepseek_v3": Family(
        "attention over latents; yarn that scales scores; experts chosen with a bias, a buffer",
        "G11 P1 P9 R7",
        {
            "model_type": "deepseek_v3",
            "tie_word_embeddings": False,
            "num_key_value_heads": 4,
            "q_lora_rank": 64,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,  # this and the next two are for engines alone
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "weight_scale": 4.0,
        },
    ),
    "wide": Family(
        "a vocabulary of 16384, of which thousands are nearly as likely; millions of elements",
        "G10 R7",
        {
            "model_type": "qwen2",
            "tie_word_embeddings": True,
            "vocab_size": 16384,
            "hidden_size": 256,
            "weight_scale": 1.0,
        },
        required=True,
    ),
    "qwen2_5_vl": Family(
        "a model of images and text, with positions of three kinds",
        "P9",
        {
            "model_type": "qwen2_5_vl",
            "tie_word_embeddings": False,
            "image_token_id": 269,
            "video_token_id": 270,
            "vision_start_token_id": 271,
            "vision_end_token_id": 268,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000000.0,
                "mrope_section": [4, 6, 6],
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 64,
                "intermediate_size": 128,
                "out_hidden_size": 128,
                "num_heads": 2,
                "fullatt_block_indexes": [1],
            },
        },
    ),
}


def families_of(clause: str) -> dict[str, dict[str, Any]]:
    """The cases of a check of this clause: each family that :data:`FAMILIES` names for it."""
    return {
        name: {"family": name} for name, each in FAMILIES.items() if clause in each.clauses.split()
    }


def make_tokenizer() -> Any:
    """A byte-level BPE tokenizer of 269 tokens, a few of them longer than one character.

    Returns:
        A ``transformers.PreTrainedTokenizerFast`` with pad, eos and bos tokens (ids 0, 1, 2).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [_PAD, _EOS, _BOS, *alphabet, *_MERGES]
    merges = [(word[:-1], word[-1]) if word[:-1] in words else None for word in _MERGES]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: index for index, word in enumerate(words)},
            merges=[pair or ("in", "g") for pair in merges],
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS, bos_token=_BOS
    )


def make_tiny_model(
    path: str | Path,
    family: str = "qwen2",
    *,
    seed: int = 0,
    hidden_size: int = 128,
    num_layers: int = 2,
    max_position_embeddings: int = 256,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """Writes a randomly initialised checkpoint with its tokenizer.

    Args:
        path: Directory to write; made if missing.
        family: One of :data:`FAMILIES`.
        seed: Of the weights; the global random state is left as it was.
        hidden_size: Width; four heads, two key/value heads. Engines' kernels want heads of at
            least 32.
        num_layers: Depth.
        max_position_embeddings: Context length in tokens.
        dtype: Torch dtype name the weights are stored in.
        **overrides: Further keys of the architecture's configuration. With a ``vision_config``
            the model is one of images and text; keys that are not for images describe its language
            model. ``weight_scale`` is a factor on the initial weights. Above 1, next-token
            distributions are far from uniform, so that a mistake in them shows. Default: the
            family's, or 7.

    Returns:
        The directory.

    Raises:
        KeyError: ``family`` is not one of :data:`FAMILIES`.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    settings = {
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": num_layers,
        "max_position_embeddings": max_position_embeddings,
        **FAMILIES[family].config,
        **overrides,
    }
    factory = AutoModelForImageTextToText if "vision_config" in settings else AutoModelForCausalLM
    return _write(Path(path), factory, settings, seed, dtype)


def make_reciting_model(path: str | Path, tokens: Sequence[int]) -> Path:
    """Writes a checkpoint that repeats a sequence of tokens: after each, the next one.

    Args:
        path: Directory to write; made if missing.
        tokens: None of them twice. Any other is followed by itself.

    Returns:
        The directory.
    """
    import torch
    from transformers import AutoModelForCausalLM

    path = make_tiny_model(path, "llama", num_layers=1)
    with no_progress_bars():
        model = AutoModelForCausalLM.from_pretrained(path)
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.zero_()
        signs = torch.randint(0, 2, embeddings.shape, generator=torch.Generator().manual_seed(0))
        embeddings.copy_(2.0 * signs - 1.0)
        # The logit of what comes next is 32, and with so many signs no other is above half of it.
        head.copy_(embeddings * (32 / head.shape[1]))
        head[[*tokens[1:], tokens[0]]] = head[list(tokens)]
    with no_progress_bars():
        model.save_pretrained(path)
    return path


def make_reward_model(path: str | Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Writes a randomly initialised Qwen2-shaped checkpoint with a scoring head of one output.

    Args:
        path: Directory to write; made if missing.
        seed: Of the weights.
        **overrides: Further keys of the architecture's configuration.

    Returns:
        The directory.
    """
    from transformers import AutoModelForSequenceClassification

    settings = {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "max_position_embeddings": 256,
        "num_labels": 1,
        **FAMILIES["qwen2"].config,
        **overrides,
    }
    return _write(Path(path), AutoModelForSequenceClassification, settings, seed, "float32")


def _write(path: Path, factory: Any, settings: dict[str, Any], seed: int, dtype: str) -> Path:
    import torch
    from transformers import AutoConfig

    tokenizer = make_tokenizer()
    settings = {
        "vocab_size": 272,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "use_cache": True,
        **settings,
    }
    model_type = settings.pop("model_type")
    weight_scale = settings.pop("weight_scale", 7.0)
    if "vision_config" in settings:
        whole = {key: settings.pop(key) for key in _OF_IMAGES if key in settings}
        settings = {**whole, "text_config": settings}
    config = AutoConfig.for_model(model_type, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        norms = torch.Generator().manual_seed(seed)
        model = factory.from_config(config, dtype=getattr(torch, dtype))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight"):  # all ones, they would be alike
                    parameter.copy_(0.75 + 0.5 * torch.rand(parameter.shape, generator=norms))
                elif name.endswith(".bias"):
                    parameter.normal_(0, 0.02 * weight_scale)
                else:
                    parameter.mul_(weight_scale)
            stored = model.state_dict().keys()
            for name, buffer in model.named_buffers():
                if name in stored:  # zeros, as a rule, which show nothing
                    buffer.copy_(torch.rand(buffer.shape, generator=norms))
    path.mkdir(parents=True, exist_ok=True)
    with no_progress_bars():
        model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
