"""Sections that several engines' configurations have, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, TypedDict

from rl_core.interfaces.constraints import AlsoCalled, Range

__all__ = ["EngineLoraConfig"]


class EngineLoraConfig(TypedDict, total=False):
    """The adapters that refits send to an engine: those of the policy. Needs peft.

    Attributes:
        r: Rank, the same as in the policy's ``lora``. Default 16.
        target_modules: Modules that have an adapter, the same as in the policy's ``lora``. Default:
            peft's choice for the architecture.
    """

    r: Annotated[int, Range(ge=1), AlsoCalled("lora_r rank lora_rank dim max_lora_rank")]
    target_modules: Annotated[str | list[str], AlsoCalled("lora_target_modules")]
