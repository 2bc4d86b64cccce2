"""How fast refits are: next to plain copies and to what people use today, in one run.

    python benchmarks/bench_refit.py [--only base,sweep,receivers,delta,growth] [--quick]
                                     [--json FILE] [--plots DIR]

``base``: one model, every data mode, every peer. ``sweep``: models of several sizes in few and in
many tensors. ``receivers``: several engines. ``delta``: refits that send what changed. ``growth``:
what a hundred refits leave behind. README.md says how each is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import refit_report
import refit_steps
import typer
from refit_ours import OURS
from refit_pair import Case
from refit_peers import PEERS
from refit_targets import show, targets
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from rl_core.errors import RefitCorrupted, RLError

MB = 1_000_000
Said = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    base_mb: int = 1000
    base_tensors: int = 200
    sweep_mb: tuple[int, ...] = (100, 1000, 4000)
    sweep_tensors: tuple[int, ...] = (10, 100, 1000, 10_000)
    receivers: tuple[int, ...] = (1, 2, 4, 8)
    receivers_mb: int = 250
    delta_mb: int = 1000
    fractions: tuple[float, ...] = (0, 0.01, 0.1, 0.25, 0.5, 0.75, 1)
    growth_mb: int = 50
    growth_tens: int = 10
    repeats: int = 5


FULL = Sizes()
QUICK = Sizes(
    base_mb=100,
    base_tensors=50,
    sweep_mb=(20, 100),
    sweep_tensors=(10, 1000),
    receivers=(1, 2),
    receivers_mb=50,
    delta_mb=100,
    fractions=(0, 0.1, 0.5, 1),
    growth_mb=20,
    growth_tens=2,
    repeats=2,
)


def base(sizes: Sizes, said: Said) -> dict[str, Any]:
    """Bounds, ours and peers, on one clock."""
    case = Case(sizes.base_mb * MB, sizes.base_tensors, "bfloat16", sizes.repeats)
    return refit_report.document(
        case, PEERS.values(), OURS, said=lambda name: said(f"base: {name}")
    )


def sweep(sizes: Sizes, said: Said) -> list[dict[str, Any]]:
    """A document for every size."""
    found = []
    for megabytes in sizes.sweep_mb:
        for count in sizes.sweep_tensors:
            said(f"sweep: {megabytes / 1000:g} GB in {count:,} tensors")
            found.append(pace(megabytes * MB, count, 1, sizes.repeats))
    return found


def receivers(sizes: Sizes, said: Said) -> list[dict[str, Any]]:
    """A document for every number of engines."""
    found = []
    for count in sizes.receivers:
        said(f"receivers: {count}")
        found.append(pace(sizes.receivers_mb * MB, 100, count, sizes.repeats))
    return found


def pace(nbytes: int, tensors: int, engines: int, repeats: int) -> dict[str, Any]:
    """One document, or why there is none."""
    size = {"bytes": nbytes, "tensors": tensors, "receivers": engines}
    if (lack := refit_steps.lack_of_memory(nbytes, engines)) is not None:
        return {**size, "skipped": lack}
    return size | step(refit_steps.pace, nbytes, tensors, engines, repeats)


def delta(sizes: Sizes, said: Said) -> dict[str, Any]:
    """What a delta takes, by the fraction that changed."""
    said("delta")
    return step(refit_steps.delta, sizes.delta_mb * MB, 200, sizes.fractions, sizes.repeats)


def growth(sizes: Sizes, said: Said) -> dict[str, Any]:
    """What refits hold and leave behind."""
    found: dict[str, Any] = {"growth": [], "memory": []}
    for mode in ("direct", "packed"):
        said(f"growth: {mode}")
        many = step(refit_steps.growth, mode, sizes.growth_mb * MB, 100, sizes.growth_tens)
        found["growth"].append(many)
        large = step(refit_steps.memory, mode, sizes.delta_mb * MB, 200)
        found["memory"].append(large)
    return found


def step(run: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """One step in a process of its own; what fails says so, but wrong bytes end everything."""
    try:
        return refit_steps.apart(run, *args)
    except RefitCorrupted:
        raise
    except (RLError, BrokenProcessPool) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


SECTIONS = {
    "base": base,
    "sweep": sweep,
    "receivers": receivers,
    "delta": delta,
    "growth": growth,
}


@contextmanager
def progress() -> Iterator[Said]:
    """A line on standard error that says what is measured; as many lines where it is a file."""
    console = Console(stderr=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def said(what: str) -> None:
            bar.update(task, description=what)
            if not console.is_terminal:
                console.print(what)

        yield said


def chosen(only: str | None) -> list[str]:
    """The sections with these names.

    Raises:
        BadParameter: There is no such section.
    """
    names = only.split(",") if only else list(SECTIONS)
    if unknown := sorted(set(names) - set(SECTIONS)):
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(SECTIONS)}")
    return [name for name in SECTIONS if name in names]


def main(
    only: Annotated[str | None, typer.Option(help="Sections, with commas between.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: does it all work?")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Folder to draw in.")] = None,
) -> None:
    """Measures refits against plain copies and peers, and says which targets are met."""
    sizes = QUICK if quick else FULL
    result: dict[str, Any] = {"host": refit_report.host(), "quick": quick}
    with progress() as said:
        for name in chosen(only):
            result[name] = SECTIONS[name](sizes, said)
            result["targets"] = [one.as_dict() for one in targets(result)]
            if json_file is not None:  # what there is, after every section
                json_file.write_text(json.dumps(result, indent=2) + "\n")
    console = Console(width=None if Console().is_terminal else 160)
    report(result, console)
    if plots is not None:
        from plots import draw

        for path in draw([result], plots):
            console.print(path)


def report(result: dict[str, Any], console: Console) -> None:
    """The table of all methods, what was left out, and the targets."""
    if "base" in result:
        refit_report.show(result["base"], console)
    show(targets(result), console)
    for name in SECTIONS:
        for one, why in left_out(result.get(name, {})):
            console.print(f"{name}: not measured: {one}: {why}", style="yellow")


def left_out(figures: Any) -> Iterator[tuple[str, str]]:
    """What was skipped or failed, anywhere in these figures, and why."""
    if isinstance(figures, dict):
        size = [f"{figures[key]:,} {key}" for key in ("bytes", "tensors") if key in figures]
        for key in ("skipped", "failed"):
            if isinstance(figures.get(key), str):
                yield figures.get("what", " in ".join(size)), figures[key]
        figures = figures.values()
    if not isinstance(figures, (str, int, float, type(None))):
        for one in figures:
            yield from left_out(one)


if __name__ == "__main__":
    typer.run(main)
