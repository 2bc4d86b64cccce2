"""Checkpoints that many reference backends are made from, read once."""

from __future__ import annotations

import functools
from pathlib import Path

from rl_backends.model_files import config_of
from rl_conformance.oracle import Oracle
from rl_core.errors import ConfigError

__all__ = ["load_once"]


@functools.lru_cache(maxsize=8)
def load_once(path: str) -> Oracle:
    """The checkpoint in float32. Shared: copy what you change.

    Raises:
        ConfigError: There is no checkpoint, or it wants to run code of its own.
    """
    if "auto_map" in config_of(Path(path)):
        raise ConfigError(
            f"the checkpoint {path} contains code; the reference has no trust_remote_code",
            fix="use a checkpoint of an architecture that transformers knows",
            key="model_name",
        )
    return Oracle(path)
