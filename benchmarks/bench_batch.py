"""Batches against plain Python, tensordict and verl's DataProto, in one run.

Every row of the table is one task done by several contenders in turn, round by round; the figure is
the best round, the ratio is the contender's time over ours. All contenders end with the same
values, and with memory of their own: where a peer returns views, they are cloned.
"""

from __future__ import annotations

import gc
import json
import pickle
import time
from collections import deque
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tensordict
import torch
import typer
from rich.console import Console
from rich.table import Table

from rl_core.batch import BatchedDataDict, pack

if TYPE_CHECKING:
    from collections.abc import Callable

    Tasks = dict[str, dict[str, Callable[[], Any]]]

OURS = "rl-core"
ALGORITHMS = (
    "first_fit_decreasing",
    "modified_first_fit_decreasing",
    "first_fit_shuffle",
    "concatenative",
)


def naive_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        length = lengths[row]
        for target, left in enumerate(room):
            if left >= length:
                bins[target].append(row)
                room[target] = left - length
                break
        else:
            bins.append([row])
            room.append(capacity - length)
    return bins


def measure(contenders: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Best seconds of each contender; the order rotates, so that no one always goes first."""
    best = dict.fromkeys(contenders, float("inf"))
    for turn in range(rounds + 1):
        names = deque(contenders)
        names.rotate(turn)
        for name in names:
            gc.collect()
            start = time.perf_counter()
            contenders[name]()
            if turn:  # the first turn warms up
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def measure_packing(rows: int, capacity: int, rounds: int) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    lengths = np.clip(generator.lognormal(5.5, 1.0, rows).astype(np.int64), 1, capacity)
    tokens = int(lengths.sum())
    start = time.perf_counter()
    expected = naive_first_fit_decreasing(lengths.tolist(), capacity)
    naive = time.perf_counter() - start
    assert pack(lengths, capacity, "first_fit_decreasing") == expected
    best = measure({name: lambda n=name: pack(lengths, capacity, n) for name in ALGORITHMS}, rounds)
    results: dict[str, Any] = {
        "plain Python first_fit_decreasing": {"seconds": naive, "bins": len(expected)}
    }
    for name, seconds in best.items():
        bins = len(pack(lengths, capacity, name))
        results[name] = {
            "seconds": seconds,
            "speedup": naive / seconds,
            "bins": bins,
            "lower_bound": -(-tokens // capacity),
            "efficiency": tokens / (bins * capacity),
        }
    return results


def columns(rows: int, width: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, 32000, (rows, width), generator=generator),
        "token_mask": torch.ones(rows, width),
        "logprobs": torch.randn(rows, width, generator=generator),
        "input_lengths": torch.randint(1, width + 1, (rows,), generator=generator),
    }


def as_tensordict(data: dict[str, torch.Tensor]) -> tensordict.TensorDict:
    return tensordict.TensorDict(data, batch_size=[len(data["input_lengths"])])


def batch_tasks(rows: int, width: int, parts: int, shards: int) -> Tasks:
    pieces = [columns(rows // parts, width, seed) for seed in range(parts)]
    ours = BatchedDataDict.from_batches(pieces)
    theirs = as_tensordict(dict(ours))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    inverse = torch.argsort(order)
    dicts, peers = [BatchedDataDict(piece) for piece in pieces], list(map(as_tensordict, pieces))

    def reorder() -> BatchedDataDict[Any]:
        batch: BatchedDataDict[Any] = BatchedDataDict(ours)
        batch.reorder_data(inverse)
        return batch

    assert torch.equal(reorder()["input_ids"], theirs[order]["input_ids"])
    tasks: Tasks = {
        "from_batches, one width": {
            OURS: lambda: BatchedDataDict.from_batches(dicts),
            "tensordict": lambda: torch.cat(peers),
        },
        f"shard to {shards}": {
            OURS: lambda: ours.shard_by_batch_size(shards),
            "tensordict": lambda: [part.clone() for part in theirs.chunk(shards)],
        },
        f"shard to {shards} and pickle": {
            OURS: lambda: [pickle.dumps(part, 5) for part in ours.shard_by_batch_size(shards)],
            "tensordict": lambda: [pickle.dumps(part.clone(), 5) for part in theirs.chunk(shards)],
        },
        "reorder": {OURS: reorder, "tensordict": lambda: theirs[order]},
    }
    tasks |= ragged_task(rows, width, parts)
    add_verl(tasks, pieces, order, shards)
    return tasks


def ragged_task(rows: int, width: int, parts: int) -> Tasks:
    pieces = [
        columns(rows // parts, width - width * part // (2 * parts), part) for part in range(parts)
    ]
    dicts = [BatchedDataDict(piece) for piece in pieces]
    peers = [as_tensordict(piece) for piece in pieces]

    def padded() -> tensordict.TensorDict:
        def pad(value: torch.Tensor) -> torch.Tensor:
            missing = width - value.shape[1] if value.dim() > 1 else 0
            return torch.nn.functional.pad(value, (0, missing)) if missing else value

        return torch.cat([peer.apply(pad) for peer in peers])

    assert torch.equal(padded()["logprobs"], BatchedDataDict.from_batches(dicts)["logprobs"])
    return {
        "from_batches, ragged": {
            OURS: lambda: BatchedDataDict.from_batches(dicts),
            "tensordict": padded,
        }
    }


def add_verl(
    tasks: Tasks, pieces: list[dict[str, torch.Tensor]], order: torch.Tensor, shards: int
) -> None:
    """Adds verl's DataProto where it can be imported; it does not pad ragged batches."""
    try:
        from verl import DataProto
    except ImportError:
        return
    protos = [DataProto.from_dict(tensors=piece) for piece in pieces]
    whole = DataProto.concat(protos)

    def reorder() -> Any:
        proto = DataProto(batch=whole.batch)
        proto.reorder(order)
        return proto

    def owned() -> list[Any]:
        return [DataProto(batch=part.batch.clone()) for part in whole.chunk(shards)]

    tasks["from_batches, one width"]["verl"] = lambda: DataProto.concat(protos)
    tasks[f"shard to {shards}"]["verl"] = owned
    tasks[f"shard to {shards} and pickle"]["verl"] = lambda: [
        pickle.dumps(part, 5) for part in owned()
    ]
    tasks["reorder"]["verl"] = reorder


def show(results: dict[str, Any]) -> None:
    console = Console()
    table = Table(title=f"Packing {results['packing_rows']:,} rows")
    for heading in ("algorithm", "seconds", "times faster", "bins", "lower bound", "full"):
        table.add_column(heading, justify="left" if heading == "algorithm" else "right")
    for name, row in results["packing"].items():
        table.add_row(
            name,
            f"{row['seconds']:.3f}",
            f"{row['speedup']:.0f}" if "speedup" in row else "1",
            str(row["bins"]),
            str(row.get("lower_bound", "")),
            f"{row['efficiency']:.2%}" if "efficiency" in row else "",
        )
    console.print(table)
    table = Table(title="Milliseconds (times ours)")
    for heading in ("task", OURS, "tensordict", "verl"):
        table.add_column(heading, justify="left" if heading == "task" else "right")
    for task, times in results["batches"].items():
        cells = [
            f"{times[peer] * 1e3:.1f} ({times[peer] / times[OURS]:.2f}x)" if peer in times else "-"
            for peer in ("tensordict", "verl")
        ]
        table.add_row(task, f"{times[OURS] * 1e3:.1f}", *cells)
    console.print(table)
    if results["versions"]["verl"] is None:
        console.print("verl cannot be imported here: its column is empty.")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def main(
    packing_rows: Annotated[int, typer.Option(help="Sequences to pack.")] = 100_000,
    capacity: Annotated[int, typer.Option(help="Tokens per bin.")] = 8192,
    rows: Annotated[int, typer.Option(help="Rows of the batch.")] = 4096,
    width: Annotated[int, typer.Option(help="Padded width of the batch.")] = 1024,
    parts: Annotated[int, typer.Option(help="Batches that are put together.")] = 32,
    shards: Annotated[int, typer.Option(help="Shards of the batch.")] = 8,
    rounds: Annotated[int, typer.Option(help="Rounds; the best counts.")] = 15,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measures packing, from_batches, sharding and reordering."""
    results = {
        "packing_rows": packing_rows,
        "versions": {name: installed(name) for name in ("torch", "tensordict", "verl", "numpy")},
        "threads": torch.get_num_threads(),
        "packing": measure_packing(packing_rows, capacity, rounds),
        "batches": {
            task: measure(contenders, rounds)
            for task, contenders in batch_tasks(rows, width, parts, shards).items()
        },
    }
    show(results)
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
