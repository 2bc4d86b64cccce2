"""A1 again: what is measured, against arithmetic by hand."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.diagnostics.agreement import (
    measure_log_probability_consistency,
    validate_log_probability_consistency,
)
from rl_conformance.expect import raises, require
from rl_conformance.registry import CORE, check
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError

if TYPE_CHECKING:
    from rl_conformance.context import Context

#: By row: tokens of the prompt, then how far each generated token is off.
Off = list[tuple[int, list[float]]]

_GOOD: Off = [(3, [0.0] * 5), (1, [0.0, 0.0])]


class _Pair:
    """Test double: engine and policy whose log-probs differ as given, and off the mask wildly."""

    def __init__(self, greedy: Off, sampled: Off) -> None:
        self.off = {True: greedy, False: sampled}
        self.last: torch.Tensor | None = None

    def prepare_for_generation(self) -> bool:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        return True

    def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict[Any]:
        """See :class:`rl_core.interfaces.GenerationInterface`."""
        rows = self.off[greedy]
        width = max(prompt + len(off) for prompt, off in rows) + 2
        ours = torch.full((len(rows), width), -1.0)
        theirs = torch.full((len(rows), width), -30.0)
        for row, (prompt, off) in enumerate(rows):
            for place, value in enumerate(off, prompt):
                theirs[row, place] = -1.0 + (value if place % 2 else -value)
        self.last = theirs
        lengths = torch.tensor([len(off) for _, off in rows])
        ends = torch.tensor([prompt for prompt, _ in rows]) + lengths
        return BatchedDataDict(
            {
                "output_ids": torch.ones(len(rows), width, dtype=torch.int64),
                "logprobs": ours,
                "generation_lengths": lengths,
                "unpadded_sequence_lengths": ends,
            }
        )

    def get_logprobs(self, data: Any, **_: Any) -> BatchedDataDict[Any]:
        """See :class:`rl_core.interfaces.PolicyInterface`."""
        return BatchedDataDict({"logprobs": self.last})


def _by_hand(rows: Off) -> float:
    off = [abs(value) for _, values in rows for value in values]
    return sum(math.exp(value) for value in off) / len(off)


_CASES: dict[str, tuple[Off, Off]] = {
    "nothing is off": (_GOOD, _GOOD),
    "one token of many": ([(2, [0.0] * 39 + [1.0])], _GOOD),
    "a short row is off": ([(2, [0.5]), (4, [0.0] * 30)], _GOOD),
    "a long row is off": ([(2, [0.0]), (4, [0.06] * 30)], _GOOD),
    "greedy alone": ([(1, [0.08] * 9)], [(1, [0.0] * 9)]),
    "sampled alone": ([(1, [0.0] * 9)], [(1, [0.12] * 9)]),
    "both, by turns": ([(1, [0.3, 0.0] * 3)], [(2, [0.0, 0.1] * 4)]),
    "rare and large": ([(1, [0.0] * 99 + [3.0])], [(1, [0.0] * 99 + [1.5])]),
    "a row without tokens": ([(4, []), (3, [0.02] * 4)], [(4, []), (3, [0.03] * 2)]),
}


@check("A1", needs=(CORE,))
def the_error_is_the_mean_of_the_exponentials(ctx: Context) -> None:
    """Over generated tokens, whatever their rows; then the mean of greedy and sampled."""
    for name, (greedy, sampled) in _CASES.items():
        pair: Any = _Pair(greedy, sampled)
        expected = (_by_hand(greedy) + _by_hand(sampled)) / 2
        for threshold in (1.05, expected + 1e-4, max(expected - 1e-4, 1e-9)):
            found = measure_log_probability_consistency(pair, pair, BatchedDataDict(), threshold)
            near = abs(found.error - expected) < 1e-6
            require(near, f"{name}: the error is {found.error}, by hand it is {expected}")
            said = validate_log_probability_consistency(pair, pair, BatchedDataDict(), threshold)
            passes = expected < threshold
            require(said is passes, f"{name}: {said} at {threshold}, the error is {expected}")
        default = validate_log_probability_consistency(pair, pair, BatchedDataDict())
        require(default is (expected < 1.05), f"{name}: {default} without a threshold")


@check("A1", needs=(CORE,))
def what_is_no_number_does_not_agree(ctx: Context) -> None:
    """NaN and infinity on one token, greedy or sampled, give False."""
    for value in (math.nan, math.inf):
        for bad in (0, 1):
            modes: list[Off] = [_GOOD, _GOOD]
            modes[bad] = [(2, [0.0, value, 0.0])]
            pair: Any = _Pair(*modes)
            said = validate_log_probability_consistency(pair, pair, BatchedDataDict())
            require(said is False, f"log-probs that are off by {value} are called consistent")


@check("A1", needs=(CORE,))
def each_mode_needs_a_token(ctx: Context) -> None:
    """Nothing generated in one of the modes is an error, also where the other is right."""
    nothing: Off = [(3, []), (2, [])]
    for modes in ((nothing, _GOOD), (_GOOD, nothing)):
        pair: Any = _Pair(*modes)
        with raises(DataError):
            validate_log_probability_consistency(pair, pair, BatchedDataDict())
