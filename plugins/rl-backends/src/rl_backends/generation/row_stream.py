"""What ``generate_async`` returns: the rows of a call as they finish."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Never

from rl_core.errors import LifecycleError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator

    from rl_core.batch import BatchedDataDict

__all__ = ["RowStream"]


class RowStream(AsyncGenerator["tuple[int, BatchedDataDict[Any]]", None]):
    """An asynchronous generator that explains itself to a caller who awaits it.

    Args:
        rows: Yields ``(row, one-row output)``; ``async for`` iterates over it directly.
    """

    def __init__(self, rows: AsyncGenerator[tuple[int, BatchedDataDict[Any]], None]) -> None:
        self._rows = rows

    def __aiter__(self) -> AsyncIterator[tuple[int, BatchedDataDict[Any]]]:
        """The rows."""
        return self._rows

    async def asend(self, value: None) -> tuple[int, BatchedDataDict[Any]]:
        """As of every asynchronous generator."""
        return await self._rows.asend(value)

    async def athrow(self, *error: Any) -> tuple[int, BatchedDataDict[Any]]:
        """As of every asynchronous generator."""
        return await self._rows.athrow(*error)

    async def aclose(self) -> None:
        """Cancels the rows that have not finished."""
        await self._rows.aclose()

    def __await__(self) -> Generator[Any, Any, Never]:
        """Refused.

        Raises:
            LifecycleError: Always.
        """
        raise LifecycleError(
            "generate_async yields rows one by one and cannot be awaited",
            fix="iterate: async for row, output in generation.generate_async(batch)",
        )
