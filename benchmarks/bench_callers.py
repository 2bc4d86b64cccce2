"""Rows per second of many callers at once, each with a row at a time, against one call of all rows.

One engine, the same rows, one run; the ways take turns, and one caller alone has one turn. ``N
callers`` are threads that share the rows out and call ``generate`` with one after the other; ``N
tasks`` do so with ``generate_async`` in one event loop. Greedy, so that all ways give the same
tokens, which is checked.
"""

from __future__ import annotations

import asyncio
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from bench_generation import make_model, make_prompts
from rich.console import Console
from rich.table import Table

from rl_core import create_generation

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationInterface

Rows = list[list[int]]


def tokens_of(output: BatchedDataDict[Any]) -> Rows:
    lengths = output["unpadded_sequence_lengths"].tolist()
    return [row[:n].tolist() for row, n in zip(output["output_ids"], lengths, strict=True)]


def one_call(engine: GenerationInterface, data: BatchedDataDict[Any]) -> Rows:
    return tokens_of(engine.generate(data, greedy=True))


def threads(engine: GenerationInterface, data: BatchedDataDict[Any], callers: int) -> Rows:
    def call(row: int) -> Rows:
        return tokens_of(engine.generate(data.slice(row, row + 1), greedy=True))

    with ThreadPoolExecutor(callers) as pool:
        return [row for rows in pool.map(call, range(data.size)) for row in rows]


def tasks(engine: GenerationInterface, data: BatchedDataDict[Any], callers: int) -> Rows:
    async def call(row: int, turn: asyncio.Semaphore) -> Rows:
        async with turn:
            stream = engine.generate_async(data.slice(row, row + 1), greedy=True)
            return [ids async for _, output in stream for ids in tokens_of(output)]

    async def everything() -> Rows:
        turn = asyncio.Semaphore(callers)
        found = await asyncio.gather(*(call(row, turn) for row in range(data.size)))
        return [row for rows in found for row in rows]

    return asyncio.run(everything())


def main(
    backend: Annotated[str, typer.Option(help="Which engine.")] = "hf",
    rows: Annotated[int, typer.Option(help="Prompts.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated per row.")] = 64,
    longest: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 64,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 4,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the table and writes it as JSON."""
    torch.set_num_threads(1)
    data = make_prompts(rows, longest, ragged=True)
    ways: dict[str, Callable[[GenerationInterface], Rows]] = {
        "one call": lambda engine: one_call(engine, data)
    }
    for count in (1, 16, 256):
        ways[f"{count} callers"] = lambda engine, n=count: threads(engine, data, n)
        ways[f"{count} tasks"] = lambda engine, n=count: tasks(engine, data, n)
    seconds = dict.fromkeys(ways, float("inf"))
    with TemporaryDirectory() as folder:
        path = str(make_model(Path(folder), hidden, layers))
        engine = create_generation(
            {
                "backend": backend,
                "model_name": path,
                "max_new_tokens": new_tokens,
                "pad_token_id": 0,
            }
        )
        engine.prepare_for_generation()
        expected = one_call(engine, data)
        for turn in range(rounds):
            for name, way in ways.items():
                if turn and name.startswith("1 "):
                    continue  # takes a minute, and is not near any limit
                start = time.perf_counter()
                found = way(engine)
                seconds[name] = min(seconds[name], time.perf_counter() - start)
                assert found == expected, f"{name}: other tokens"
        engine.shutdown()
    table = Table(title=f"{backend}: {rows} rows of {new_tokens} tokens")
    for column in ("way", "rows/s", "of one call"):
        table.add_column(column, justify="left" if column == "way" else "right")
    best = seconds["one call"]
    for name, took in seconds.items():
        table.add_row(name, f"{rows / took:.1f}", f"{best / took:.2f}")
    Console().print(table)
    if json_path is not None:
        ratios = {name: best / took for name, took in seconds.items()}
        figures = {"backend": backend, "rows": rows, "seconds": seconds, "ratios": ratios}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    typer.run(main)
