"""Documents that benchmarks of a refit write, and their tables; README.md says what is in them."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from refit_pair import Case, Contender, ContenderFailed, Memcpy, Memmove, TwoCopies
from rich.console import Console
from rich.table import Table

__all__ = ["document", "show"]

ONE_COPY = "one copy"
TWO_COPIES = "two copies"
IN_ONE_BLOCK = {
    ONE_COPY: Contender(
        ONE_COPY,
        {"torch": lambda folder, _: Memcpy(folder), "memmove": lambda folder, _: Memmove(folder)},
        "one thread, one process",
        kind="bound",
    ),
    TWO_COPIES: Contender(
        TWO_COPIES,
        {
            f"slots of {size} MiB": lambda folder, _, size=size: TwoCopies(folder, size << 20)
            for size in (4, 16, 64)
        },
        "pack and load at the same time, in two processes",
        kind="bound",
    ),
}
TENSOR_BY_TENSOR = Contender(
    "one copy, tensor by tensor", {"torch": lambda folder, _: Memcpy(folder)}, kind="bound"
)


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


def bounds(case: Case) -> list[dict[str, Any]]:
    """Rows of the bounds, for the same bytes in one block and tensor by tensor."""
    flat = replace(case, nbytes=case.total, count=1)
    rows = [bound(flat) for bound in IN_ONE_BLOCK.values()]
    return [*rows, TENSOR_BY_TENSOR(case)]


def document(
    case: Case,
    contenders: Iterable[Contender],
    *,
    said: Callable[[str], None] = lambda name: None,
) -> dict[str, Any]:
    """Measures bounds and contenders in one run.

    The bounds are measured before and after the others and the faster counts, so that a machine
    that was busy at one end flatters nobody.

    Raises:
        ContenderFailed: A bound could not be measured; a contender that fails has a row that
            says so.
        WrongBytes: A contender delivered other bytes.
    """
    result = {"host": host(), "bytes": case.total, "tensors": case.count}
    result |= {"dtype": case.dtype, "repeats": case.repeats}
    said("bounds")
    before = bounds(case)
    rows = []
    for contender in contenders:
        said(contender.name)
        try:
            rows.append(contender(case))
        except ContenderFailed as failure:
            rows.append({"what": contender.name, "kind": contender.kind, "failed": str(failure)})
    said("bounds")
    fastest = [
        min(pair, key=lambda row: row["seconds"]) for pair in zip(before, bounds(case), strict=True)
    ]
    add_ratios([*fastest, *rows], fastest)
    rows.sort(key=lambda row: row.get("seconds", float("inf")))
    return result | {"rows": [*fastest, *rows]}


def add_ratios(rows: list[dict[str, Any]], bounds: list[dict[str, Any]]) -> None:
    """Adds each row's rate as a fraction of the bounds' rates."""
    seconds = {row["what"]: row["seconds"] for row in bounds}
    for row in rows:
        if "seconds" in row:
            row["of_one_copy"] = seconds[ONE_COPY] / row["seconds"]
            row["of_two_copies"] = seconds[TWO_COPIES] / row["seconds"]


def show(document: Mapping[str, Any]) -> None:
    """Prints a document as a table."""
    table = Table(
        title=f"{document['bytes'] / 1e9:.2f} GB of {document['dtype']} "
        f"in {document['tensors']:,} tensors, best of {document['repeats']}"
    )
    left = ("what", "how")
    for heading in ("what", "ms", "median", "GB/s", "of one copy", "of two copies", "how"):
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
    console = Console()
    console.print(table)
    for row in document["rows"]:
        if row.get("note"):
            console.print(f"{row['what']}: {row['note']}", style="dim")
