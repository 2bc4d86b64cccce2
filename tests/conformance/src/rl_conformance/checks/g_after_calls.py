"""Calls leave nothing behind for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import pad_rows
from rl_conformance.checks.common import Witness, text_row
from rl_conformance.expect import NotRun
from rl_conformance.registry import check

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context
    from rl_core.interfaces import GenerationInterface


#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


def _greedy(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(5, 8), greedy=True)


def _seeded(ctx: Context, generation: GenerationInterface) -> None:
    data = ctx.prompts(5, 8)
    data["seed"] = torch.tensor([1000, 0])
    generation.generate(data)


def _unseeded(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(5, 8))


def _stop_strings(ctx: Context, generation: GenerationInterface) -> None:
    _, word = text_row(ctx)
    generation.generate(ctx.prompts(5, 8, stop_strings=[[word], [word, "e"]]), greedy=True)


def _longer(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(70, 90, 61), greedy=True)


def _without_room(ctx: Context, generation: GenerationInterface) -> None:
    limit = ctx.oracle().context
    if limit > 512:
        raise NotRun("the model's context is a long one", excused=True)
    generation.generate(ctx.prompts(limit, limit - 1, limit - 2), greedy=True)


def _more_rows(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(*[4, 6, 3, 5] * 8), greedy=True)


def _one_row(ctx: Context, generation: GenerationInterface) -> None:
    generation.generate(ctx.prompts(1), greedy=True)


def _no_rows(ctx: Context, generation: GenerationInterface) -> None:
    del ctx
    generation.generate(pad_rows([]), greedy=True)


_CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "G6": {"rows_without_room": {"call": _without_room}},
    "G7": {"stop_strings": {"call": _stop_strings}},
    "G8": {"a_greedy_call": {"call": _greedy}, "a_longer_call": {"call": _longer}},
    "G9": {"a_seeded_call": {"call": _seeded}, "an_unseeded_call": {"call": _unseeded}},
    "G12": {
        "more_rows": {"call": _more_rows},
        "one_row": {"call": _one_row},
        "no_rows": {"call": _no_rows},
    },
}


def nothing_is_left_of(ctx: Context, call: Callable[[Context, GenerationInterface], None]) -> None:
    """After a call of another kind, greedy, seeded and stopped rows are what they were."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    for _ in range(3):
        call(ctx, generation)
        witness.testify(call.__name__.strip("_"))


for _clause, _cases in _CALLS.items():
    check(_clause, cases=_cases, timeout_s=240.0)(nothing_is_left_of)
