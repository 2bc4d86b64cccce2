"""The curves of one run or several, as a picture. Needs matplotlib."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.errors import DataError
from rl_train.lines import read_metrics

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["plot"]

#: By title of an axis its figures, with the words of the legend.
_PANELS: dict[str, dict[str, str]] = {
    "Mean reward": {"reward": "", "eval_reward": "evaluation"},
    "Loss": {"loss": "", "eval_loss": "evaluation"},
    "Margin of rewards": {"rewards/margins": "", "eval_rewards/margins": "evaluation"},
    "Largest |engine - trainer| log-prob": {"logprob_error/max": ""},
    "Tokens of a completion, mean": {"completions/mean_length": ""},
    "KL to the reference": {"kl": ""},
    "Entropy": {"entropy": ""},
}
#: Where exact agreement is drawn, which has no place on a logarithmic axis.
_EXACT = 1e-9


def plot(
    folders: str | Path | Sequence[str | Path], path: str | Path, tolerance: float | None = None
) -> None:
    """Draws reward (or loss), log-prob error, length, KL and entropy over the steps.

    Args:
        folders: Of a run, or of several that are drawn over each other; with ``metrics.jsonl``.
        path: Of the picture, ``.png`` or ``.svg``; its folder is made if it is not there.
        tolerance: How large the log-prob error may be: a line, and how far below it the runs are.

    Raises:
        DataError: A folder has no figures.
        ImportError: matplotlib is not installed.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    runs = [Path(f) for f in ([folders] if isinstance(folders, str | Path) else folders)]
    rows_of = [read_metrics(folder) for folder in runs]
    for folder, rows in zip(runs, rows_of, strict=True):
        if not rows:
            raise DataError(
                f"{folder / 'metrics.jsonl'} has no figures to draw",
                fix="give the output folder of a run that has made a step",
            )
    names = set(chain.from_iterable(row for rows in rows_of for row in rows))
    panels = [
        (title, drawn)
        for title, drawn in _PANELS.items()
        if not names.isdisjoint(drawn) and not (title == "Loss" and "reward" in names)
    ]
    height = max(math.ceil(len(panels) / 2), 1)
    figure, grid = plt.subplots(
        height, 2, figsize=(10, 3.5 * height), layout="constrained", squeeze=False
    )
    for unused in grid.flat[len(panels) :]:
        unused.remove()
    for (title, drawn), axes in zip(panels, grid.flat, strict=False):
        axes.set(title=title, xlabel="step")
        axes.grid(alpha=0.3)
        worst, lost = 0.0, False
        for i, rows in enumerate(rows_of):
            for name, words in drawn.items():
                points = [(row["step"], row[name]) for row in rows if name in row]
                if name == "logprob_error/max":
                    lost = lost or any(math.isnan(y) for _, y in points)  # infinite, or NaN
                    worst = max([worst, *(y for _, y in points if not math.isnan(y))])
                    points = [(x, max(y, _EXACT)) for x, y in points]
                label = [runs[i].resolve().name] * (len(runs) > 1) + [words] * bool(words)
                axes.plot(
                    [x for x, _ in points],
                    [y for _, y in points],
                    f"C{i}--" if words else f"C{i}-",
                    marker="o" if words or len(points) == 1 else None,
                    markersize=4,
                    label=", ".join(label) if points else "",
                )
        if "logprob_error/max" in drawn:
            axes.set_yscale("log")
            if tolerance is not None:
                times = tolerance / max(worst, _EXACT)
                apart = f"{times:,.0f} times the largest" if times >= 1 and not lost else "EXCEEDED"
                words = f"tolerance {tolerance:.1e}: {apart}"
                axes.axhline(tolerance, color="red", linestyle="--", label=words)
                axes.set_ylim(top=max(tolerance, worst) * 4)
        if any(axes.get_legend_handles_labels()[1]):
            axes.legend()
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
