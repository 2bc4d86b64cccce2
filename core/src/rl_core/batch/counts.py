"""The check for numbers that count something: rows, shards, tokens, bins."""

from __future__ import annotations

import operator
from typing import Any

from rl_core.errors import ConfigError

__all__ = ["whole"]


def whole(name: str, value: Any, least: int | None = None) -> int:
    """The value as an int; those of numpy and torch count too, bools and floats do not.

    Raises:
        ConfigError: It is no whole number, or below ``least``; names the parameter.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or (least is not None and number < least):
        raise ConfigError(
            f"{name} is {value!r}",
            fix="use a whole number" + ("" if least is None else f", {least} or more"),
            key=name,
        )
    return number
