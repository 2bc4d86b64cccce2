"""A checkpoint's directory and tokenizer, from the hub too, and what must be known of its model."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

from rl_backends.model_files import (
    check_name,
    check_remote_code,
    config_of,
    has_tokenizer,
    read_object,
)
from rl_backends.model_files import model_facts as facts_of
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from transformers import PreTrainedTokenizerBase

    from rl_backends import ModelFacts

__all__ = [
    "checkpoint_directory",
    "load_tokenizer",
    "model_facts",
    "quiet",
]

_HUB_TIMEOUT_S = 5.0
_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.safetensors", "*.txt")


def checkpoint_directory(name: str) -> Path:
    """The directory of a checkpoint: the name itself, or where the hub's copy of it lies.

    Raises:
        ConfigError: There is no such directory, and the hub does not give us such a model.
    """
    check_name(name)
    directory = Path(name) if Path(name).is_dir() else _from_hub(name)
    config_of(directory)
    return directory


def load_tokenizer(
    model_name: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer that comes with a checkpoint, or None if a directory has none.

    Raises:
        ConfigError: The checkpoint is missing, its tokenizer is broken, or it wants code that is
            not trusted.
    """
    directory = checkpoint_directory(model_name)
    if not has_tokenizer(directory):
        return None
    settings = directory / "tokenizer_config.json"
    if settings.exists():
        check_remote_code(model_name, read_object(settings), trust=trust_remote_code)
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"the tokenizer of {model_name} cannot be loaded: {error}",
            fix="save the tokenizer beside the model again with save_pretrained",
            key="model_name",
        ) from error
    return tokenizer


def model_facts(
    config: Mapping[str, Any],
    *,
    text: Any,
    vocab_size: int,
    generation: Any = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> ModelFacts:
    """What the product's frontend must know of a loaded model.

    Args:
        config: A checked :class:`~rl_core.interfaces.GenerationConfig`; its ``pad_token_id`` and
            ``max_model_len`` stand in for what the model lacks.
        text: The text part of the model's configuration, as transformers loads it; gives the
            context length.
        vocab_size: Token ids that the model has.
        generation: The checkpoint's ``GenerationConfig`` of transformers, if there is one.
        tokenizer: Gives the pad token, if there is one.

    Raises:
        ConfigError: There is no pad token or no context length, or the pad token is not a token.
    """
    context = getattr(text, "max_position_embeddings", None)
    if (length := config.get("max_model_len") if context is None else context) is None:
        raise ConfigError(
            f"{type(text).__name__} has no context length (max_position_embeddings)",
            fix="set max_model_len",
            key="max_model_len",
        )
    return facts_of(
        config,
        vocab_size=vocab_size,
        max_model_len=int(length),
        text=text,
        generation={} if generation is None else generation.to_dict(),
        tokenizer=tokenizer,
    )


@contextmanager
def quiet() -> Generator[None]:
    """Loading talks on stderr; what matters of it is raised instead."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _from_hub(name: str) -> Path:
    """Downloads what is missing; one quick request finds out whether the hub is there at all."""
    unreachable: Exception | None = None
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        unreachable = error
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(_HUB_FILES), local_files_only=unreachable is not None
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        cause = unreachable or error
        raise ConfigError(
            f"{name} is neither a directory nor a model that the hub gives access to: {cause}",
            fix="correct the name, or set model_name to a local directory",
            key="model_name",
        ) from cause
