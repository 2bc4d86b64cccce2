"""What a backend checks and reads of a checkpoint, before its engine loads the weights."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_backends.model_files import check_files, check_name, check_stop_strings, has_tokenizer
from rl_core.errors import ConfigError
from rl_core.futures import spawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from rl_core.interfaces import TensorSpec

__all__ = [
    "cannot_load",
    "check_checkpoint",
    "check_positions",
    "check_shapes",
    "file_shapes",
    "load_tokenizer",
    "read_tensor",
]

#: Seconds for the hub to answer.
_HUB_S = 10.0


def check_checkpoint(name: str, load_format: str, *, without_weights: str) -> None:
    """Makes sure that there is a whole checkpoint, as far as that can be seen without loading it.

    Runs in the driver, before an engine is started. A name that is no directory must be in the
    cache, or known to a hub that can be reached.

    Args:
        name: The configuration's ``model_name``.
        load_format: As engines call it; ``"dummy"`` needs no weights.
        without_weights: How to start the engine with random weights, for errors.

    Raises:
        ConfigError: There is none, or a file of it is missing, cut short or of another format.
    """
    check_name(name)
    if Path(name).is_dir():
        check_files(Path(name), load_format, without_weights=without_weights)
        return
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    cached = try_to_load_from_cache(name, "config.json")
    offline = constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") in ("1", "true")
    if isinstance(cached, str):
        if offline:  # nothing that is missing can be had
            check_files(Path(cached).parent, load_format, without_weights=without_weights)
        return
    here = f"{name} is neither a directory nor in the cache {constants.HF_HUB_CACHE}"
    local = "set model_name to the directory of a checkpoint"
    if offline:
        raise ConfigError(
            f"{here}, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids downloads",
            fix=f"{local}; or unset that variable, or download it: hf download {name}",
            key="model_name",
        )
    try:
        spawn("ask-hub", lambda: HfApi().model_info(name, timeout=_HUB_S)).result(_HUB_S)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} has no such model, or you may not see it",
            fix=f"{local}, correct the name, or log in (hf auth login) if the model is private",
            key="model_name",
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} refuses access: {error}",
            fix=f"{local}, or request access to the model on its page",
            key="model_name",
        ) from error
    except Exception as error:  # whatever its HTTP client raises, or nothing in time
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} did not answer ({type(error).__name__})",
            fix=f"{local}, or check the network and HF_ENDPOINT; the time limit is {_HUB_S:.0f} s",
            key="model_name",
        ) from error


def check_shapes(name: str, specs: Sequence[TensorSpec]) -> None:
    """Makes sure that the tensors of a directory are of the model of its ``config.json``.

    For engines with loaders that take what fits of a tensor, and pad the rest.

    Args:
        name: The configuration's ``model_name``; one that is no directory is not looked at.
        specs: Of the model, such as :func:`rl_backends.engine.weights.CheckpointModel` gives;
            tensors with other names are not looked at.

    Raises:
        ConfigError: A tensor has another shape.
    """
    found = file_shapes(Path(name))
    for spec in specs:
        if found.get(spec.name, spec.shape) != spec.shape:
            raise ConfigError(
                f"the weights of {name} do not fit its config.json: {spec.name} has shape "
                f"{list(found[spec.name])}, the model has {list(spec.shape)}",
                fix="write config.json and weights again, both with save_pretrained of one model",
                key="model_name",
            )


def check_positions(
    text: Any, longest: int, *, what: str = "max_model_len", key: str = "max_model_len"
) -> None:
    """Makes sure that no row needs other positions than the engine has for all of them.

    With longrope, a row turns its queries and keys by the length that it has; engines do it by the
    length that the longest row may have, or that the longest row has which is computed now.

    Args:
        text: The text part of the model's configuration.
        longest: Tokens of the longest row.
        what: What says so, for the error.
        key: Of the configuration, for the error.

    Raises:
        ConfigError: Shorter rows would have the positions of long ones.
    """
    positions = getattr(text, "rope_parameters", None) or {}
    first = positions.get("original_max_position_embeddings") or longest
    if positions.get("rope_type") == "longrope" and longest > first:
        raise ConfigError(
            f"{what} is {longest}, but rows of up to {first} tokens have other positions than "
            "longer ones (longrope), and the engine has one kind for all rows: its log-probs of "
            "short rows would not be those of a trainer",
            fix=f"set {what} to {first}",
            key=key,
        )


def file_shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a directory's files of safetensors, by name."""
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names = tensors.keys()
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
    return found


def read_tensor(directory: Path, name: str) -> torch.Tensor | None:
    """A tensor of a directory's files of safetensors; None if there is none."""
    from safetensors import safe_open

    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                found: torch.Tensor = tensors.get_tensor(name)
                return found
    return None


def load_tokenizer(config: Mapping[str, Any]) -> Any:
    """The tokenizer of a checkpoint, or None if its directory has none.

    Args:
        config: The backend's, with ``model_name`` and perhaps ``trust_remote_code``.

    Raises:
        ConfigError: It cannot be loaded, or there is none and ``stop_strings`` are set.
    """
    name = config["model_name"]
    if Path(name).is_dir() and not has_tokenizer(Path(name)):
        check_stop_strings(config, None)
        return None
    from transformers import AutoTokenizer

    trust = config.get("trust_remote_code", False)
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust)
    except Exception as error:  # tokenizers raises Exception itself
        raise cannot_load("tokenizer", config, error) from error


def cannot_load(what: str, config: Mapping[str, Any], error: Exception) -> ConfigError:
    """The error for a part of a checkpoint that cannot be loaded.

    Args:
        what: Which part, such as ``"config.json"``.
        config: The backend's.
        error: What was raised.
    """
    name, text = config["model_name"], str(error)
    if "trust_remote_code" in text and not config.get("trust_remote_code", False):
        return ConfigError(
            f"the {what} of {name} needs Python code of the checkpoint, and trust_remote_code is "
            "not set",
            fix="read that code; if you trust it, set trust_remote_code to True",
            key="trust_remote_code",
        )
    return ConfigError(
        f"the {what} of {name} cannot be loaded: {type(error).__name__}: {text}",
        fix="save it beside the weights again with save_pretrained, or install a version of "
        "transformers that has the model",
        key="model_name",
    )
