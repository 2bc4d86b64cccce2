# ruff: noqa: D102
"""Refits from several ranks of a trainer, each of which sends what it has, into sharded engines.

    python benchmarks/bench_refit_ranks.py [--only rows,columns,growth,fsdp] [--gb 0.5] [--quick]
                                           [--json FILE]

Every rank and every engine is a process of its own with one torch thread. A rank has some rows of
every tensor. ``rows``: two ranks, and two engines of which each keeps the rows of one rank.
``columns``: each engine keeps half of the columns. ``growth``: one, two and four ranks, and one
engine that keeps all. ``fsdp``: a module with ``fully_shard``, refit into a whole module in the
process of rank 0.

A time runs from the first process's start to the last one's end. The methods take turns, each with
a round to warm up before the one that is timed; the best counts, as a multiple of one plain copy:
every engine copies as many bytes as it keeps out of memory that ranks share, all at once. In the
end the engines' tensors are cleared, refit and compared once more for each method.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from refit_members import DEADLINE_S, GRACE_S, Case, Engine, ModuleRank, Process, Rank
from refit_pair import CONTEXT, SHARED_MEMORY, ContenderFailed, WrongBytes, ended
from refit_report import host
from rich.console import Console
from rich.table import Table

from rl_core.ports import free_port

BLOCKS = "plain copy"
COLLECTIVE = [
    {"transport": "collective", "mode": "packed", "verify": verify} for verify in ("none", "wire")
]

#: Seconds of one round, and what the processes returned.
Method: TypeAlias = Callable[[], tuple[float, list[Any]]]


def serve(kind: type[Process], args: tuple[Any, ...], pipe: Any) -> None:
    """A process, until the other side closes the pipe."""
    with suppress(EOFError, BrokenPipeError):
        member = kind(*args)  # type: ignore[call-arg]
        while request := pipe.recv():
            name, given = request
            try:
                pipe.send((None, getattr(member, name)(*given)))
            except Exception:
                pipe.send((traceback.format_exc(), None))
    os._exit(0)  # threads of gloo may wait for a process that has ended


class Group:
    """The processes that are measured together."""

    def __init__(self, case: Case, kinds: list[type[Process]]) -> None:
        self.case, self.kinds, self.pipes = case, kinds, list[Any]()

    @contextmanager
    def running(self) -> Iterator[None]:
        port, processes = free_port(), []
        with tempfile.TemporaryDirectory(prefix="refit-", dir=SHARED_MEMORY) as folder:
            for number, kind in enumerate(self.kinds):
                ours, theirs = CONTEXT.Pipe()
                args = kind, (self.case, number, port, Path(folder)), theirs
                processes.append(CONTEXT.Process(target=serve, args=args))
                self.pipes.append(ours)
            with ended(processes):
                for process in processes:
                    process.start()
                yield
                for pipe in self.pipes:
                    pipe.send(None)

    def __call__(self, name: str, *given: Any, of: type = Process) -> list[Any]:
        """What the processes of a class return, all of which are called at once."""
        kinds = zip(self.pipes, self.kinds, strict=True)
        pipes = [pipe for pipe, kind in kinds if issubclass(kind, of)]
        for pipe in pipes:
            pipe.send((name, given))
        results, failures = [], []
        for number, pipe in enumerate(pipes):
            answered = pipe.poll(DEADLINE_S + 2 * GRACE_S)
            failure, value = pipe.recv() if answered else ("did not answer in time", None)
            failures += [f"{name}, process {number}: {failure}"] if failure else []
            results.append(value)
        if failures:
            raise ContenderFailed("\n".join(failures))
        return results

    def seconds(self, name: str, *given: Any, of: type = Process) -> tuple[float, list[Any]]:
        """From the first one's start to the last one's end, and what they returned."""
        spans, results = zip(*self(name, *given, of=of), strict=True)
        return max(end for _, end in spans) - min(begin for begin, _ in spans), list(results)

    def checkpoint(self) -> tuple[float, list[Any]]:
        save_s, load_s = (self.seconds(n, of=k)[0] for n, k in (("save", Rank), ("load", Engine)))
        return save_s + load_s, []

    def turn(self, method: Method, row: dict[str, Any]) -> float:
        """Seconds of a round, after another one to warm up; reports are added to the row."""
        method()
        self("change")
        taken, results = method()
        row["received_of_kept"] = [it for it in results if isinstance(it, float)]
        row["report"] = next((it for it in results if isinstance(it, dict)), None)
        return taken

    def check(self, name: str, method: Method) -> None:
        """Compares what the engines get by a method with what the trainer has."""
        self("change")
        self("clear")
        method()
        if name != BLOCKS and not all(self("holds_all")):
            raise WrongBytes(f"{name}: an engine holds other bytes")

    def measure(self, methods: dict[str, Method]) -> list[dict[str, Any]]:
        """A row for each method, after all engines were seen to get all bytes by it."""
        found: dict[str, list[float]] = {name: [] for name in methods}
        rows: dict[str, dict[str, Any]] = {name: {"what": name} for name in methods}
        for number in range(self.case.rounds + 1):
            for name, method in methods.items():
                if "failed" in rows[name]:
                    continue
                try:
                    if number < self.case.rounds:
                        found[name].append(self.turn(method, rows[name]))
                    else:
                        self.check(name, method)
                except ContenderFailed as error:
                    rows[name]["failed"] = str(error)
        unit = min(found[BLOCKS])
        for name, row in rows.items():
            if "failed" in row:
                continue
            row |= {"seconds": min(found[name]), "median_seconds": statistics.median(found[name])}
            row |= {"copies": row["seconds"] / unit, "median_copies": row["median_seconds"] / unit}
        return list(rows.values())


def refits(group: Group, *ways: dict[str, Any]) -> dict[str, Method]:
    """Methods by name."""
    return {", ".join(way.values()): partial(group.seconds, "refit", way) for way in ways}


PACKED = [{"mode": "packed", "verify": verify} for verify in ("none", "wire", "installed")]
DIRECT = [way | {"mode": "direct"} for way in PACKED]


def shards(case: Case, *ways: dict[str, Any], peers: bool = True) -> dict[str, Any]:
    """Refits between ranks and engines, with the memory of the very first one."""
    group = Group(case, [Rank] * case.ranks + [Engine] * case.engines)
    with group.running():
        first = group("prepare", of=Rank)[0]
        group("prepare", *first, of=Engine)
        group("change")  # all memory of the bounds is there
        group.seconds("copy", True)
        group("begin_peak")
        group.seconds("refit", PACKED[1])
        grown = group("grown")
        methods = {BLOCKS: partial(group.seconds, "copy", True, of=Engine)}
        if case.dim:
            methods[BLOCKS + " of these columns"] = partial(group.seconds, "copy", False, of=Engine)
        methods |= refits(group, *ways)
        if peers:
            methods["gloo: gather and broadcast"] = partial(group.seconds, "gloo")
            methods["checkpoint in memory: save and load"] = group.checkpoint
        return size_of(case) | {"rows": group.measure(methods), "peak_growth_bytes": grown}


def modules(case: Case) -> dict[str, Any]:
    """Refits of a module with DTensors, called on all ranks."""
    group = Group(case, [ModuleRank] * case.ranks)
    with group.running():
        methods = {
            BLOCKS: partial(group.seconds, "copy", True),
            **refits(group, *PACKED[:2], *DIRECT[:2]),
        }
        return size_of(case) | {"rows": group.measure(methods)}


def size_of(case: Case) -> dict[str, Any]:
    return asdict(case) | {"bytes": case.total}


def rows(case: Case) -> list[dict[str, Any]]:
    return [shards(case, *PACKED, *DIRECT, *COLLECTIVE)]


def columns(case: Case) -> list[dict[str, Any]]:
    return [shards(replace(case, dim=1), *PACKED, *DIRECT, *COLLECTIVE)]


def growth(case: Case) -> list[dict[str, Any]]:
    cases = [replace(case, ranks=ranks, engines=1) for ranks in (1, 2, 4)]
    return [shards(one, PACKED[1], peers=False) for one in cases]


def fsdp(case: Case) -> list[dict[str, Any]]:
    return [modules(replace(case, ranks=ranks, engines=1)) for ranks in (2, 4)]


SECTIONS = {one.__name__: one for one in (rows, columns, growth, fsdp)}


def show(result: dict[str, Any], console: Console) -> None:
    """One table of all figures, and the memory of first refits."""
    table = Table(title="times of one plain copy of the largest share; best round")
    for heading in ("section", "ranks", "engines", "what"):
        table.add_column(heading)
    for heading in ("ms", "copies", "median", "received of kept", "buffers, MB"):
        table.add_column(heading, justify="right")
    for name in (name for name in SECTIONS if name in result):
        for one in result[name]:
            for row in one["rows"]:
                report, start = row.get("report"), [name, str(one["ranks"]), str(one["engines"])]
                if "failed" in row:
                    table.add_row(*start, row["what"], "failed")
                    continue
                table.add_row(
                    *start,
                    row["what"],
                    f"{row['seconds'] * 1e3:.1f}",
                    f"{row['copies']:.2f}",
                    f"{row['median_copies']:.2f}",
                    " ".join(f"{ratio:g}" for ratio in row["received_of_kept"]),
                    f"{report['extra_memory_bytes'] / 1e6:.1f}" if report else "",
                )
            table.add_section()
    console.print(table)
    every = [
        (name, row) for name in SECTIONS for one in result.get(name, []) for row in one["rows"]
    ]
    for name, row in every:
        if "failed" in row:
            why = row["failed"].strip().splitlines()
            first = next((line for line in why if "Error" in line), why[0])
            console.print(f"{name}: {row['what']} failed: {first}", style="yellow")
    for name in ("rows", "columns", "growth"):
        for one in result.get(name, []):
            grown = " ".join(f"{each / 1e6:.1f}" for each in one["peak_growth_bytes"])
            console.print(
                f"{name}, {one['ranks']} ranks: growth of peak memory in the first packed refit, "
                f"in MB, of ranks and then engines: {grown}"
            )


def main(
    only: Annotated[str, typer.Option(help="Sections, with commas between.")] = ",".join(SECTIONS),
    gb: Annotated[float, typer.Option(help="Size of the model, in 10^9 bytes.")] = 0.5,
    tensors: Annotated[int, typer.Option(help="In how many tensors.")] = 200,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    rounds: Annotated[int, typer.Option(help="The best one counts.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: does it all work?")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measures refits from several ranks against plain copies and peers."""
    case = Case(int(gb * 1e9), tensors, dtype, rounds)
    if quick:
        case = Case(int(2e7), 20, dtype, 2)
    if unknown := set(only.split(",")) - set(SECTIONS):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    result: dict[str, Any] = {"host": host(), "quick": quick}
    for name in only.split(","):
        Console(stderr=True).print(name)
        result[name] = SECTIONS[name](case)
        if json_file is not None:  # what there is, after every section
            json_file.write_text(json.dumps(result, indent=2) + "\n")
    show(result, Console(width=None if Console().is_terminal else 160))


if __name__ == "__main__":
    typer.run(main)
