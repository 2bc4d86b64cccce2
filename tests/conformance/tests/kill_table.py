"""The kill table: which mutant the suite noticed, and where.

``python tests/conformance/tests/kill_table.py`` runs the suite against all mutants.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from mutants import Autopsy, all_mutants, examine
from rich.console import Console
from rich.progress import track
from rich.table import Table

_EXPLAINED = """\
A mutant is a backend, or a core, with one bug. It is killed if the suite fails in the clauses that
cannot hold with it, and in no other. What looks at it are the checks of those clauses' chapters
that take no processes, thousands of draws or dozens of models; or a selection, where only such
checks show the bug, or where it breaks all that comes after."""
_COLOURS = {"killed": "green", "survived": "red", "strayed": "yellow"}


def kill_table(autopsies: Sequence[Autopsy]) -> Table:
    """For a terminal."""
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


def main(
    k: Annotated[str, typer.Option("-k", help="Only those with this in their name.")] = "",
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="bfloat16 has wider tolerances.")
    ] = "float32",
    as_json: Annotated[Path | None, typer.Option("--json", help="Write it as JSON.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write it as Markdown.")] = None,
) -> None:
    """Tests the suite: it must fail where a mutant is broken, and nowhere else."""
    chosen = [mutant for mutant in all_mutants() if k.lower() in mutant.name.lower()]
    if not chosen:
        raise typer.BadParameter(f"no mutant has {k!r} in its name")
    console = Console(stderr=True)
    autopsies = []
    for mutant in track(chosen, "mutants", console=console, transient=True):
        autopsies.append(found := examine(mutant, dtype))
        if not console.is_terminal:  # a log: a line for each
            what = f"{found.verdict:<8} {mutant.breaks[0]} {mutant.name}"
            print(f"{what} ({found.seconds:.1f} s)", flush=True)
    Console().print(kill_table(autopsies))
    if as_json is not None:
        as_json.write_text(json.dumps([_plain(one) for one in autopsies], indent=1) + "\n")
    if markdown is not None:
        markdown.write_text(_markdown(autopsies))
    raise typer.Exit(int(any(autopsy.verdict != "killed" for autopsy in autopsies)))


if __name__ == "__main__":
    typer.run(main)
