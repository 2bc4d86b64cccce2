"""Reward functions with short names."""

from __future__ import annotations

import logging
import re
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "SHIPPED",
    "exact_reward",
    "format_reward",
    "gsm8k_reward",
    "math_reward",
    "overlong_reward",
]


def _text(completion: Any) -> str:
    """A completion as text; of messages the last one's."""
    return completion if isinstance(completion, str) else str(completion[-1].get("content") or "")


def math_reward(completions: list[Any], answer: list[Any]) -> list[float | None]:
    r"""1 where the answer is mathematically the reference, as math-verify sees it, else 0.

    The answer is what is in the last ``\boxed{}``, or else the last formula or number. None where
    the reference cannot be read; of GSM8K's it is what follows ``####``.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    # Its time limits are signals, which only a main thread gets.
    limit = 5 if threading.current_thread() is threading.main_thread() else None
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    kinds = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    rewards: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        gold = str(reference).rpartition("####")[2].strip()
        gold = gold if "\\boxed" in gold or "$" in gold else f"\\boxed{{{gold}}}"
        expected = parse(gold, parsing_timeout=limit)
        text = _text(completion)
        # math-verify takes neighbouring boxes for one answer of several parts.
        found = parse(text[max(text.rfind("\\boxed"), 0) :], kinds, parsing_timeout=limit)
        right = verify(expected, found, timeout_seconds=limit) if expected else None
        rewards.append(None if right is None else float(right))
    return rewards


def exact_reward(
    completions: list[Any], answer: list[Any], *, pattern: str | None = None
) -> list[float]:
    """1 where the completion is the reference, or one of several, else 0.

    Case, spaces and a period at the end do not count. With ``pattern``, the last match of that
    regular expression is compared, or its first group.
    """

    def plain(text: Any) -> str:
        return " ".join(str(text).split()).casefold().removesuffix(".")

    rewards = []
    for completion, reference in zip(completions, answer, strict=True):
        text: str | None = _text(completion)
        if pattern is not None and text is not None:
            found = list(re.finditer(pattern, text, re.DOTALL))
            text = found[-1][1 if found[-1].re.groups else 0] if found else None
        right = map(plain, reference if isinstance(reference, list) else [reference])
        rewards.append(float(text is not None and plain(text) in right))
    return rewards


def format_reward(
    completions: list[Any], *, pattern: str = r"\A\s*<think>.*?</think>\s*\S"
) -> list[float]:
    """1 where the regular expression is found in the completion, else 0; a dot is any character."""
    return [float(re.search(pattern, _text(each), re.DOTALL) is not None) for each in completions]


def gsm8k_reward(completions: list[Any], answer: list[Any]) -> list[float]:
    """1 where the number is the reference's: behind the last ``####``, or else the last one."""

    def number(text: str) -> float | None:
        found = re.findall(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+", text.rpartition("####")[2])
        return float(found[0 if "####" in text else -1].replace(",", "")) if found else None

    pairs = zip(completions, answer, strict=True)
    both = [(number(_text(completion)), number(str(reference))) for completion, reference in pairs]
    return [float(given is not None and given == right) for given, right in both]


def overlong_reward(
    completion_ids: list[list[int]], *, max_tokens: int, buffer_tokens: int
) -> list[float]:
    """DAPO's soft penalty: from 0 to -1 within the last ``buffer_tokens`` before ``max_tokens``."""
    over = [len(ids) - (max_tokens - buffer_tokens) for ids in completion_ids]
    return [-min(1.0, max(0.0, tokens / max(buffer_tokens, 1))) + 0.0 for tokens in over]


#: Reward functions by their short names.
SHIPPED: dict[str, Callable[..., Any]] = {
    "math": math_reward,
    "exact": exact_reward,
    "format": format_reward,
    "gsm8k": gsm8k_reward,
    "overlong": overlong_reward,
}
