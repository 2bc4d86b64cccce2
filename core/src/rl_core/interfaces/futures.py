"""What a method returns when its result comes later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import concurrent.futures

    import ray

    Future: TypeAlias = "concurrent.futures.Future[Any] | ray.ObjectRef[Any]"
else:
    Future = Any

__all__ = ["Future"]
