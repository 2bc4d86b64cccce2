# ruff: noqa: D102
"""A plugin next to its bare engine: what both benchmarks of engines share.

Bare engines run in processes of their own, with the environment that the plugin gives its engine.
One engine lives at a time, so that none waits for another's threads, and the best round of each
counts. Log-probs of the generated tokens are asked of all. The refit comes from a trainer in this
process, next to a plain copy of the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from typing import TYPE_CHECKING, Any, Protocol

import torch
from bench_generation import PAD
from rich.console import Console
from rich.table import Table

from rl_core import create_generation, create_policy
from rl_core.weights import refit

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rl_core.batch import BatchedDataDict

SEED = 1000
#: How rows are sampled: greedy, and with seeds of their own.
MODES = {"greedy": (True, False), "sampled, seeded": (False, True), "sampled": (False, False)}


class Contender(Protocol):
    """Generates, and tells how long it took to start."""

    start_s: float

    def __call__(
        self, data: BatchedDataDict[Any], new_tokens: int, *, greedy: bool, seeded: bool
    ) -> tuple[float, list[list[int]]]:
        """Seconds, and the new tokens of every row."""
        ...

    def close(self) -> None:
        """Ends it."""
        ...


class Bare:
    """An engine without its plugin, in a process of its own.

    Args:
        serve: Runs there: sends ``"ready"`` by the pipe that it is given, answers ``(prompts, new
            tokens, greedy, seeded)`` with seconds and tokens, and ends with None.
        arguments: Besides the pipe.
    """

    def __init__(self, serve: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        began = time.perf_counter()
        self.process = context.Process(target=serve, args=(theirs, *arguments))
        self.process.start()
        assert self.pipe.recv() == "ready"
        self.start_s = time.perf_counter() - began

    def __call__(
        self, data: BatchedDataDict[Any], new_tokens: int, *, greedy: bool, seeded: bool
    ) -> tuple[float, list[list[int]]]:
        rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
        return self.ask(([ids[:n] for ids, n in rows], new_tokens, greedy, seeded))

    def ask(self, request: Any) -> Any:
        """What the process answers."""
        self.pipe.send(request)
        return self.pipe.recv()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()


class Ours:
    """The plugin, from batch to batch."""

    def __init__(self, name: str, path: Path, engine: dict[str, Any], new_tokens: int) -> None:
        config = {"backend": name, "model_name": str(path), "max_new_tokens": new_tokens}
        began = time.perf_counter()
        self.backend: Any = create_generation(
            {**config, "eos_token_id": [], "pad_token_id": PAD}
            | ({f"{name}_cfg": engine} if engine else {})
        )
        self.backend.prepare_for_generation()
        self.start_s = time.perf_counter() - began

    def __call__(
        self, data: BatchedDataDict[Any], new_tokens: int, *, greedy: bool, seeded: bool
    ) -> tuple[float, list[list[int]]]:
        del new_tokens
        batch = data.copy()
        if seeded:
            batch["seed"] = torch.arange(data.size) + SEED
        began = time.perf_counter()
        output = self.backend.generate(batch, greedy=greedy)
        seconds = time.perf_counter() - began
        ends = output["unpadded_sequence_lengths"].tolist()
        starts = data["input_lengths"].tolist()
        ids = output["output_ids"].tolist()
        return seconds, [row[a:b] for row, a, b in zip(ids, starts, ends, strict=True)]

    def close(self) -> None:
        self.backend.shutdown()


def generation(
    contenders: Mapping[str, Callable[[], Contender]],
    ours: str,
    data: BatchedDataDict[Any],
    new_tokens: int,
    rounds: int,
    same: Mapping[str, str],
) -> dict[str, Any]:
    """Tokens per second of each, and of ours over the best of the others.

    Args:
        contenders: What starts each, by name, the plugin's among them; they are closed.
        ours: The plugin's.
        data: Prompts.
        new_tokens: Of each row.
        rounds: After one that does not count.
        same: By mode, who must give the same tokens as the plugin.
    """
    starts: dict[str, float] = {}
    rates: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    tokens: dict[str, dict[str, list[list[int]]]] = {mode: {} for mode in MODES}
    for name, start in contenders.items():
        generate = start()
        starts[name] = generate.start_s
        for mode, (greedy, seeded) in MODES.items():
            for _ in range(rounds + 1):
                seconds, rows = generate(data, new_tokens, greedy=greedy, seeded=seeded)
                rate = sum(map(len, rows)) / seconds
                rates[mode][name] = max(rates[mode].get(name, 0.0), rate)
                tokens[mode][name] = rows
        generate.close()
    found: dict[str, Any] = {"start_seconds": starts}
    for mode in MODES:
        if mode in same:
            assert tokens[mode][ours] == tokens[mode][same[mode]], f"{mode}: the tokens differ"
        best = max(rate for name, rate in rates[mode].items() if name != ours)
        found[mode] = {**rates[mode], "ratio": rates[mode][ours] / best}
    return found


def refits(ours: Ours, path: Path, rounds: int) -> dict[str, Any]:
    """What refits of every kind of verification cost, next to a plain copy of the same bytes."""
    policy = create_policy({"backend": "hf", "model_name": str(path), "torch_dtype": "float32"})
    found = {}
    for verify in ("none", "wire", "installed"):
        reports = [
            refit(policy, ours.backend, verify=verify, deadline_s=120.0) for _ in range(rounds + 1)
        ]
        best = min(reports[1:], key=lambda report: report.seconds)
        found[verify] = best.as_dict()
    copy = {"seconds": plain_copy(found["wire"]["bytes"], rounds)}
    for report in found.values():
        report["of_plain_copy"] = copy["seconds"] / report["seconds"]
    found["plain copy"] = copy
    ours.close()
    policy.shutdown()
    return found


def plain_copy(nbytes: int, rounds: int) -> float:
    """Seconds of one where the weights are, by the threads that torch uses here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target, seconds = torch.zeros_like(source), []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        target.copy_(source)
        if source.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def show(results: dict[str, Any], json_path: Path | None) -> None:
    """Prints the tables, and writes all of it as JSON."""
    console = Console()
    table = Table(title=f"tokens per second, {results['rows']} rows of {results['new_tokens']}")
    names = list(results["generation"]["start_seconds"])
    for column in ("", *names, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for mode, row in results["generation"].items():
        if mode != "start_seconds":
            table.add_row(mode, *(f"{row[name]:.0f}" for name in names), f"{row['ratio']:.3f}")
    starts = results["generation"]["start_seconds"]
    table.add_row("start, s", *(f"{starts[name]:.1f}" for name in names), "")
    console.print(table)
    show_refits(results["refits"])
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=2) + "\n")


def show_refits(results: dict[str, Any]) -> None:
    """Prints the table of what :func:`refits` measured."""
    table = Table(title=f"refits of {results['none']['bytes'] / 1e6:.0f} MB, milliseconds")
    for column in ("", "whole", "transfer", "install", "GB/s", "of a copy"):
        table.add_column(column, justify="left" if not column else "right")
    for verify, report in results.items():
        cells = [f"{report['seconds'] * 1e3:.0f}"]
        if "phases" in report:
            cells += [f"{report['phases'][phase] * 1e3:.1f}" for phase in ("TRANSFER", "INSTALL")]
            cells += [f"{report['gb_per_s']:.2f}", f"{report['of_plain_copy']:.2f}"]
        table.add_row(verify, *cells)
    Console().print(table)
