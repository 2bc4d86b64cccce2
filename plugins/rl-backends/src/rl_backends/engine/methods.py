"""Changes to methods of an engine's own classes."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_first"]


def call_first(owner: type, name: str, first: Callable[..., None]) -> None:
    """Has a method, in this process, call a function before it does what it did.

    Args:
        owner: The class.
        name: Of the method.
        first: Gets what the method gets, ``self`` included.
    """
    method = getattr(owner, name)

    @wraps(method)
    def with_first(*args: Any, **kwargs: Any) -> Any:
        first(*args, **kwargs)
        return method(*args, **kwargs)

    setattr(owner, name, with_first)
