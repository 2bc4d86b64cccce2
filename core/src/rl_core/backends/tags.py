"""What of an engine's memory sleeps and wakes by itself."""

from __future__ import annotations

from typing import Any

from rl_core.errors import ConfigError

__all__ = ["TAGS", "tags_of"]

TAGS = frozenset({"weights", "kv_cache"})


def tags_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], also: tuple[str, ...] = ()
) -> frozenset[str]:
    """The tags of a lifecycle call: all if none are given.

    Args:
        args: The tags, if anything.
        kwargs: ``tags``, and switches.
        also: The switches that there are: True or False.

    Raises:
        ConfigError: There is no such tag or keyword, or a switch is neither True nor False.
    """
    for key, value in kwargs.items():
        if key not in ("tags", *also):
            raise ConfigError(
                f"unknown keyword {key!r}", fix=f"use some of {['tags', *also]}", key=key
            )
        if key in also and not isinstance(value, bool):
            raise ConfigError(f"{key} is {value!r}", fix="give True or False", key=key)
    if len(args) + ("tags" in kwargs) > 1:
        raise ConfigError(f"{args!r} and {kwargs!r} are too many", fix="give tags once", key="tags")
    tags = kwargs.get("tags") or (args[0] if args else None)
    chosen = TAGS if tags is None else frozenset(tags)
    if unknown := chosen - TAGS:
        raise ConfigError(
            f"unknown tags {sorted(unknown)}", fix=f"use some of {sorted(TAGS)}", key="tags"
        )
    return chosen
