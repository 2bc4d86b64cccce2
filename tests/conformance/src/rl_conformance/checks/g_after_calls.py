"""Calls leave nothing behind for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.batches import pad_rows
from rl_conformance.checks.common import Witness, text_row
from rl_conformance.expect import NotRun
from rl_conformance.registry import check
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


#: Of the engine that the calls of this module go to. Nothing ends a row by chance.
_CONFIG: dict[str, Any] = {"max_new_tokens": 4, "temperature": 1.5, "eos_token_id": []}


def _with_stop_strings(ctx: Context) -> BatchedDataDict[Any]:
    _, word = text_row(ctx)
    return ctx.prompts(5, 8, stop_strings=[[word], [word, "e"]])


def _without_room(ctx: Context) -> BatchedDataDict[Any]:
    limit = ctx.oracle().context
    if limit > 512:
        raise NotRun("the context of the given model is longer than 512 tokens", excused=True)
    return ctx.prompts(limit, limit - 1, limit - 2)


#: By clause the cases: what is generated for, and how.
_CALLS: dict[str, dict[str, dict[str, Any]]] = {
    "G6": {"rows_without_room": {"rows": _without_room}},
    "G7": {"stop_strings": {"rows": _with_stop_strings}},
    "G8": {
        "a_greedy_call": {"rows": lambda ctx: ctx.prompts(5, 8)},
        "a_longer_call": {"rows": lambda ctx: ctx.prompts(70, 90, 61)},
    },
    "G9": {
        "a_seeded_call": {
            "rows": lambda ctx: BatchedDataDict(
                {**ctx.prompts(5, 8), "seed": torch.tensor([1000, 0])}
            ),
            "argmax": False,
        },
        "an_unseeded_call": {"rows": lambda ctx: ctx.prompts(5, 8), "argmax": False},
    },
    "G12": {
        "more_rows": {"rows": lambda ctx: ctx.prompts(*[4, 6, 3, 5] * 8)},
        "one_row": {"rows": lambda ctx: ctx.prompts(1)},
        "no_rows": {"rows": lambda _: pad_rows([])},
    },
}


def earlier_calls_leave_no_trace(
    ctx: Context, rows: Callable[[Context], BatchedDataDict[Any]], argmax: bool = True
) -> None:
    """After a call of another kind, greedy, seeded and stopped rows are what they were."""
    generation = ctx.generation(**_CONFIG)
    witness = Witness(ctx, generation)
    for _ in range(3):
        data = rows(ctx)
        generation.generate(data, greedy=argmax)
        witness.testify(f"prompts of {data['input_lengths'].tolist()} tokens, greedy: {argmax}")


for _clause, _cases in _CALLS.items():
    check(_clause, cases=_cases, timeout_s=240.0)(earlier_calls_leave_no_trace)
