"""The one distribution test the suite needs."""

from __future__ import annotations

import torch

__all__ = ["chi_square_p_value"]

#: Cells with a smaller expected count are put together, so that the statistic is chi-square.
_SMALLEST_CELL = 5.0


def chi_square_p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Probability of a worse fit than this, if the counts follow the probabilities.

    Pearson's statistic; the upper tail of the chi-square distribution with d degrees of freedom
    is the regularised incomplete gamma function Q(d/2, x/2).

    Args:
        counts: ``[V]`` how often each value was drawn.
        probabilities: ``[V]`` float64, summing to 1.

    Returns:
        The p-value; 1 if the distribution has one cell only.
    """
    expected = probabilities.double() * int(counts.sum())
    large = expected >= _SMALLEST_CELL
    observed = torch.cat([counts[large].double(), counts[~large].sum()[None].double()])
    expected = torch.cat([expected[large], expected[~large].sum()[None]])
    if expected[-1] < _SMALLEST_CELL:
        observed, expected = _merge_last(observed), _merge_last(expected)
    if len(expected) < 2:
        return 1.0
    statistic = ((observed - expected).square() / expected).sum()
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, statistic / 2))


def _merge_last(cells: torch.Tensor) -> torch.Tensor:
    """Adds the rest, which is too small for a cell of its own, to the cell before it."""
    if len(cells) < 2:
        return cells
    return torch.cat([cells[:-2], cells[-2:].sum()[None]])
