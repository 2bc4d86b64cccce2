"""Run at the start of every Python process of an engine whose environment has this folder first."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable


class StandIn(ModuleType):
    """May be imported, with any name; what such a name is raises when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raises NotImplementedError."""
        raise NotImplementedError(
            f"{self.__name__} does not load beside this torch, and rl-vllm replaces it for prompts "
            "of text only"
        )


def leave_out(names: Iterable[str]) -> None:
    """Makes packages look like ones that are not installed.

    Models of images and text still load: what their modules import of torchvision in any case
    (transformers' image processors do) is stood in for.
    """
    modules: dict[str, Any] = sys.modules
    for name in names:
        modules[name] = None
        if name == "torchvision":
            transforms = StandIn("torchvision.transforms.v2")
            modules |= {each.__name__: each for each in (transforms, transforms.functional)}


leave_out(os.environ.get("RL_VLLM_LEFT_OUT", "").split())
