"""``rl explain``: the text of a clause of the contract, or what an error class means."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import TYPE_CHECKING

from rl_cli.command import Command
from rl_conformance.catalogue import CLAUSES
from rl_core import errors
from rl_core.config import nearest
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["app", "explain"]


def explain(name: str) -> str:
    """The text of a clause of the contract, or the description of an error class.

    Args:
        name: A clause (``"G7"``), a check of it (``"G7/stop_token_ends_the_row_and_is_kept"``), or
            a class of :mod:`rl_core.errors`.

    Raises:
        ConfigError: There is no such clause or class; names the nearest.
    """
    clause = name.partition("/")[0].upper()
    if clause in CLAUSES:
        text = files("rl_conformance").joinpath("contract.md").read_text(encoding="utf-8")
        found = re.search(rf"^- {clause} .*(?:\n  .*)*", text, re.MULTILINE)
        words = re.sub(r"\s+", " ", found[0][2:]) if found else clause
        entry = CLAUSES[clause]
        binds = "every backend" if entry.level == "must" else f"backends with {entry.capability}"
        return f"{words}\n\nIt binds {'rl-core alone' if entry.core else binds}."
    if name in errors.__all__:
        kind = getattr(errors, name)
        above = ", ".join(base.__name__ for base in kind.__mro__[1:-2])
        return f"{name} ({above})\n\n{(kind.__doc__ or '').strip()}"
    known = [*CLAUSES, *errors.__all__]
    close = nearest(name, known)
    fix = f"write {close}" if close else "`rl conformance list` shows all clauses"
    raise ConfigError(f"there is no clause or error {name!r}", fix=fix, key="name")


def show(options: argparse.Namespace) -> None:
    import shutil
    import textwrap

    width = max(40, min(100, shutil.get_terminal_size().columns) - 1)
    for paragraph in explain(options.name).split("\n\n"):
        print(textwrap.fill(paragraph, width), end="\n\n")
    if "/" in options.name:
        print(f"Run this check alone: rl conformance run NAME -k {options.name}")


app = Command(
    "rl explain",
    "Show the text of a clause of the contract, or what an error means",
    "rl explain G7\nrl explain RefitCorrupted",
    run=show,
)
app.add_argument("name", metavar="CLAUSE", help="a clause, a check id, or an error class")
