"""How close refits come to plain copies of the same bytes on this host."""

from __future__ import annotations

import argparse
import json
import os
import platform
from typing import TYPE_CHECKING, Any

from rl_cli.output import chatter_to_stderr, console_for_result

if TYPE_CHECKING:
    from collections.abc import Iterator

    from refit_bench.bench import Bench, Row


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description="Measures refits between processes of this host against plain copies of the "
        "same bytes by as many processes, each of one thread.",
    )
    parser.add_argument("--gb", type=float, default=1.0, help="size of the model (default: 1)")
    parser.add_argument("--tensors", type=int, default=200, help="in how many tensors")
    parser.add_argument("--receivers", type=int, default=1, help="how many engines")
    parser.add_argument(
        "--bucket-mb", type=int, help="size of each buffer (default: as refits have)"
    )
    parser.add_argument("--repeats", type=int, default=5, help="runs of which the best counts")
    parser.add_argument("--device", default="cpu", help="where the tensors are, such as cuda:0")
    parser.add_argument("--collective", action="store_true", help="also the collective transport")
    parser.add_argument("--deadline", type=float, default=120.0, help="seconds for one step")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    with chatter_to_stderr():
        result = _bench(options)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _print(result)


def _bench(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from refit_bench.bench import Bench
    from rich.console import Console

    bench = Bench(
        nbytes=int(options.gb * 1e9),
        tensors=options.tensors,
        receivers=options.receivers,
        repeats=options.repeats,
        bucket_bytes=None if options.bucket_mb is None else options.bucket_mb << 20,
        device=options.device,
        deadline_s=options.deadline,
    )
    rows = []
    with Console(stderr=True).status("starting engines") as status, bench:
        for row in _measure(bench, options.collective):
            status.update(f"{row.what}: {row.gb_per_s:.2f} GB/s; measuring what comes next")
            rows.append(row.as_dict())
    cuda = torch.device(options.device).type == "cuda"
    return {
        "host": {
            "processor": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "device": torch.cuda.get_device_name(options.device) if cuda else "cpu",
            "torch": torch.__version__,
        },
        "bytes": bench.nbytes,
        "tensors": options.tensors,
        "receivers": options.receivers,
        "bucket_mb": options.bucket_mb,
        "rows": rows,
        "reports": [report.as_dict() for report in bench.reports],
    }


def _measure(bench: Bench, collective: bool) -> Iterator[Row]:
    one = bench.one_copy()
    yield one
    for verify in ("none", "wire", "installed"):
        yield bench.refit(one, mode="direct", verify=verify)
    two = bench.two_copies()
    yield two
    for verify in ("none", "wire", "installed"):
        yield bench.refit(two, mode="packed", verify=verify)
    yield bench.refit(two, mode="packed", isolation="staged")
    yield bench.refit(one, mode="direct", delta=True, changed=0.1)
    if collective:
        bench.open_collective()
        yield bench.refit(two, transport="collective", mode="packed")


def _print(result: dict[str, Any]) -> None:
    from rich.table import Table

    host = result["host"]
    table = Table(
        title=f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors to "
        f"{result['receivers']} engine{'s' * (result['receivers'] > 1)}, {host['device']}, "
        f"{host['cores']} cores",
        title_justify="left",
    )
    table.add_column("what")
    for heading in ("best ms", "median ms", "GB/s", "of its bound"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result["rows"]:
        ratio = "" if row["of_bound"] is None else f"{row['of_bound']:.2f} of {row['bound']}"
        table.add_row(
            row["what"],
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['median_seconds'] * 1e3:.1f}",
            f"{row['gb_per_s']:.2f}",
            ratio,
            style="dim" if row["of_bound"] is None else None,
        )
    console_for_result().print(table)


if __name__ == "__main__":
    main()
