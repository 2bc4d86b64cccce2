"""What the product's frontend must know of a checkpoint: limits and special tokens."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.backends.model_files import check_stop_strings, has_tokenizer, model_facts
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["facts_of", "model_config_of", "tokenizer_of"]


def tokenizer_of(config: Mapping[str, Any]) -> Any:
    """The tokenizer beside a checkpoint, or None if a directory has none.

    Raises:
        ConfigError: It cannot be loaded, or there is none and ``stop_strings`` are set.
    """
    name = config["model_name"]
    directory = Path(name)
    if directory.is_dir() and not has_tokenizer(directory):
        check_stop_strings(config, None)
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            name, trust_remote_code=config.get("trust_remote_code", False)
        )
    except Exception as error:  # tokenizers raises Exception itself
        raise _cannot_load("tokenizer", config, error) from error


def model_config_of(config: Mapping[str, Any]) -> Any:
    """What a checkpoint's config.json makes, as vLLM reads it.

    Raises:
        ConfigError: It cannot be read, or only by Python that comes with the checkpoint.
    """
    from vllm.transformers_utils.config import get_config

    try:
        return get_config(config["model_name"], config.get("trust_remote_code", False))
    except Exception as error:  # whatever classes of configurations raise
        raise _cannot_load("config.json", config, error) from error


def _cannot_load(what: str, config: Mapping[str, Any], error: Exception) -> ConfigError:
    name, text = config["model_name"], str(error)
    if "trust_remote_code" in text and not config.get("trust_remote_code", False):
        return ConfigError(
            f"the {what} of {name} needs Python that comes with the checkpoint, and "
            "trust_remote_code is not set",
            fix="read that code; if you trust it, set trust_remote_code to True",
            key="trust_remote_code",
        )
    return ConfigError(
        f"the {what} of {name} cannot be loaded: {type(error).__name__}: {text}",
        fix="save it beside the weights again with save_pretrained, or install a transformers "
        "that knows the model",
        key="model_name",
    )


def facts_of(model_config: Any, tokenizer: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of :class:`rl_core.backends.ModelFacts`.

    Args:
        model_config: vLLM's, of the loaded model.
        tokenizer: Or None.
        config: Its ``pad_token_id`` stands in for what the model lacks.

    Raises:
        ConfigError: There is no pad token, or it is none of the model's tokens.
    """
    text = model_config.hf_text_config
    facts = model_facts(
        config,
        vocab_size=int(text.vocab_size),
        max_model_len=int(model_config.max_model_len),
        text=text,
        generation=model_config.try_get_generation_config(),
        tokenizer=tokenizer,
    )
    return {**dataclasses.asdict(facts), "eos_token_ids": list(facts.eos_token_ids)}
