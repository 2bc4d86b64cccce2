"""The rows that an engine is given and those that it gives back."""

from __future__ import annotations

from typing import Any, Self

import msgspec

from rl_hosting.cluster.remote_error import encode_error

__all__ = ["Done", "Prompt", "Sampling"]


class Sampling(msgspec.Struct, array_like=True):
    """How a row is sampled; see :class:`rl_backends.SamplingParams`."""

    greedy: bool
    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float
    stop_token_ids: list[int]


class Prompt(msgspec.Struct, array_like=True):
    """One row to complete; see :class:`rl_backends.Row`.

    Attributes:
        key: Tells it from every other row of the engine.
        index: Of the row in its call, for messages.
        token_ids: The prompt.
        budget: Tokens that it may generate.
        seed: Of the row's own random numbers (63 bits), or None to draw from the engine's.
        stop_strings: Each of them ends the row.
        sampling: How the row is sampled.
    """

    key: int
    index: int
    token_ids: list[int]
    budget: int
    seed: int | None
    stop_strings: list[str]
    sampling: Sampling


class Done(msgspec.Struct, array_like=True):
    """One row that is complete, or that failed; see :class:`rl_backends.Completion`.

    Attributes:
        key: Of the row.
        token_ids: Generated, the stop token included.
        logprobs: One for each of them.
        truncated: The row ended because its budget was used up.
        error: What :func:`rl_hosting.cluster.remote_error.encode_error` returned, if it failed.
    """

    key: int
    token_ids: list[int] = []
    logprobs: list[float] = []
    truncated: bool = False
    error: list[Any] | None = None

    @classmethod
    def failed(cls, key: int, error: BaseException, engine: str) -> Self:
        """A row that failed; its call raises an error of the same class.

        Args:
            key: Of the row.
            error: Why.
            engine: Who says so, for the message.
        """
        return cls(key, error=encode_error(error, engine))
