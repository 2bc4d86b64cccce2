"""What this plugin adds to others' calls: refits from modules with adapters."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rl_core.plugins.hookspecs import hookimpl

if TYPE_CHECKING:
    from torch import nn

    from rl_core.interfaces import WeightSource

__all__ = ["weight_source"]


@hookimpl
def weight_source(module: nn.Module) -> WeightSource | None:
    """Reads the merged weights of a module with adapters, see :mod:`rl_hf.lora`."""
    if "peft" not in sys.modules:  # its import takes seconds, and nothing has adapters without it
        return None
    from rl_hf.lora import MergedWeightSource, has_adapters

    return MergedWeightSource(module) if has_adapters(module) else None
