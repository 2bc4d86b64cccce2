"""What a method returns when its result comes later."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Awaitable
from typing import Any, TypeAlias

__all__ = ["Future"]

#: A ``concurrent.futures.Future``, or what a launcher has instead, such as Ray's object refs; see
#: :func:`rl_core.wait`.
Future: TypeAlias = concurrent.futures.Future[Any] | Awaitable[Any]
