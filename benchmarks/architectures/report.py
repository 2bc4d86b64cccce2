"""Reports of tried architectures: JSON, which is read back, and one table of several runs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from architectures.outcome import Run, Status, Trial
from architectures.table import ARCHITECTURES
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["merge_runs", "read_runs", "to_json", "to_markdown"]

#: Version of the format. A key that is added, and may be absent, does not change it.
SCHEMA = 1

_MEANINGS = {
    Status.EXACT: "a refit brought every tensor bit for bit, and the engine's log-probs are the "
    "trainer's, before and after it",
    Status.REFUSED: "the backend refused refits of this model, with the reason",
    Status.NOT_STARTED: "the engine does not support the model on this machine, or could not "
    "generate with it",
    Status.WRONG: "no side reported an error, but weights or log-probs differ",
    Status.FAILS: "the engine died, hung or raised something unforeseen after its start",
    Status.NO_TRAINER: "transformers cannot make or run a tiny model of it",
}
_INTRODUCTION = """\
Which models an engine can take in a refit. `benchmarks/try_architectures.py` writes this page. For
each architecture it makes a tiny random checkpoint, starts the engine with it, compares log-probs
with transformers in float32 (or in the dtype that the row names), refits the engine with other
weights, reads the installed weights back, and compares log-probs again. If an engine keeps only
what it computed from some weights, these are not read back.
"""
_LIMITS = """
The table does not show how well a large model runs, or what happens on a GPU. On a GPU an engine
may rearrange weights that it leaves unchanged on a CPU. A refit then runs the engine's own code for
this again. If that does not give the same result, the backend refuses refits.
"""
_SHARED = "Models with the same reason share a number, and the text of the first of them.\n"
#: What differs between models in the text of one reason: directories, classes and processes.
_OF_ONE_MODEL = re.compile(r"[\w.]+-0\b|\w+(?=ForCausalLM|Config\b)|process \d+|input of size \d+")
_KEPT = ("suite", "plugin", "engine", "transformers", "torch", "python", "platform", "date")


class _File(msgspec.Struct):
    schema: int
    runs: list[Run]


def to_json(runs: Iterable[Run]) -> str:
    """All data of runs; :func:`read_runs` reads it back."""
    encoded = msgspec.json.encode(_File(SCHEMA, list(runs)))
    return msgspec.json.format(encoded, indent=2).decode() + "\n"


def read_runs(path: Path) -> list[Run]:
    """Reads a file that :func:`to_json` was written to.

    Raises:
        ConfigError: It cannot be read, or is no report of architectures.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=_File)
        if found.schema != SCHEMA:
            raise ValueError(f"it has schema {found.schema}, and this suite reads {SCHEMA}")
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{path} is not a report of architectures that this suite can read: {error}",
            fix="give files written by `benchmarks/try_architectures.py NAME --json FILE`",
            key="--merge",
        ) from error
    return found.runs


def merge_runs(runs: Iterable[Run]) -> list[Run]:
    """One run for each backend and version of its engine; what was tried last counts."""
    merged: dict[tuple[str, str], Run] = {}
    for run in sorted(runs, key=lambda each: str(each.environment.get("date"))):
        older = merged.get((run.backend, run.engine), run)
        trials = {trial.architecture: trial for trial in (*older.trials, *run.trials)}
        seconds = sum(trial.seconds for trial in trials.values())
        merged[run.backend, run.engine] = msgspec.structs.replace(
            run,
            trials=tuple(trials.values()),
            seconds=run.seconds if older is run else round(seconds, 1),
        )
    return sorted(merged.values(), key=lambda each: (each.backend, each.engine))


def to_markdown(runs: list[Run]) -> str:
    """A page with a row for each architecture and a column for each run."""
    trials = [{trial.architecture: trial for trial in run.trials} for run in runs]
    known = list(ARCHITECTURES)
    names = sorted(
        {name for column in trials for name in column},
        key=lambda name: (known.index(name) if name in known else len(known), name),
    )
    notes: dict[tuple[str, str], list[Trial]] = {}

    def cell(run: Run, trial: Trial | None) -> str:
        if trial is None:
            return ""
        if not trial.reason:
            return str(trial.status)
        cause = (run.engine, _OF_ONE_MODEL.sub("", trial.reason))
        notes.setdefault(cause, []).append(trial)
        mark = f"**{trial.status}**" if trial.status.bad else str(trial.status)
        return f"{mark} ({list(notes).index(cause) + 1})"

    rows = []
    for name in names:
        cells = [cell(run, column.get(name)) for run, column in zip(runs, trials, strict=True)]
        rows.append(" | ".join([f"| {name}", *cells]) + " |")
    seen = [status for status in Status if any(status in run.counts() for run in runs)]
    lines = [
        "# Architectures",
        "",
        _INTRODUCTION,
        *(f"- *{status}*: {_MEANINGS[status]}" for status in seen),
        _LIMITS,
        *(_summary(run) for run in runs),
        "",
        " | ".join(["| architecture", *(f"{run.backend}: {run.engine}" for run in runs)]) + " |",
        "|---" * (len(runs) + 1) + "|",
        *rows,
    ]
    if notes:
        lines += ["", "## Why", "", _SHARED]
        for number, ((engine, _), same) in enumerate(notes.items(), 1):
            who = ", ".join(f"**{trial.architecture}**" for trial in same)
            lines.append(f"{number}. {who}, {engine}: {_escaped(same[0].reason)}")
    return "\n".join(lines) + "\n"


def _summary(run: Run) -> str:
    counts = ", ".join(f"{count} {status}" for status, count in run.counts().items())
    kept = [key for key in _KEPT if run.environment.get(key) is not None]
    facts = ", ".join(f"{key} {run.environment[key]}" for key in kept)
    return f"- **{run.backend}**: {counts}, in {run.seconds:.0f} s. {facts}."


def _escaped(text: str) -> str:
    """As text that Markdown shows as it is."""
    for character in "\\`*_<>|[]":
        text = text.replace(character, f"\\{character}")
    return text
