"""What refits should reach, and whether the figures of a run do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["OF_BOUND", "Target", "show", "targets"]

#: Least fraction of the bound, by what is measured.
OF_BOUND = {
    "direct, verify=none": 0.90,
    "direct, verify=wire": 0.80,
    "packed, verify=none": 0.85,
}
TIMES_A_PEER = 3.0
#: Most that several engines may take, in times of the bound.
OF_AGGREGATE = 1.2
#: A sketch of what frameworks write themselves, not one of the peers that are to be beaten.
HOMEMADE = "ZeroMQ and shared buckets"
#: Resident memory that an allocator may come to hold in a hundred refits without a leak.
RSS_NOISE = 1 << 20

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One figure.

    Attributes:
        section: Where it was measured.
        what: Of what.
        measured: The figure.
        least: What it should be at least, if there is such a limit.
        most: What it should be at most.
    """

    section: str
    what: str
    measured: float
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether it is within its limits; None if it has none."""
        if self.least is None and self.most is None:
            return None
        low = self.least is None or self.measured >= self.least
        return low and (self.most is None or self.measured <= self.most)

    @property
    def limit(self) -> str:
        """As the table shows it."""
        if self.least is not None:
            return f">= {self.least:g}"
        return "" if self.most is None else f"<= {self.most:g}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        shown = {"section": self.section, "what": self.what, "measured": self.measured}
        return {**shown, "least": self.least, "most": self.most, "met": self.met}


def targets(result: Result) -> list[Target]:
    """All that the sections of a result allow to tell."""
    sections = {
        "base": base,
        "sweep": sweep,
        "receivers": receivers,
        "delta": delta,
        "growth": growth,
    }
    return [one for key, tell in sections.items() if key in result for one in tell(result[key])]


def base(document: Result) -> Iterator[Target]:
    """One model and all peers."""
    rows = {row["what"]: row for row in document["rows"] if "seconds" in row}
    size = f"{document['bytes'] / 1e9:.3g} GB in {document['tensors']} tensors"
    for row in rows.values():
        if row["kind"] == "ours":
            what = f"{row['what']}, {size}, of {row['bound']}"
            yield Target("base", what, row["of_bound"], least=OF_BOUND.get(row["what"]))
    ours = [row for row in rows.values() if row["kind"] == "ours"]
    peers = [row for row in rows.values() if row["kind"] == "peer" and row["what"] != HOMEMADE]
    once = [row for row in peers if row["copies"] == 1]
    more = [row for row in peers if row["copies"] > 1]
    yield from faster("the best refit", ours, "the best peer", peers, TIMES_A_PEER)
    for verify in ("none", "wire"):
        for mode, others in (("direct", once), ("packed", more)):
            one = rows.get(f"{mode}, verify={verify}")
            kind = "copies once" if mode == "direct" else "copies more often"
            yield from faster(
                f"{mode}, verify={verify}",
                [one] if one else [],
                f"the best peer that {kind}",
                others,
            )
    yield from faster(
        "the best refit", ours, HOMEMADE, [rows[HOMEMADE]] if HOMEMADE in rows else []
    )


def faster(
    name: str, ours: list[Any], peer: str, peers: list[Any], least: float | None = None
) -> Iterator[Target]:
    """How many times as fast the best of ours is as the best of theirs."""
    if ours and peers:
        mine = min(row["seconds"] for row in ours)
        best = min(peers, key=lambda row: row["seconds"])
        what = f"{name} against {peer}"
        what += f" ({best['what']})" if best["what"] != peer else ""
        yield Target("base", what, best["seconds"] / mine, least=least)


def sweep(documents: list[Result]) -> Iterator[Target]:
    """Every size, and what many tensors cost next to few."""
    measured = [document for document in documents if "rows" in document]
    for document in measured:
        yield from paces("sweep", document, f"{document['tensors']:,} tensors")
    for nbytes in sorted({round(document["bytes"], -6) for document in measured}):
        same = [one for one in measured if round(one["bytes"], -6) == nbytes]
        few = min(same, key=lambda one: one["tensors"])
        many = max(same, key=lambda one: one["tensors"])
        for what in OF_BOUND if many["tensors"] > few["tensors"] else ():
            ratio = seconds(many, what) / seconds(few, what)
            told = f"{what}, {nbytes / 1e9:g} GB, time of {many['tensors']:,} tensors"
            yield Target("sweep", f"{told} over that of {few['tensors']:,}", ratio)


def seconds(document: Result, what: str) -> float:
    """Of one row."""
    return next(row["seconds"] for row in document["rows"] if row["what"] == what)


def paces(section: str, document: Result, said: str) -> Iterator[Target]:
    """Fractions of the bounds."""
    for row in document["rows"]:
        if row["what"] in OF_BOUND:
            what = f"{row['what']}, {document['bytes'] / 1e9:.3g} GB, {said}"
            yield Target(section, what, row["of_bound"], least=OF_BOUND[row["what"]])


def receivers(documents: list[Result]) -> Iterator[Target]:
    """Several engines: how many times the bound's time."""
    for document in documents:
        for row in document.get("rows", ()):
            if row["what"] in OF_BOUND:
                count = document["receivers"]
                what = f"{row['what']}, {count} engine{'s' * (count > 1)}, over {row['bound']}"
                most = OF_AGGREGATE if row["what"].endswith("none") else None
                yield Target("receivers", what, 1 / row["of_bound"], most=most)


def delta(result: Result) -> Iterator[Target]:
    """Up to which fraction of tensors changed a delta pays."""
    for mode, figures in result.get("modes", {}).items():
        what = f"{mode}, fraction of tensors changed at which a delta takes as long as all"
        yield Target("delta", what, figures["break_even"])


def growth(result: Result) -> Iterator[Target]:
    """What refits leave behind, and what they hold."""
    for run in result.get("growth", ()):
        for side, grown in run.get("grown", {}).items():
            for key, amount in grown.items():
                what = f"{run['mode']}, {side}, {run['refits']} refits: growth of {key}"
                yield Target("growth", what, amount, most=RSS_NOISE if key == "rss_bytes" else 0)
    for run in result.get("memory", ()):
        if "allowed_bytes" in run:
            what, most = f"{run['mode']}: extra memory, bytes", run["allowed_bytes"]
            yield Target("growth", what, run["extra_memory_bytes"], most=most)
            for side, peak in run["peak_rss_growth"].items():
                what = f"{run['mode']}, {side}: peak of resident memory in a refit, bytes more"
                yield Target("growth", what, peak, most=most + RSS_NOISE)


def show(found: Iterable[Target], console: Console) -> None:
    """Prints a table."""
    table = Table(title="Targets", title_justify="left")
    table.add_column("section")
    table.add_column("what")
    for heading in ("target", "measured"):
        table.add_column(heading, justify="right")
    table.add_column("")
    words = {None: "", True: "[green]met[/]", False: "[red]not met[/]"}
    for one in found:
        figure = f"{one.measured:,.0f}" if abs(one.measured) >= 1000 else f"{one.measured:.3g}"
        table.add_row(one.section, one.what, one.limit, figure, words[one.met])
    console.print(table)
