"""How a check reports that the contract is broken. Plain ``assert`` would vanish under ``-O``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, NoReturn, TypeVar

from rl_conformance.calls import calls_made
from rl_conformance.deadline import NoVerdict

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

__all__ = [
    "Caught",
    "CheckFailed",
    "NotRun",
    "fail",
    "raised",
    "raises",
    "require",
    "require_fault",
    "same",
    "same_tensor",
    "within",
]

E = TypeVar("E", bound=BaseException)

#: Characters of a value that a message shows.
_SHOWN = 600


class CheckFailed(AssertionError):
    """The backend breaks the clause.

    Args:
        what: What was looked at; "" if that is clear from the calls.
        expected: What the contract demands; a text is shown as it is.
        got: What came instead; likewise.

    Attributes:
        what: As given; more may be put before it.
        expected: In words.
        got: In words.
        did: The calls of the backends that came before.
    """

    def __init__(self, what: str, expected: object, got: object) -> None:
        super().__init__(what, expected, got)
        self.what, self.expected, self.got = what, _shown(expected), _shown(got)
        self.did = calls_made()

    def __str__(self) -> str:
        return f"{f'{self.what}: ' if self.what else ''}expected {self.expected}, got {self.got}"


class NotRun(Exception):
    """The check cannot run here.

    Args:
        reason: Why not.
        excused: True if the profile does not need it here (another device, a kind that the
            backend does not offer); False if something is missing that the run needs.
    """

    def __init__(self, reason: str, *, excused: bool = False) -> None:
        super().__init__(reason)
        self.excused = excused


class Caught(Generic[E]):
    """Holds the exception that :func:`raises` saw."""

    error: E


def _shown(value: object) -> str:
    listed = value.tolist() if hasattr(value, "tolist") else value
    text = listed if isinstance(listed, str) else repr(listed)
    cut = f"{text[: _SHOWN // 2]} [...] {text[-_SHOWN // 2 :]}"
    return text if len(text) <= _SHOWN else cut


def fail(what: str, expected: object, got: object) -> NoReturn:
    """Ends the check as failed; see :class:`CheckFailed`."""
    raise CheckFailed(what, expected, got)


def require(condition: object, what: str, expected: object, got: object) -> None:
    """Fails the check unless the condition holds; see :class:`CheckFailed`."""
    if not condition:
        fail(what, expected, got)


def require_fault(condition: object, fault: str, why: str) -> None:
    """Ends the check without a verdict unless the suite's own fault took place.

    Args:
        condition: Whether it did.
        fault: What the suite did.
        why: What it looks like, or can be, if it did not.
    """
    if not condition:
        raise NoVerdict(f"the suite's own fault did not take place: {fault}; {why}")


def same(got: object, expected: object, what: str) -> None:
    """Fails unless two values are equal, and ``True`` and ``False`` are just that.

    Of two lists of rows, the message has the first row that differs.
    """
    if got is expected if isinstance(expected, bool) else got == expected:
        return
    if isinstance(got, list) and isinstance(expected, list) and len(got) == len(expected) > 1:
        row = next(n for n, each in enumerate(got) if each != expected[n])
        if isinstance(got[row], list):
            what, got, expected = f"{what}, row {row} of {len(got)}", got[row], expected[row]
    fail(what, repr(expected), repr(got))


@contextmanager
def within(what: str) -> Generator[None]:
    """Puts words before what a failure in the block is about."""
    try:
        yield
    except CheckFailed as failure:
        failure.what = f"{what}: {failure.what}"
        raise


@contextmanager
def raises(expected: type[E] | tuple[type[E], ...], *mentions: str) -> Generator[Caught[E]]:
    """Fails unless the block raises an error of the class, with every given word in its text.

    Args:
        expected: The class, or several of them.
        *mentions: What the message must name; upper and lower case count as equal.
    """
    caught: Caught[E] = Caught()
    try:
        yield caught
    except (CheckFailed, NotRun, NoVerdict):
        raise
    except Exception as error:
        raised(error, expected, *mentions)
        caught.error = error  # type: ignore[assignment]
        return
    raised(None, expected, *mentions)


def raised(
    error: BaseException | None, expected: type[E] | tuple[type[E], ...], *mentions: str
) -> None:
    """Fails unless a call ended with such an error, as :func:`raises` does; None if with none."""
    classes = (expected,) if isinstance(expected, type) else expected
    words = str(error).lower()
    if isinstance(error, classes) and all(word.lower() in words for word in mentions):
        return
    wanted = " or ".join(each.__name__ for each in classes)
    wanted += f" with a message that has {' and '.join(map(repr, mentions))}" if mentions else ""
    found = "no exception" if error is None else f"{type(error).__name__}: {error}"
    raise CheckFailed("", wanted, found) from error


def same_tensor(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Fails unless both tensors have one shape, one dtype and the same bits."""
    import torch

    ours, theirs = (f"{each.dtype} {list(each.shape)}" for each in (got, expected))
    require(ours == theirs, f"{what}: dtype and shape", theirs, ours)
    size = max(1, got.element_size())
    bits = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, size) for t in (got, expected)]
    if torch.equal(*bits):
        return
    differing = (bits[0] != bits[1]).any(-1).nonzero().flatten().tolist()
    at = differing[0]
    ours, theirs = (f"{each.reshape(-1)[at].item()!r}" for each in (got, expected))
    total = f"{len(differing)} of {got.numel()} values differ, the first at flat index {at}"
    fail(what, theirs, f"{ours} ({total})")
