"""What this process must know of the model that a server serves, from the model's directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rl_backends.engine.checkpoint import cannot_load, load_tokenizer
from rl_backends.model_files import check_stop_strings, config_of, model_facts, read_object
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends import ModelFacts

__all__ = ["Checkpoint"]

#: Servers end rows at it, too, where a tokenizer has it.
_END_OF_MESSAGE = "<|eom_id|>"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A local checkpoint, of which no weights are read.

    Attributes:
        directory: Where it is.
        settings: Its configuration, as transformers reads it.
        tokenizer: Or None if it has none.
        facts: Limits and special tokens of the model.
        ends: All tokens at which a server may end a row by itself.
    """

    directory: Path
    settings: Any
    tokenizer: Any
    facts: ModelFacts
    ends: frozenset[int]

    @property
    def model(self) -> tuple[str, ...]:
        """Names of its classes, and its type."""
        return (*(self.settings.architectures or []), str(self.settings.model_type))

    @classmethod
    def load(cls, config: Mapping[str, Any]) -> Self:
        """Reads the files beside the weights.

        Args:
            config: The checked configuration.

        Raises:
            ConfigError: There is no such directory, or a file in it cannot be read, or it names
                no context length and no pad token.
        """
        from transformers import AutoConfig

        directory = Path(config["model_name"])
        if not directory.is_dir():
            raise ConfigError(
                f"the model directory {directory} does not exist",
                fix="set model_name to a copy of the checkpoint that the server serves; its "
                "weights may be left out",
                key="model_name",
            )
        config_of(directory)
        trust = config.get("trust_remote_code", False)
        try:
            settings = AutoConfig.from_pretrained(directory, trust_remote_code=trust)
        except Exception as error:  # whatever classes of configurations raise
            raise cannot_load("config.json", config, error) from error
        text = settings.get_text_config()
        context = getattr(text, "max_position_embeddings", None) or config.get("max_model_len")
        if context is None:
            raise ConfigError(
                f"config.json in {directory} has no context length (max_position_embeddings)",
                fix="set max_model_len",
                key="max_model_len",
            )
        beside = directory / "generation_config.json"
        generation = read_object(beside) if beside.exists() else {}
        tokenizer = load_tokenizer(config)
        check_stop_strings(config, tokenizer)
        facts = model_facts(
            config,
            vocab_size=int(text.vocab_size),
            max_model_len=int(context),
            text=text,
            generation=generation,
            tokenizer=tokenizer,
        )
        named = (
            generation.get("eos_token_id"),
            *(getattr(one, "eos_token_id", None) for one in (settings, text, tokenizer)),
        )
        ends = {
            int(end)
            for one in named
            for end in (one if isinstance(one, list) else [one])
            if end is not None
        }
        if tokenizer is not None and _END_OF_MESSAGE in (added := tokenizer.get_added_vocab()):
            ends.add(added[_END_OF_MESSAGE])
        return cls(directory, settings, tokenizer, facts, frozenset(ends))
