"""The kill table: which mutant the suite noticed, and where."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.table import Table

    from rl_conformance.mutants.mutant import Autopsy

__all__ = ["kill_table", "write_table"]

_EXPLAINED = """\
A mutant is a backend, or a core, with one bug. It is killed if the suite fails in the clauses that
cannot hold with it, and in no other. What looks at it are the checks of those clauses' chapters
that take no processes, thousands of draws or dozens of models; or a selection, where only such
checks show the bug, or where it breaks all that comes after."""
_COLOURS = {"killed": "green", "survived": "red", "strayed": "yellow"}


def kill_table(autopsies: Sequence[Autopsy]) -> Table:
    """For a terminal."""
    from rich.table import Table

    table = Table("clause", "mutant", "", "failed", "checks", "s", box=None)
    table.caption = _total(autopsies)
    for autopsy in autopsies:
        verdict = autopsy.verdict
        table.add_row(
            autopsy.mutant.breaks[0],
            autopsy.mutant.name,
            f"[{_COLOURS[verdict]}]{verdict}[/]",
            " ".join(sorted(autopsy.failed)),
            f"{sum(map(len, autopsy.failed.values()))} of {autopsy.looked}",
            f"{autopsy.seconds:.1f}",
        )
    return table


def write_table(
    autopsies: Sequence[Autopsy], as_json: Path | None, as_markdown: Path | None
) -> None:
    """Writes it to files."""
    if as_json is not None:
        as_json.write_text(json.dumps([_plain(one) for one in autopsies], indent=1) + "\n")
    if as_markdown is not None:
        as_markdown.write_text(_markdown(autopsies))


def _plain(autopsy: Autopsy) -> dict[str, Any]:
    return {
        "mutant": autopsy.mutant.name,
        "bug": autopsy.mutant.bug,
        "breaks": list(autopsy.mutant.breaks),
        "dtype": autopsy.dtype,
        "verdict": autopsy.verdict,
        "failed": autopsy.failed,
        "looked": autopsy.looked,
        "seconds": round(autopsy.seconds, 2),
    }


def _total(autopsies: Sequence[Autopsy]) -> str:
    from rl_conformance.mutants import all_mutants

    killed = sum(autopsy.verdict == "killed" for autopsy in autopsies)
    total = f"{killed} of {len(autopsies)} mutants are killed in {autopsies[0].dtype}."
    if len(autopsies) == len(all_mutants()):
        return total
    return f"{total} A part only: there are {len(all_mutants())}."


def _markdown(autopsies: Sequence[Autopsy]) -> str:
    rows = [
        f"| {a.mutant.breaks[0]} | `{a.mutant.name}` | {a.mutant.bug} | {a.verdict} "
        f"| {' '.join(sorted(a.failed))} | {sum(map(len, a.failed.values()))} of {a.looked} |"
        for a in autopsies
    ]
    return "\n".join(
        [
            "# Kill table of the conformance suite",
            "",
            _total(autopsies),
            _EXPLAINED,
            "",
            "| clause | mutant | bug | | failed in | checks that failed |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )
