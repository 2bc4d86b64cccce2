"""What an engine generates now, to be compared with what it generated before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import same, same_tensor

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface

__all__ = ["certain_prompts", "greedy", "made_by", "same_output"]

_LENGTHS = (5, 9, 3)
#: Tokens of each row that no rounding changes.
_STEPS = 4


def certain_prompts(ctx: Context, *, seed: int | None = None) -> BatchedDataDict[Any]:
    """Three prompts with first greedy tokens that are certain.

    Args:
        ctx: Of the check.
        seed: Of the tiny model that makes them certain. Default: the main model of the run does.
    """
    path = None if seed is None else ctx.model("qwen2", seed=seed)
    rows = ctx.certain(*_LENGTHS, steps=_STEPS, path=path)
    return ctx.batch([row.prompt for row in rows])


def greedy(
    ctx: Context, generation: GenerationInterface, *, seed: int | None = None
) -> BatchedDataDict[Any]:
    """The engine's greedy output for :func:`certain_prompts`."""
    return generation.generate(certain_prompts(ctx, seed=seed), greedy=True)


def same_output(ctx: Context, got: BatchedDataDict[Any], expected: BatchedDataDict[Any]) -> None:
    """Fails unless two outputs of :func:`greedy` have the same certain tokens and log-probs.

    Not the same bits: on a GPU they depend on which rows an engine computes together, and that may
    be another choice each time.
    """
    ours, theirs = (_certain(output, "output_ids").tolist() for output in (got, expected))
    same(ours, theirs, f"the first {_STEPS} tokens")
    ctx.measure_error(_certain(got, "logprobs"), _certain(expected, "logprobs"))


def made_by(output: BatchedDataDict[Any], version: int, origin: int, rows: str = "rows") -> None:
    """Fails unless all rows carry this version and this origin."""
    size = len(output["generation_lengths"])
    for key, expected in (("weights_version", version), ("weights_origin", origin)):
        same_tensor(output[key], torch.full((size,), expected), f"{key} of {rows}")


def _certain(output: BatchedDataDict[Any], column: str) -> torch.Tensor:
    """``[3, 4]``."""
    return torch.stack([output[column][row, n : n + _STEPS] for row, n in enumerate(_LENGTHS)])
