"""The frames between a backend and its engine's process: MessagePack on a pipe, nothing pickled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.cluster.remote_error import as_plain, from_plain

if TYPE_CHECKING:
    from rl_core.errors import WorkerError

__all__ = ["Prompt", "Reply", "Request", "Row", "decode", "encode", "failure", "raised"]

Plain = dict[str, Any]


class Request(msgspec.Struct, array_like=True):
    """A call.

    Attributes:
        method: Of the host.
        arguments: Its keyword arguments.
        number: Which call of the backend it is; 0 where calls cannot be mistaken.
    """

    method: str
    arguments: Plain = {}
    number: int = 0


class Prompt(msgspec.Struct, array_like=True):
    """One row to complete.

    Attributes:
        token_ids: The prompt.
        budget: Tokens it may generate.
        seed: Of its own stream, or None to draw from the engine's.
        stop_strings: What ends it.
    """

    token_ids: list[int]
    budget: int
    seed: int | None
    stop_strings: list[str]


class Row(msgspec.Struct, array_like=True):
    """One row that is complete; see :class:`rl_core.backends.Completion`."""

    row: int
    token_ids: list[int]
    logprobs: list[float]
    truncated: bool


class Reply(msgspec.Struct, array_like=True):
    """An answer, or a part of one.

    Attributes:
        value: What the method returned.
        rows: Rows that are complete; more follow.
        error: As :func:`rl_core.cluster.remote_error.as_plain` makes it.
        last: Nothing of this call follows.
        number: The request's.
    """

    value: Any = None
    rows: list[Row] = []
    error: list[Any] | None = None
    last: bool = True
    number: int = 0


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.decode


def failure(error: BaseException, name: str) -> Reply:
    """The reply that carries an error."""
    return Reply(error=as_plain(error, name))


def raised(reply: Reply) -> WorkerError | None:
    """The error that a reply carries."""
    return None if reply.error is None else from_plain(reply.error)
