"""Draws what the benchmarks of a refit measured.

    python benchmarks/plots.py FILE... [--out out/bench]

``refit_rates`` shows our refits beside what people use today, with the bounds as lines, for the
size that most methods were measured at. ``refit_sweep`` shows how much of its bound each of our
refits reaches when the same bytes come in few or many tensors. ``refit_scaling`` shows what more
engines cost, and when a delta pays. README.md describes the files.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import matplotlib
import numpy as np
import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter
from refit_targets import OF_BOUND

Result = dict[str, Any]
Document = dict[str, Any]
Size = tuple[int, int, str]

INK, FAINT, OURS, PEER = "#22262b", "#8a9099", "#1f6f8b", "#c3c8ce"
#: Of refits that copy once and twice.
COLORS = {1: OURS, 2: "#c96f2e"}
SMALL: dict[str, Any] = {"loc": "left", "fontsize": 10}
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "refit",
}


def read(files: Iterable[Path]) -> list[Result]:
    """The files' results; a document of ``refit_peers.py`` becomes the base of one.

    Raises:
        BadParameter: They are of different machines: rates do not compare.
    """
    results: list[Result] = []
    for file in files:
        content = json.loads(file.read_text())
        results.append({"host": content["host"], "base": content} if "rows" in content else content)
    machines = {(one["host"]["cpu"], one["host"]["cores"]) for one in results}
    if len(machines) != 1:
        raise typer.BadParameter(f"results of {len(machines)} machines: {sorted(machines)}")
    return results


def size_of(document: Document) -> Size:
    """What is the same in figures that compare; tensors of equal size round the bytes."""
    return round(document["bytes"], -6), document["tensors"], document["dtype"]


def fullest(documents: list[Document]) -> tuple[Size, list[dict[str, Any]]]:
    """The size at which most was measured, and its rows; of two of one name the faster."""
    sizes: Counter[Size] = Counter()
    for document in documents:
        sizes[size_of(document)] += len(document["rows"])
    size = sizes.most_common(1)[0][0]
    rows: dict[str, dict[str, Any]] = {}
    for document in documents:
        for row in document["rows"] if size_of(document) == size else ():
            known = rows.get(row["what"])
            if "seconds" in row and (known is None or row["seconds"] < known["seconds"]):
                rows[row["what"]] = row
    return size, list(rows.values())


def gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.3g} GB"


def bare(axes: Axes) -> None:
    """No frame but the axis that is read."""
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=0)


def draw_rates(results: list[Result]) -> Figure | None:
    """Bars of GB/s, fastest first, and the bounds as lines across them; None without a base."""
    documents = [result["base"] for result in results if "base" in result]
    if not documents:
        return None
    (nbytes, count, dtype), rows = fullest(documents)
    bars = sorted((row for row in rows if row["kind"] != "bound"), key=lambda row: row["gb_per_s"])
    bounds = {row["what"]: row for row in rows if row["what"] in ("one copy", "two copies")}
    figure = Figure(figsize=(9, 1.7 + 0.36 * len(bars)), layout="constrained")
    axes = figure.add_subplot()
    bare(axes)
    axes.spines["bottom"].set_visible(False)
    rates = [row["gb_per_s"] for row in bars]
    colors = [OURS if row["kind"] == "ours" else PEER for row in bars]
    axes.barh(range(len(bars)), rates, color=colors, height=0.72)
    label_bars(axes, bars)
    axes.set_yticks(range(len(bars)), [row["what"] for row in bars])
    for label, row in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if row["kind"] == "ours" else "normal")
    draw_bounds(axes, bounds)
    axes.set_xlim(0, 1.06 * max([*rates, *(row["gb_per_s"] for row in bounds.values())]))
    axes.xaxis.set_major_locator(NullLocator())
    axes.set_xlabel(about(results[0]["host"]), color=FAINT, fontsize=8, loc="left", labelpad=8)
    figure.suptitle(
        f"New weights in an engine's tensors: GB/s of {gigabytes(nbytes)} of {dtype} "
        f"in {count:,} tensors",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=11,
    )
    return figure


def label_bars(axes: Axes, bars: list[dict[str, Any]]) -> None:
    """The rate at the end of each bar: inside ours, if there is room."""
    room = 0.1 * max(row["gb_per_s"] for row in bars)
    for place, row in enumerate(bars):
        inside = row["kind"] == "ours" and row["gb_per_s"] > room
        axes.annotate(
            f"{row['gb_per_s']:.2f}",
            (row["gb_per_s"], place),
            xytext=(-5 if inside else 5, 0),
            textcoords="offset points",
            ha="right" if inside else "left",
            va="center",
            color="white" if inside else INK,
            bbox={"facecolor": OURS if inside else "white", "linewidth": 0, "pad": 1},
        )


def draw_bounds(axes: Axes, bounds: dict[str, dict[str, Any]]) -> None:
    """Lines behind the bars, with their names above."""
    for name, row in bounds.items():
        axes.axvline(row["gb_per_s"], color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            f"{name}\n{row['gb_per_s']:.2f}",
            (row["gb_per_s"], 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 4),
            textcoords="offset points",
            ha="center",
        )


def about(host: dict[str, Any]) -> str:
    return (
        f"{host['cpu']}, {host['cores']} cores, torch {host['torch']}, one thread per process, "
        "best round; dashed: plain copies of the same bytes"
    )


def sweeps(results: list[Result]) -> dict[str, dict[int, dict[int, float]]]:
    """Fractions of the bound by refit, bytes and tensors, of refits with several counts."""
    found: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for document in (one for result in results for one in result.get("sweep", ())):
        for row in document.get("rows", ()):
            if row["what"] in OF_BOUND:
                found[row["what"]][size_of(document)[0]][document["tensors"]] = row["of_bound"]
    return {
        what: sizes for what, sizes in found.items() if any(len(one) > 1 for one in sizes.values())
    }


def draw_sweep(results: list[Result]) -> Figure | None:
    """Fraction of the bound against the number of tensors; None if nothing was swept."""
    panels = sweeps(results)
    if not panels:
        return None
    across = 2 if len(panels) in (2, 4) else min(3, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(1.2 + 3.4 * across, 0.9 + 2.9 * down), layout="constrained")
    grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    known = sorted({nbytes for sizes in panels.values() for nbytes in sizes})
    shades = matplotlib.colormaps["GnBu"](np.linspace(0.5, 1, len(known)))
    colors = dict(zip(known, shades, strict=True))
    for axes, (what, sizes) in zip(grid.flat, panels.items(), strict=False):
        draw_panel(axes, what, sizes, colors)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    marks = [Line2D([], [], color=colors[one], marker="o", label=gigabytes(one)) for one in known]
    figure.legend(handles=marks, loc="outside upper right", ncols=len(marks), frameon=False)
    figure.suptitle(
        "Rate as a fraction of plain copies; dotted: the target",
        x=0.01,
        ha="left",
        fontweight="bold",
        fontsize=11,
    )
    figure.supxlabel("tensors that the bytes come in", fontsize=10)
    return figure


def draw_panel(
    axes: Axes, what: str, sizes: dict[int, dict[int, float]], colors: dict[int, Any]
) -> None:
    """One refit: a line per size of the model."""
    bare(axes)
    axes.axhline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axes.axhline(OF_BOUND[what], color=INK, linewidth=1, linestyle=":")
    for nbytes, fractions in sorted(sizes.items()):
        counts = sorted(fractions)
        rates = [fractions[count] for count in counts]
        axes.plot(counts, rates, color=colors[nbytes], marker="o", markersize=4, linewidth=2)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_ylim(0, max(1.06, *(1.03 * one for size in sizes.values() for one in size.values())))
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelbottom=True)
    axes.set_title(f"{what}, of {'one copy' if 'direct' in what else 'two copies'}", **SMALL)


def draw_scaling(results: list[Result]) -> Figure | None:
    """Time against the number of engines, and of deltas against what changed; None without both."""
    result = next((one for one in results if "receivers" in one and "delta" in one), None)
    if result is None:
        return None
    figure = Figure(figsize=(9.6, 3.8), layout="constrained")
    engines, deltas = figure.subplots(1, 2)
    draw_engines(engines, [one for one in result["receivers"] if "rows" in one])
    draw_deltas(deltas, result["delta"])
    for axes in (engines, deltas):
        bare(axes)
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
        axes.legend(frameon=False, fontsize=8)
    return figure


def draw_engines(axes: Axes, documents: list[Document]) -> None:
    """Refits as lines, the bounds dashed."""
    counts = [document["receivers"] for document in documents]
    for copies, color in COLORS.items():
        rows = [[row for row in one["rows"] if row["copies"] == copies] for one in documents]
        for times in zip(*rows, strict=True):
            kind = {"bound": "--", "ours": "-" if "none" in times[0]["what"] else ":"}
            axes.plot(
                counts,
                [row["seconds"] * 1e3 for row in times],
                color=color,
                linestyle=kind[times[0]["kind"]],
                marker="o",
                markersize=4,
                label=times[0]["what"],
            )
    axes.set_xticks(counts)
    axes.set_xlabel("engines")
    size = gigabytes(documents[0]["bytes"]) if documents else ""
    axes.set_title(f"ms until all engines have {size}", **SMALL)


def draw_deltas(axes: Axes, figures: dict[str, Any]) -> None:
    """Deltas as lines, refits of everything dashed."""
    for (mode, found), color in zip(figures.get("modes", {}).items(), COLORS.values(), strict=True):
        parts, seconds = zip(*found["seconds"], strict=True)
        times = [one * 1e3 for one in seconds]
        axes.plot(parts, times, color=color, marker="o", markersize=4, label=f"{mode}, delta")
        full = found["full_seconds"] * 1e3
        axes.axhline(full, color=color, linestyle="--", label=f"{mode}, all")
    axes.xaxis.set_major_formatter(PercentFormatter(1))
    axes.set_xlabel("tensors that changed")
    axes.set_title(f"ms for {gigabytes(figures.get('bytes', 0))}, verify=wire", **SMALL)


def draw(results: list[Result], out: Path) -> Iterator[Path]:
    """Draws all that the results allow, as PNG and SVG; yields the PNGs."""
    out.mkdir(parents=True, exist_ok=True)
    figures = {"rates": draw_rates, "sweep": draw_sweep, "scaling": draw_scaling}
    with matplotlib.rc_context(STYLE):
        for name, make in figures.items():
            if (figure := make(results)) is not None:
                figure.savefig(out / f"refit_{name}.png", dpi=160)
                figure.savefig(out / f"refit_{name}.svg", metadata={"Date": None})
                yield out / f"refit_{name}.png"


def main(
    files: Annotated[list[Path], typer.Argument(help="What the benchmarks wrote with --json.")],
    out: Annotated[Path, typer.Option(help="Folder for the drawings.")] = Path("out/bench"),
) -> None:
    """Draws what there is of refit_rates, refit_sweep and refit_scaling."""
    for path in draw(read(files), out):
        typer.echo(path)


if __name__ == "__main__":
    typer.run(main)
