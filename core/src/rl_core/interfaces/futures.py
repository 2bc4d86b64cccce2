"""What a method returns when its result comes later."""

from __future__ import annotations

import concurrent.futures
from typing import Any, TypeAlias

__all__ = ["Future"]

#: A ``concurrent.futures.Future``, or what a launcher has instead, such as one of Ray's object
#: refs: :func:`rl_core.wait` takes both.
Future: TypeAlias = concurrent.futures.Future[Any] | Any
