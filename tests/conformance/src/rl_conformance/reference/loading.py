"""Checkpoints that many reference backends are made from, read once."""

from __future__ import annotations

import functools

from rl_conformance.oracle import Oracle

__all__ = ["load_once"]


@functools.lru_cache(maxsize=8)
def load_once(path: str) -> Oracle:
    """The checkpoint in float32. Shared: copy what you change."""
    return Oracle(path)
