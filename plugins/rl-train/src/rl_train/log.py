"""The log of a run: files of metrics and completions, progress on the terminal, a summary.

``metrics.jsonl`` has a line per step and per evaluation; :mod:`rl_train.metrics` has the names.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from datetime import timedelta
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypedDict

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rl_core.config import check_config
from rl_core.interfaces.constraints import AlsoCalled, Range
from rl_train.curves import plot
from rl_train.lines import append, as_json, as_number, cut, put_aside, read_metrics, writing
from rl_train.trackers import Trackers

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["LogConfig", "RunLog"]


class LogConfig(TypedDict, total=False):
    """Where the metrics of a run are written.

    Attributes:
        to: Trackers besides ``metrics.jsonl``, which is always written. Default: none.
        project: Name of the W&B project or the MLflow experiment. Default ``"rl-train"``.
        run_name: Name of the run there. Default: the name of the output directory.
        completions: How many completions of a step are written to ``completions.jsonl``. Default 4.
        completions_every: Every how many steps completions are written, from the first one on.
            Default 10.
        plot: Path of a picture of the curves, drawn at the end, such as ``"curves.svg"``; a
            relative path is in the output directory; None for no plot. Default ``"curves.png"``.
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
        resume: Whether the run goes on with what the folder has.
        tolerance: How large ``logprob_error/max`` may be.
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
        self._config = check_config(LogConfig, config, what="log")
        self._folder, self._tolerance, self._resume = Path(folder), tolerance, resume
        self._total_steps = total_steps
        self._console = console or Console(stderr=True)
        name = self._config.get("plot", "curves.png")
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
        self._trackers = Trackers(self._config, self._folder, as_json(settings or {}), self.note)

    def __enter__(self) -> Self:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
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
        """Writes the figures of a step, sends them to the trackers and shows some of them."""
        row = self._write(step, metrics)
        now, took = time.monotonic(), metrics.get("step_time")
        if self._last_time is not None:
            self._seconds.append(now - self._last_time)
        elif took is not None:
            self._seconds.append(took)
        self._last_time = now
        figures = [
            f"{label} {as_number(row[name]):{form}}"
            for name, (label, form) in _SHOWN.items()
            if name in row
        ]
        if self._seconds:
            left = timedelta(seconds=round(mean(self._seconds) * (self._total_steps - step)))
            shown = str(left).removeprefix("0:").removeprefix("0")
            figures += [f"{took or self._seconds[-1]:.1f} s", f"ETA {shown}"]
        self._progress.update(
            self._bar, completed=step, figures="  ".join([*figures[:1], *figures[-2:]])
        )
        if not self._console.is_terminal:
            self.note("  ".join([f"step {step}/{self._total_steps}", *figures]))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes and shows the figures of an evaluation, with ``eval_`` before their names."""
        row = self._write(
            step, {f"eval_{name.removeprefix('eval_')}": v for name, v in metrics.items()}
        )
        shown = (f"{name} {as_number(value):.3g}" for name, value in row.items() if "/" not in name)
        self.note("  ".join([f"eval {step}/{self._total_steps}", *shown]))

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keeps a few completions of a step, spread over its rows, and shows two on a terminal.

        A row has ``prompt`` and ``completion`` (text or messages), ``rewards`` by name of the
        function, ``advantage`` and ``truncated``; other keys are kept too.
        """
        kept = min(self._config.get("completions", 4), len(rows))
        if not kept or (step != 1 and step % self._config.get("completions_every", 10)):
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
        self._console.out(text, highlight=False)

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
        rows = read_metrics(self._folder)
        steps = [row for row in rows if not any(name.startswith("eval_") for name in row)]
        table = Table("", "first", "last", "best", title=f"{len(steps)} steps")
        for name in ("reward", "loss", "rewards/margins", "eval_reward", "eval_loss"):
            of_name = [(row[name], int(row["step"])) for row in rows if name in row]
            if numbers := [pair for pair in of_name if math.isfinite(pair[0])]:
                best, at = (min if name.endswith("loss") else max)(
                    numbers, key=lambda pair: pair[0]
                )
                ends = (f"{of_name[0][0]:.4g}", f"{of_name[-1][0]:.4g}")
                table.add_row(name, *ends, f"{best:.4g} (step {at})")
        self._console.print(table)
        facts = Table.grid(padding=(0, 2))
        if errors := [row["logprob_error/max"] for row in steps if "logprob_error/max" in row]:
            # NaN is what JSON has for an infinite error.
            worst = max(math.inf if math.isnan(error) else error for error in errors)
            text = f"{worst:.1e}"
            if self._tolerance is not None:
                held = "within" if worst <= self._tolerance else "ABOVE"
                text += f", {held} the tolerance of {self._tolerance:.1e}"
            facts.add_row("largest log-prob error", text)
        timed = dict.fromkeys(name for row in steps for name in row if name.startswith("time/"))
        medians = [
            f"{name.removeprefix('time/').removesuffix('/seconds')} {median(seconds):.3g}"
            for name in (*timed, "refit/seconds", "step_time")
            if (seconds := [row[name] for row in steps if name in row])
        ]
        if medians:
            facts.add_row("median seconds", ", ".join(medians))
        whole = sum(row.get("step_time", 0.0) for row in steps)
        if whole and "num_tokens" in steps[-1]:
            facts.add_row("tokens per second", f"{steps[-1]['num_tokens'] / whole:,.0f}")
        places = {"figures": self._metrics, "completions": self._completions, "curves": self._plot}
        there = {name: p for name, p in places.items() if p and (p == self._plot or p.exists())}
        for name, place in {**there, **self._trackers.places()}.items():
            facts.add_row(name, str(place))
        self._console.print(facts, soft_wrap=True, highlight=False)

    def _write(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """Appends a line, then sends its figures on; returns them as they were written."""
        row = {
            name: int(value) if isinstance(value, int) else as_json(float(value))
            for name, value in metrics.items()
        }
        append(self._metrics, [{"step": step, "time": round(time.time(), 3), **row}])
        self._trackers.log(step, {name: v for name, v in row.items() if v is not None})
        return row


def _excerpt(value: Any, length: int = 400) -> str:
    """Text or messages, shortened and without control characters, for a cell of a table."""
    if not isinstance(value, str):
        value = "\n".join(f"{one['role']}: {one['content']}" for one in value)
    text = "".join(
        c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value
    )
    half = length // 2
    return text if len(text) <= length else f"{text[:half]} ... {text[-half:]}"
