"""Finds prompts whose greedy continuation has a known place to stop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_conformance.batches import random_rows
from rl_conformance.expect import NotRun

if TYPE_CHECKING:
    from rl_conformance.oracle import Oracle

__all__ = ["Stop", "find_stop", "find_stop_pair"]

_CANDIDATES = 64


@dataclass(frozen=True, slots=True)
class Stop:
    """A prompt and where its greedy continuation must end.

    Attributes:
        prompt: Token ids.
        tokens: The expected continuation, stop included.
        token: The stop token, the last of ``tokens``.
        text: The stop string.
        other_prompt: A prompt whose continuation never meets the stop.
        other_tokens: Its full continuation.
    """

    prompt: list[int]
    tokens: list[int]
    token: int
    text: str = ""
    other_prompt: tuple[int, ...] | list[int] = ()
    other_tokens: tuple[int, ...] | list[int] = ()


def find_stop(oracle: Oracle, steps: int) -> Stop:
    """A prompt that meets a token midway, and another that never does."""
    prompts = random_rows([5] * _CANDIDATES, seed=11)
    paths = [(prompt, oracle.greedy(prompt, steps)) for prompt in prompts[:12]]
    full = [(prompt, path) for prompt, path in paths if len(path) == steps]
    for prompt, path in full:
        if (token := path[2]) in path[:2] or token == oracle.eos_token_id:
            continue
        for other_prompt, other in full:
            if token not in other and oracle.eos_token_id not in other:
                return Stop(prompt, path[:3], token, other_prompt=other_prompt, other_tokens=other)
    raise NotRun("no prompt of this model has a usable stop token")


def find_stop_pair(oracle: Oracle, steps: int) -> Stop:
    """A prompt whose continuation has a two-token string midway, met there for the first time."""
    for prompt in random_rows([5] * _CANDIDATES, seed=12):
        path = oracle.greedy(prompt, steps)
        if len(path) < steps:
            continue
        for end in range(2, steps - 1):
            text = oracle.tokenizer.decode(path[end - 1 : end + 1])
            if not (text.isascii() and text.isprintable() and len(text) >= 2):
                continue
            first = next(n for n in range(1, steps) if text in oracle.tokenizer.decode(path[:n]))
            if first == end + 1:
                return Stop(prompt, path[:first], path[end], text)
    raise NotRun("no prompt of this model has a usable stop string")
