"""Mutants: backends and cores with one thing broken, which the suite must notice, and where.

Every clause of the contract has one. A mutant is *killed* if
the suite fails in exactly the clauses that it breaks: the first is the one that it is about, the
others cannot hold either. It *survives* if nothing fails, and *strays* if something else does.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from mutants.mutant import QUICK, Autopsy, Mutant, breaks, examine, quick, target

__all__ = ["QUICK", "Autopsy", "Mutant", "all_mutants", "breaks", "examine", "quick", "target"]

_MODULES = (
    "batches",
    "engines",
    "trainers",
    "loaders",
    "refits",
    "pairs",
    "plugins",
    "promises",
    "columns",
    "calls",
    "concurrent",
    "options",
    "randomness",
    "steps",
    "scorers",
    "resumers",
    "parts",
    "repeated",
    "lookalikes",
    "several_ranks",
    "adapters",
)


def all_mutants() -> Sequence[Mutant]:
    """Every mutant, in the order of the clauses they are about."""
    from mutants.mutant import registered
    from rl_conformance.catalogue import CLAUSES

    for module in _MODULES:
        importlib.import_module(f"{__name__}.{module}")
    order = list(CLAUSES)
    return sorted(registered, key=lambda mutant: order.index(mutant.breaks[0]))
