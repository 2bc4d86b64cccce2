# ruff: noqa: D101, D102
"""How fast a packed refit over shared memory is, against memcpy on the same host in the same run.

    python benchmarks/bench_refit.py [--gb 1] [--tensors 200] [--receivers 1] [--json FILE]

The bounds: ``one copy`` is a single memcpy of the same bytes; ``two copies`` is what packed data
must cost at least, pack and load, run by two processes at the same time through shared memory with
nothing between them but two semaphores.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_core.interfaces import TensorSpec, WeightSink, WeightSource
from rl_core.refit import DEFAULT_BUCKET_BYTES, RefitReceiver, RefitSender
from rl_core.refit.transports.memory import SharedRegion

Tensors = dict[str, torch.Tensor]
SLOTS = 2


def make(nbytes: int, count: int) -> Tensors:
    """Float32 tensors of equal size, about ``nbytes`` together."""
    each = max(1, nbytes // count // 4)
    return {f"layers.{i}.weight": torch.full((each,), float(i)) for i in range(count)}


class Source(WeightSource):
    def __init__(self, tensors: Tensors) -> None:
        self.held = tensors

    def specs(self) -> Sequence[TensorSpec]:
        return [TensorSpec(name, tuple(t.shape), "float32") for name, t in self.held.items()]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names:
            yield name, self.held[name]


class Sink(WeightSink):
    def __init__(self, tensors: Tensors) -> None:
        self.held = tensors

    def specs(self) -> Sequence[TensorSpec]:
        return Source(self.held).specs()

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        self.held[name][offset : offset + data.numel()].copy_(data)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        return Source(self.held).tensors(list(names))


def engine(pipe: Any, nbytes: int, count: int) -> None:
    """Another process: receives whatever it is told to, or copies for the two-copy bound."""
    torch.set_num_threads(1)
    tensors = make(nbytes, count)
    receiver = RefitReceiver(lambda: Sink(tensors), name="engine", lock=threading.RLock())
    while (command := pipe.recv()) is not None:
        kind, argument = command
        if kind == "prepare":
            receiver.prepare(argument)
        elif kind == "receive":
            receiver.receive_ipc().result()
        else:
            load(tensors, *argument)
        pipe.send("done")
    receiver.close()


def load(tensors: Tensors, ref: Any, pipe: Any, rounds: int) -> None:
    """The second copy of the bound: slot after slot, as they are announced."""
    region = SharedRegion.attach(ref)
    flat = torch.cat([t.view(-1) for t in tensors.values()]).view(torch.uint8)
    size = region.ref.nbytes // SLOTS
    pipe.send("ready")
    for _ in range(rounds):
        for start in range(0, flat.numel(), size):
            slot = pipe.recv()
            part = flat[start : start + size]
            part.copy_(region.data[slot * size : slot * size + part.numel()])
            pipe.send(slot)


def best(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def one_copy(tensors: Tensors, repeats: int) -> float:
    copies = {name: torch.zeros_like(t) for name, t in tensors.items()}

    def copy() -> None:
        for name, tensor in tensors.items():
            copies[name].copy_(tensor)

    copy()
    return best(copy, repeats)


def two_copies(tensors: Tensors, child: Any, repeats: int, bucket: int) -> float:
    flat = torch.cat([t.view(-1) for t in tensors.values()]).view(torch.uint8)
    region = SharedRegion.create(SLOTS * bucket)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    child.send(("copy", (region.ref, theirs, repeats + 1)))
    ours.recv()

    def run() -> None:
        free = list(range(SLOTS))
        under_way = 0
        for start in range(0, flat.numel(), bucket):
            if not free:
                free.append(ours.recv())
                under_way -= 1
            slot = free.pop(0)
            part = flat[start : start + bucket]
            where = slot * bucket
            region.data[where : where + part.numel()].copy_(part)
            ours.send(slot)
            under_way += 1
        for _ in range(under_way):
            ours.recv()

    run()
    seconds = best(run, repeats)
    child.recv()
    region.close()
    return seconds


def refit(
    sender: RefitSender, children: list[Any], verify: str, repeats: int, bucket: int
) -> dict[str, Any]:
    def run() -> dict[str, Any]:
        for child in children:
            child.send(("receive", None))
        report = sender.stream_ipc(
            verify=verify, receivers=len(children), bucket_bytes=bucket
        ).result()
        for child in children:
            child.recv()
        return report

    run()
    return min((run() for _ in range(repeats)), key=lambda report: report["seconds"])


def measure(nbytes: int, count: int, receivers: int, repeats: int, bucket: int) -> dict[str, Any]:
    """Rates in GB/s, and ratios to the bounds of this run."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    tensors = make(nbytes, count)
    pipes, processes = [], []
    for _ in range(receivers):
        ours, theirs = context.Pipe()
        process = context.Process(target=engine, args=(theirs, nbytes, count), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    sender = RefitSender(lambda: Source(tensors), name="trainer")
    info = sender.prepare()
    for pipe in pipes:
        pipe.send(("prepare", info))
        pipe.recv()
    total = sum(t.numel() * 4 for t in tensors.values())
    one = one_copy(tensors, repeats)
    two = two_copies(tensors, pipes[0], repeats, bucket)
    rows = [
        {"what": "one copy (memcpy)", "seconds": one},
        {"what": "two copies (two processes)", "seconds": two},
    ]
    for verify in ("none", "wire", "installed"):
        report = refit(sender, pipes, verify, repeats, bucket)
        row = {"what": f"refit verify={verify}", "seconds": report["seconds"]}
        rows.append(row | {"of_two_copies": two / report["seconds"]})
        extra = report["extra_memory_bytes"]
    for pipe, process in zip(pipes, processes, strict=True):
        pipe.send(None)
        process.join()
    sender.close()
    for row in rows:
        row["gb_per_s"] = total / row["seconds"] / 1e9
    return {
        "bytes": total,
        "tensors": count,
        "receivers": receivers,
        "bucket_bytes": bucket,
        "extra_memory_bytes": extra,
        "rows": rows,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--receivers", type=int, default=1)
    parser.add_argument("--bucket-mb", type=int, default=DEFAULT_BUCKET_BYTES >> 20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    args = parser.parse_args()
    result = measure(
        int(args.gb * 1e9), args.tensors, args.receivers, args.repeats, args.bucket_mb << 20
    )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    print(f"{result['bytes'] / 1e9:.2f} GB in {args.tensors} tensors, {args.receivers} receivers")
    for row in result["rows"]:
        ratio = f"{row['of_two_copies']:.2f} of two copies" if "of_two_copies" in row else ""
        print(f"  {row['what']:<28}{row['seconds']:8.3f} s{row['gb_per_s']:8.2f} GB/s  {ratio}")


if __name__ == "__main__":
    main()
