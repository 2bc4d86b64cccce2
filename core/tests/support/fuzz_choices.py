"""Values that are wrong in every way, as bytes decide."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

AWKWARD: list[Any] = [
    None, True, -1, 0, 1, 2, 63, 64, 1 << 31, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1,
    0.5, -0.0, float("nan"), float("inf"), 1e308, "", "a", "b", "float32", "bfloat16", "int8",
    "staged", "installed", "wire", "\0", "\ud7ff", "x" * 5000, "/", "..", "/dev/null", b"", b"\0",
    bytes(48), [], [[]], ["a", "a"], [0, -1], {}, {"a": "bfloat16"}, {"": 1}, {1: 2},
    [[[[[[[[[[[[]]]]]]]]]]]],
]  # fmt: skip


class Choices:
    """Decisions that bytes make, one after the other; all are the first once they are used up."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def below(self, count: int) -> int:
        taken = self._data[self._at : self._at + 2]
        self._at += 2
        return int.from_bytes(taken, "little") % count

    def one_of(self, options: Sequence[T]) -> T:
        return options[self.below(len(options))]

    def once_in(self, count: int) -> bool:
        return self.below(count) == count - 1

    def rest(self) -> bytes:
        taken, self._at = self._data[self._at :], len(self._data)
        return taken


def plain(choices: Choices, value: Any) -> Any:
    """Plain data that differs from ``value`` somewhere, mostly in one place."""
    if choices.once_in(12):
        return choices.one_of(AWKWARD)
    match value:
        case dict() if value:
            key = choices.one_of(list(value))
            others = {k: v for k, v in value.items() if k != key}
            match choices.below(10):
                case 0:
                    return others
                case 1:
                    return others | {choices.one_of(["x", "", "type"]): value[key]}
                case _:
                    return others | {key: plain(choices, value[key])}
        case list() if value:
            at = choices.below(len(value))
            changed = plain(choices, value[at])
            between = choices.one_of([[changed], [changed], [changed, value[at]], []])
            return [*value[:at], *between, *value[at + 1 :]]
        case bool():
            return not value
        case int() | float():
            return value + choices.one_of([-1, 1, 64, 1 << 32])
        case str() | bytes():
            return choices.one_of([v for v in AWKWARD if type(v) is type(value)])
    return choices.one_of(AWKWARD)


def bent(choices: Choices, body: bytes) -> bytes:
    """Bytes that differ from ``body`` somewhere."""
    at = choices.below(len(body) + 1)
    match choices.below(5):
        case 0:
            return body[:at]
        case 1:
            return body[:at] + bytes([choices.below(256)]) + body[at + 1 :]
        case 2:
            return (
                body[:at] + choices.one_of([b"\xc1", b"\xdd\xff\xff\xff\xff", b"\xc4"]) + body[at:]
            )
        case 3:
            return choices.one_of([b"\x91", b"\x81"]) * choices.below(3000) + body[at:]
        case _:
            return choices.rest()
