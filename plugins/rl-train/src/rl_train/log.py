"""The log of a run: files of metrics and completions, progress on the terminal, a summary.

``metrics.jsonl`` has a line per step and per evaluation; :mod:`rl_train.metrics` has the names.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rl_core.config import check_config
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_train.curves import plot
from rl_train.lines import (
    LogError,
    append,
    as_json,
    as_number,
    cut,
    failed,
    put_aside,
    read_metrics,
)
from rl_train.metrics import generation_metrics
from rl_train.summary import print_summary
from rl_train.trackers import Trackers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LogConfig", "LogError", "RunLog", "generation_metrics"]


class LogConfig(TypedDict, total=False):
    """Where the metrics of a run are written.

    Attributes:
        to: Trackers besides ``metrics.jsonl``, which is always written. Default: none.
        project: Name of the W&B project or the MLflow experiment. Default ``"rl-train"``.
        run_name: Name of the run there. Default: the name of the output directory.
        completions: How many completions of a step are written to ``completions.jsonl``. Default 4.
        completions_every: Every how many steps completions are written, from the first one on.
            Default 10.
        plot: Path of a PNG with the curves, drawn at the end; a relative path is in the output
            directory; None for no plot. Default ``"curves.png"``.
    """

    to: Annotated[
        list[Literal["tensorboard", "wandb", "mlflow"]],
        AlsoCalled("report_to trackers"),
        AlsoCalled("wandb wandb_enabled use_wandb", "[wandb]"),
        AlsoCalled("tensorboard tensorboard_enabled", "[tensorboard]"),
        AlsoCalled("mlflow mlflow_enabled", "[mlflow]"),
    ]
    project: Annotated[str, AlsoCalled("project_name wandb_project")]
    run_name: Annotated[str, AlsoCalled("experiment_name exp_name")]
    completions: Annotated[int, Range(ge=0)]
    completions_every: Annotated[int, Range(ge=1)]
    plot: str | None


#: Figures of a step that a person sees: by name what they are called there, and their format.
_SHOWN = {
    "reward": ("reward", ".3f"),
    "loss": ("loss", ".3g"),
    "rewards/margins": ("margin", ".3f"),
    "rewards/accuracies": ("accuracy", ".3f"),
    "kl": ("kl", ".1e"),
    "logprob_error/max": ("logprob_error", ".1e"),
}


class RunLog:
    """The log of one run, as a context manager.

    Entering it opens the trackers, and repairs what a killed process left half-written; a run that
    is not resumed first renames what another left in the folder to ``NAME.before``. On a terminal
    a progress bar is shown; elsewhere each step is a line on stderr.

    Args:
        folder: Of the run; made if it is not there.
        config: See :class:`LogConfig`.
        total_steps: Steps of the whole run.
        phase: What the bar is labelled with.
        settings: Configuration of the run, for the trackers.
        resume: Whether the run goes on with what the folder has; see :meth:`rewind`.
        tolerance: How large ``logprob_error/max`` may be, for the summary and the plot.
        console: Where a person sees progress. Default: stderr.

    Raises:
        ConfigError: A key is wrong, or a tracker is not installed or (on entering) does not start.
        LogError: A file cannot be written; by every method that writes.
    """

    def __init__(
        self,
        folder: str | Path,
        config: LogConfig,
        *,
        total_steps: int,
        phase: str = "GRPO",
        settings: Mapping[str, Any] | None = None,
        resume: bool = True,
        tolerance: float | None = None,
        console: Console | None = None,
    ) -> None:
        checked = check_config(LogConfig, config, what="log")
        self._folder, self._tolerance, self._resume = Path(folder), tolerance, resume
        self._total_steps = total_steps
        self._console = console or Console(stderr=True)
        self._kept, self._every = (
            checked.get("completions", 4),
            checked.get("completions_every", 10),
        )
        name = checked.get("plot", "curves.png")
        self._plot = None if name is None else self._folder / name
        self._metrics = self._folder / "metrics.jsonl"
        self._completions = self._folder / "completions.jsonl"
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            redirect_stdout=sys.stdout.isatty(),  # or else a file would lack what is printed
        )
        self._bar = self._progress.add_task(phase, total=total_steps, figures="")
        self._seconds = deque[float](maxlen=20)  # from one step to the next
        self._last_time: float | None = None
        self._trackers = Trackers(
            checked.get("to", []),
            self._folder,
            project=checked.get("project", "rl-train"),
            run_name=checked.get("run_name", self._folder.resolve().name),
            settings=as_json(settings or {}),
            note=self.note,
        )

    def __enter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise failed(self._folder, error) from error
        if not self._resume:
            for name in ("metrics.jsonl", "completions.jsonl", "trackers.json", "tensorboard"):
                put_aside(self._folder / name)
        for path in (self._metrics, self._completions):
            cut(path)
        self._trackers.open()
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._progress.stop()
        self._trackers.close(failed=kind is not None)
        if self._plot is None or not self._metrics.exists():
            return
        try:
            plot(self._folder, self._plot, self._tolerance)
        except ImportError:
            self.note("curves need matplotlib, which is not installed: pip install matplotlib")
        except Exception as error:  # the run is whole without it
            self.note(f"{self._plot}: the curves cannot be drawn: {error}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes the figures of a step, sends them to the trackers and shows some of them.

        Args:
            step: From 1.
            metrics: By name; what is not finite becomes null.
        """
        row = self._write(step, metrics)
        now = time.monotonic()
        if self._last_time is not None:
            self._seconds.append(now - self._last_time)
        elif "step_time" in metrics:
            self._seconds.append(float(metrics["step_time"]))
        self._last_time = now
        figures = [
            f"{label} {as_number(row[name]):{form}}"
            for name, (label, form) in _SHOWN.items()
            if name in row
        ]
        if self._seconds:
            took = float(metrics.get("step_time", self._seconds[-1]))
            left = mean(self._seconds) * max(self._total_steps - step, 0)
            figures += [f"{took:.1f} s", f"ETA {_clock(left)}"]
        self._progress.update(
            self._bar, completed=step, figures="  ".join([*figures[:1], *figures[-2:]])
        )
        if not self._console.is_terminal:
            self._print(f"step {step}/{self._total_steps}", *figures)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes and shows the figures of an evaluation, with ``eval_`` before their names.

        Args:
            step: The last one before the evaluation; 0 for none.
            metrics: By name, with the prefix or without.
        """
        row = self._write(
            step, {f"eval_{name.removeprefix('eval_')}": v for name, v in metrics.items()}
        )
        shown = (f"{name} {as_number(value):.3g}" for name, value in row.items() if "/" not in name)
        self._print(f"eval {step}/{self._total_steps}", *shown)

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keeps a few completions of a step, spread over its rows, and shows two on a terminal.

        Args:
            step: Only the first and every ``completions_every``-th are kept.
            rows: Each with ``prompt`` and ``completion`` (text or messages), ``rewards`` (by name
                of the function), ``advantage`` and ``truncated``; other keys are kept too.
        """
        kept = min(self._kept, len(rows))
        if not kept or (step != 1 and step % self._every):
            return
        chosen = [as_json(rows[i * len(rows) // kept]) for i in range(kept)]
        append(self._completions, ({"step": step, **row} for row in chosen))
        if not self._console.is_terminal:
            return
        table = Table("prompt", "completion", "reward", "advantage", title=f"step {step}")
        for row in chosen[:: max(kept - 1, 1)]:
            rewards = "\n".join(f"{k} {as_number(v):.3g}" for k, v in row["rewards"].items())
            cut = " [cut]" if row["truncated"] else ""
            cells = _excerpt(row["prompt"]), _excerpt(row["completion"]) + cut, rewards
            table.add_row(*map(Text, cells), f"{as_number(row['advantage']):+.2f}")
        self._console.print(table)

    def note(self, text: str) -> None:
        """Shows a line above the bar: a warning, a restart, where something was saved."""
        self._print(text)

    def rewind(self, step: int) -> None:
        """Takes the lines beyond a step out of the files, for a run that goes on from there.

        TensorBoard hides its figures beyond it. W&B and MLflow cannot: they keep those that they
        have, and get the later ones.
        """
        rows = read_metrics(self._folder)
        self._trackers.rewind(step, max((int(row["step"]) for row in rows), default=0))
        for path in (self._metrics, self._completions):
            cut(path, step)
        self._progress.update(self._bar, completed=step)
        self._last_time = None

    def summary(self) -> None:
        """Shows what the run came to, those of its steps included that other processes made."""
        places = {"figures": self._metrics, "completions": self._completions, "curves": self._plot}
        there = {
            name: str(p) for name, p in places.items() if p and (p == self._plot or p.exists())
        }
        rows = read_metrics(self._folder)
        print_summary(self._console, rows, self._tolerance, there | self._trackers.places())

    def _write(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Appends a line, then sends its figures on; returns them as they were written."""
        row = {
            name: int(value) if isinstance(value, int) else as_json(float(value))
            for name, value in metrics.items()
        }
        append(self._metrics, [{"step": step, "time": round(time.time(), 3), **row}])
        self._trackers.log(step, {name: v for name, v in row.items() if v is not None})
        return row

    def _print(self, *parts: str) -> None:
        self._console.out("  ".join(parts), highlight=False)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _excerpt(value: Any, length: int = 400) -> str:
    """Text or messages, shortened and without control characters, for a cell of a table."""
    if not isinstance(value, str):
        value = "\n".join(f"{one['role']}: {one['content']}" for one in value)
    text = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value
    )
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
