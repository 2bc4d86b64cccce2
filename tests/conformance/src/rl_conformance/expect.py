"""How a check reports that the contract is broken. Plain ``assert`` would vanish under ``-O``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

__all__ = ["Caught", "CheckFailed", "NotRun", "fail", "raises", "require", "same_tensor"]

E = TypeVar("E", bound=BaseException)


class CheckFailed(AssertionError):
    """The backend breaks the clause."""


class NotRun(Exception):
    """The check cannot run here.

    Args:
        reason: Why not.
        excused: True if the profile does not ask for it here (another device, a kind that the
            backend does not offer); False if something is missing that the run needs.
    """

    def __init__(self, reason: str, *, excused: bool = False) -> None:
        super().__init__(reason)
        self.excused = excused


class Caught(Generic[E]):
    """Holds the exception that :func:`raises` saw."""

    error: E


def fail(message: str) -> NoReturn:
    """Ends the check as failed."""
    raise CheckFailed(message)


def require(condition: object, message: str) -> None:
    """Fails the check unless the condition holds."""
    if not condition:
        fail(message)


@contextmanager
def raises(expected: type[E] | tuple[type[E], ...], *mentions: str) -> Generator[Caught[E]]:
    """Fails unless the block raises an error of the class whose text has every given word.

    Args:
        expected: The class, or several of them.
        *mentions: What the message must name; upper and lower case count as equal.
    """
    classes = (expected,) if isinstance(expected, type) else expected
    caught: Caught[E] = Caught()
    try:
        yield caught
    except expected as error:
        caught.error = error
        missing = [word for word in mentions if word.lower() not in str(error).lower()]
        require(not missing, f"the {type(error).__name__} does not mention {missing}: {error}")
        return
    fail(f"expected {' or '.join(each.__name__ for each in classes)}, got no exception")


def same_tensor(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails unless both tensors have one shape, one dtype and the same bits."""
    import torch

    require(
        got.shape == expected.shape and got.dtype == expected.dtype,
        f"{what}: got {got.dtype} {list(got.shape)}, "
        f"expected {expected.dtype} {list(expected.shape)}",
    )
    ours, theirs = (each.contiguous().view(-1).view(torch.uint8) for each in (got, expected))
    if not torch.equal(ours, theirs):
        size = max(1, got.element_size())
        differing = int((ours != theirs).view(-1, size).any(-1).sum())
        fail(f"{what}: {differing} of {got.numel()} values differ")
