"""What is checked of a model before an engine is started for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.backends.model_files import check_files, check_name
from rl_core.errors import ConfigError
from rl_core.futures import spawn

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_checkpoint"]

#: Seconds for the hub to answer.
_HUB_S = 10.0
_DUMMY = '; for random weights, which the first refit replaces, set vllm_cfg.load_format to "dummy"'


def check_checkpoint(config: Mapping[str, Any]) -> None:
    """Makes sure that there is a whole checkpoint, as far as that can be seen without loading it.

    Args:
        config: A :class:`rl_vllm.config.VllmConfig`.

    Raises:
        ConfigError: There is none, or a file of it is missing, cut short or not what its name says.
    """
    name = config["model_name"]
    format_ = config.get("vllm_cfg", {}).get("load_format", "auto")
    check_name(name)
    if Path(name).is_dir():
        check_files(Path(name), format_, without_weights=_DUMMY)
    else:
        _check_hub(name, format_)


def _check_hub(name: str, format_: str) -> None:
    """Makes sure that a name is in the cache, or known to a hub that can be reached."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    cached = try_to_load_from_cache(name, "config.json")
    offline = constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") in ("1", "true")
    if isinstance(cached, str):
        if offline:  # nothing that is missing can be had
            check_files(Path(cached).parent, format_, without_weights=_DUMMY)
        return
    here = f"{name} is neither a directory nor in the cache {constants.HF_HUB_CACHE}"
    local = "set model_name to the directory of a checkpoint"
    if offline:
        raise ConfigError(
            f"{here}, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids to ask the hub",
            fix=f"{local}, download it before, or unset that variable",
            key="model_name",
        )
    try:
        spawn("ask-hub", lambda: HfApi().model_info(name, timeout=_HUB_S)).result(_HUB_S)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} has no such model, or not for you",
            fix=f"{local}, correct the name, or log in (hf auth login) if the model is private",
            key="model_name",
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} refuses it: {error}",
            fix=f"{local}, or ask for access to the model on its page",
            key="model_name",
        ) from error
    except Exception as error:  # whatever its HTTP client raises, or nothing in time
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} did not answer ({type(error).__name__})",
            fix=f"{local}, or look at the network and HF_ENDPOINT; the time limit is "
            f"{_HUB_S:.0f} s",
            key="model_name",
        ) from error
