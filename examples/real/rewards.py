"""The reward of ``grpo.yaml``."""

from __future__ import annotations

import re


def last_number(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 where the last number of a reply is the answer, else 0."""
    numbers = [re.findall(r"\d+", text) for text in completions]
    return [float(n[-1:] == [right]) for n, right in zip(numbers, answer, strict=True)]
