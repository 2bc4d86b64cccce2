"""Which mutants a short run looks at: a sample, in turn, and those that a change may concern."""

from __future__ import annotations

import datetime as dt
import re
import subprocess
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence
    from pathlib import Path

    from mutants import Mutant

__all__ = ["SAMPLES", "changed_files", "number_of", "sampled", "touched"]

#: Into so many samples all mutants are dealt. Clauses with as many are in each of them.
SAMPLES = 16

_MAIN = ("origin/main", "main")


def number_of(root: Path) -> int:
    """The sample whose turn it is: by the commit that is checked out, or else by the date."""
    commit = _git(root, "rev-parse", "HEAD")
    turn = int(commit[0], 16) if commit else dt.datetime.now(dt.UTC).toordinal()
    return turn % SAMPLES


def sampled(mutants: Sequence[Mutant], number: int) -> list[Mutant]:
    """One sample: every sixteenth mutant, so that those of one clause are in different ones.

    Args:
        mutants: All of them, in the order of their clauses.
        number: Of the sample, from 0.
    """
    return list(mutants[number % SAMPLES :: SAMPLES])


def touched(mutants: Sequence[Mutant], changed: Collection[str]) -> list[Mutant]:
    """The mutants about clauses whose checks are in files that changed, or which are there.

    Args:
        mutants: All of them.
        changed: Paths from the root of the checkout.
    """
    from rl_conformance.registry import all_checks

    files = (re.sub("^tests/conformance/(src|tests)/", "", path) for path in changed)
    modules = {file.removesuffix(".py").replace("/", ".") for file in files}
    clauses = {c.clause.id for c in all_checks() if c.function.__module__ in modules}
    return [m for m in mutants if m.breaks[0] in clauses or m.module in modules]


def changed_files(root: Path) -> list[str]:
    """What differs from where this branch left ``main``; on it, from the commit before.

    Empty where git cannot tell, as in a checkout of one commit.
    """
    left = next(filter(None, (_git(root, "merge-base", "HEAD", m) for m in _MAIN)), [])
    if left == _git(root, "rev-parse", "HEAD"):
        left = ["HEAD~1"]
    return _git(root, "diff", "--name-only", *left) if left else []


def _git(root: Path, *command: str) -> list[str]:
    """The lines that git prints, or none if it fails."""
    try:
        done = subprocess.run(
            ["git", *command], cwd=root, capture_output=True, text=True, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []
