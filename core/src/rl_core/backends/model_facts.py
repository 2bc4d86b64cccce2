"""What the frontend must know of a model, from its configuration and its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.backends.prompts import ModelFacts
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_stop_strings", "model_facts"]


def model_facts(
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    max_model_len: int,
    text: Any,
    generation: Mapping[str, Any],
    tokenizer: Any,
) -> ModelFacts:
    """Limits and special tokens of a model.

    Args:
        config: A :class:`~rl_core.interfaces.GenerationConfig`; its ``pad_token_id`` comes before
            the tokenizer's, the model's and that of ``generation_config.json``.
        vocab_size: Token ids that the model has.
        max_model_len: Its context.
        text: The text part of its configuration, an object.
        generation: What ``generation_config.json`` says. Its end-of-sequence tokens come before
            the model's and the tokenizer's.
        tokenizer: Or None.

    Raises:
        ConfigError: There is no pad token, or it is none of the model's tokens.
    """
    eos = _first(
        generation.get("eos_token_id"),
        getattr(text, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    pad = _first(
        config.get("pad_token_id"),
        getattr(tokenizer, "pad_token_id", None),
        getattr(text, "pad_token_id", None),
        generation.get("pad_token_id"),
    )
    name = config.get("model_name", "the model")
    if pad is None:
        raise ConfigError(
            f"{name} has no pad token, in its tokenizer or its configuration",
            fix="set pad_token_id, usually to the end-of-sequence token's id",
            key="pad_token_id",
        )
    if not 0 <= pad < vocab_size:
        raise ConfigError(
            f"the pad token {pad} of {name} is outside its vocabulary of {vocab_size}",
            fix=f"set pad_token_id to an id below {vocab_size}",
            key="pad_token_id",
        )
    several = eos if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return ModelFacts(int(pad), tuple(several), vocab_size, max_model_len)


def check_stop_strings(config: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises a ConfigError where ``stop_strings`` are set and no tokenizer could find them."""
    if config.get("stop_strings") and tokenizer is None:
        raise ConfigError(
            f"stop_strings are set, and {config['model_name']} has no tokenizer",
            fix="save the tokenizer beside the model, or use stop_token_ids",
            key="stop_strings",
        )


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)
