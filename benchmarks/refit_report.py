"""Documents that benchmarks of a refit write, and their tables; README.md says what is in them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from refit_bounds import IN_ONE_BLOCK, ONE_COPY, TENSOR_BY_TENSOR, TWO_COPIES
from refit_pair import Case, Contender, ContenderFailed
from rich.console import Console
from rich.table import Table

__all__ = ["document", "host", "show"]


def host() -> dict[str, Any]:
    """What the figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_1m": os.getloadavg()[0],
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "ray", "safetensors", "pyzmq")},
    }


def document(
    case: Case,
    peers: Iterable[Contender],
    ours: Iterable[Contender] = (),
    *,
    said: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measures bounds, peers and ours in one run.

    Bounds and ours are measured before the peers and after them and the faster counts, so that a
    machine that was busy at one end flatters nobody.

    Raises:
        ContenderFailed: A bound could not be measured; a contender that fails has a row that
            says so.
        WrongBytes: A contender delivered other bytes.
    """
    flat = replace(case, nbytes=case.total, count=1)
    bounds = [*((bound, flat) for bound in IN_ONE_BLOCK), (TENSOR_BY_TENSOR, case)]
    twice = [*bounds, *((one, case) for one in ours)]
    result = {"host": host(), "bytes": case.total, "tensors": case.count}
    result |= {"dtype": case.dtype, "repeats": case.repeats}
    before = [measured(*one, said) for one in twice]
    rows = [measured(one, case, said) for one in peers]
    after = [measured(*one, said) for one in twice]
    fastest = [min(pair, key=seconds_of) for pair in zip(before, after, strict=True)]
    limits, rows = fastest[: len(bounds)], [*fastest[len(bounds) :], *rows]
    add_ratios([*limits, *rows], limits)
    rows.sort(key=seconds_of)
    return result | {"rows": [*limits, *rows]}


def measured(contender: Contender, case: Case, said: Callable[[str], None]) -> dict[str, Any]:
    """The contender's row; for one that fails, and is no bound, a row that says so."""
    said(contender.name)
    try:
        return contender(case)
    except ContenderFailed as failure:
        if contender.kind == "bound":
            raise
        return {"what": contender.name, "kind": contender.kind, "failed": str(failure)}


def seconds_of(row: Mapping[str, Any]) -> float:
    """Of the best round; infinite for a row that failed."""
    return float(row.get("seconds", "inf"))


def add_ratios(rows: list[dict[str, Any]], bounds: list[dict[str, Any]]) -> None:
    """Adds each row's rate as a fraction of the bounds' rates."""
    seconds = {row["what"]: row["seconds"] for row in bounds}
    for row in rows:
        if "seconds" in row:
            row["of_one_copy"] = seconds[ONE_COPY] / row["seconds"]
            row["of_two_copies"] = seconds[TWO_COPIES] / row["seconds"]
            if row["kind"] == "ours":
                row["bound"] = ONE_COPY if row["copies"] == 1 else TWO_COPIES
                row["of_bound"] = seconds[row["bound"]] / row["seconds"]


def show(document: Mapping[str, Any], console: Console) -> None:
    """Prints a document as a table."""
    table = Table(
        title=f"{document['bytes'] / 1e9:.2f} GB of {document['dtype']} "
        f"in {document['tensors']:,} tensors, best of {document['repeats']}"
    )
    left = ("what", "how")
    for heading in (
        "what",
        "ms",
        "median",
        "GB/s",
        "of one copy",
        "of two copies",
        "how",
    ):
        table.add_column(heading, justify="left" if heading in left else "right")
    for row in document["rows"]:
        if "failed" in row:
            table.add_row(row["what"], *["failed"] + [""] * 4, row["failed"])
            continue
        table.add_row(
            row["what"],
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['median_seconds'] * 1e3:.1f}",
            f"{row['gb_per_s']:.2f}",
            f"{row['of_one_copy']:.2f}",
            f"{row['of_two_copies']:.2f}",
            row["way"],
        )
    console.print(table)
    for row in document["rows"]:
        if row.get("note"):
            console.print(f"{row['what']}: {row['note']}", style="dim")
