"""Finds prompts whose greedy continuation is certain: no rounding changes a token of it.

Where two tokens are nearly as likely, the argmax in bfloat16 is a matter of the kernel, of the
batch and of luck. A check that compares tokens needs prompts at which this cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rl_conformance.batches import random_rows
from rl_conformance.expect import NotRun

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from rl_conformance.oracle import Oracle

__all__ = [
    "Continuation",
    "Stop",
    "find_certain",
    "find_row",
    "find_stop",
    "find_stop_string",
    "is_text",
]

#: Prompts that are looked at together, and of one length in all.
_ROUND, _CANDIDATES = 32, 2048


@dataclass(frozen=True, slots=True)
class Continuation:
    """A prompt and what the reference's argmax makes of it.

    Attributes:
        prompt: Token ids.
        tokens: The continuation.
        certain: How many of its tokens are above every other by the requested lead, up to
            the first that is not or that ends the text.
    """

    prompt: list[int]
    tokens: list[int]
    certain: int


@dataclass(frozen=True, slots=True)
class Stop:
    """A prompt and where its greedy continuation must end.

    Attributes:
        prompt: Token ids.
        tokens: The expected continuation, stop included.
        token: The stop token, the last of ``tokens``.
        text: The stop string.
        other_prompt: A prompt with a continuation that does not contain the stop.
        other_tokens: Its full continuation.
    """

    prompt: list[int]
    tokens: list[int]
    token: int
    text: str = ""
    other_prompt: tuple[int, ...] | list[int] = ()
    other_tokens: tuple[int, ...] | list[int] = ()


def continuations(
    oracle: Oracle,
    length: int,
    steps: int,
    lead: float,
    seed: int,
    edit: Callable[[list[int]], list[int]] = list,
) -> Iterator[Continuation]:
    """Random prompts of one length, edited, each once, with their continuations."""
    rows = dict.fromkeys(tuple(edit(row)) for row in random_rows([length] * _CANDIDATES, seed))
    prompts = [list(row) for row in rows]
    for start in range(0, len(prompts), _ROUND):
        group = prompts[start : start + _ROUND]
        tokens, leads = oracle.continue_greedily(torch.tensor(group), steps)
        ends = (leads < lead) | (tokens == oracle.eos_token_id)
        certain = (ends.cumsum(1) == 0).sum(1)
        for row in zip(group, tokens.tolist(), certain.tolist(), strict=True):
            yield Continuation(*row)


def find_certain(
    oracle: Oracle, lengths: Sequence[int], *, steps: int, lead: float, seed: int = 0
) -> list[Continuation]:
    """One prompt for each length, no two the same, with a continuation that is certain.

    Args:
        oracle: Of the model.
        lengths: Of the prompts, in tokens.
        steps: Length of the continuations, in tokens.
        lead: By how much each token's log-prob is above every other's, in nats.
        seed: Of the random prompts.

    Raises:
        NotRun: This model has none of some length.
    """
    sources = {
        length: (c for c in continuations(oracle, length, steps, lead, seed) if c.certain == steps)
        for length in lengths
    }
    try:
        return [next(sources[length]) for length in lengths]
    except StopIteration:
        raise NotRun(
            f"no prompt has {steps} greedy tokens that lead all others by {lead:g} nats"
        ) from None


def find_row(
    oracle: Oracle,
    length: int,
    *,
    steps: int,
    lead: float,
    edit: Callable[[list[int]], list[int]] = list,
    accept: Callable[[list[int], list[str]], bool] = lambda tokens, words: True,
) -> Continuation:
    """A prompt of a kind whose continuation is certain, and of a kind.

    Args:
        oracle: Of the model.
        length: Of the prompt, in tokens.
        steps: Length of the continuation, in tokens.
        lead: By how much each token's log-prob is above every other's, in nats.
        edit: Makes the prompt of random ordinary tokens; keeps their number.
        accept: Says of a continuation, and of the text of each of its tokens, whether it will do.

    Raises:
        NotRun: This model has none.
    """
    for each in continuations(oracle, length, steps, lead, seed=13, edit=edit):
        if each.certain == steps:
            words = [oracle.tokenizer.decode([token]) for token in each.tokens]
            if accept(each.tokens, words):
                return each
    raise NotRun(
        f"no prompt has {steps} usable greedy tokens that lead all others by {lead:g} nats"
    )


def is_text(words: Sequence[str]) -> bool:
    """Whether tokens are text that is the same in every context: printable ASCII."""
    return all(word.isascii() and word.isprintable() and word.strip() for word in words)


def find_stop(oracle: Oracle, steps: int, lead: float) -> Stop:
    """A prompt that generates a token midway, and another that never does."""
    seen: list[Continuation] = []
    for new in continuations(oracle, 5, steps, lead, seed=11):
        if new.certain < steps:
            continue
        for one, other in [(new, old) for old in seen] + [(old, new) for old in seen]:
            token = one.tokens[2]
            if token not in one.tokens[:2] and token not in other.tokens:
                return Stop(
                    one.prompt,
                    one.tokens[:3],
                    token,
                    other_prompt=other.prompt,
                    other_tokens=other.tokens,
                )
        seen.append(new)
    raise NotRun("no prompt of this model generates a token that another prompt never does")


def find_stop_string(oracle: Oracle, steps: int, lead: float) -> Stop:
    """A prompt whose continuation has a two-token string midway, and not before."""
    for each in continuations(oracle, 5, steps, lead, seed=12):
        path = each.tokens
        for end in range(2, min(each.certain, steps - 1)):
            text = oracle.tokenizer.decode(path[end - 1 : end + 1])
            if not (text.isascii() and text.isprintable() and len(text) >= 2):
                continue
            first = next(n for n in range(1, steps) if text in oracle.tokenizer.decode(path[:n]))
            if first == end + 1 and oracle.eos_token_id not in path:
                return Stop(each.prompt, path[:first], path[end], text)
    raise NotRun("no prompt of this model generates a text of two tokens that can be a stop string")
