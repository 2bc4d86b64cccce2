"""Training steps on ragged batches: useful tokens per second, packed and dynamic against padded.

    python benchmarks/bench_train.py [--rows 32] [--longest 384] [--json out.json]

A useful token is a real one; padding counts as nothing. ``loop`` is the plain loop over
transformers (every microbatch padded to the batch's width, with an attention mask), ``padded`` is
rl-hf with fixed micro batches, narrowed to their longest row. All take optimizer steps on the same
rows in turns within one process, microbatches hold the same number of tokens, and the best round
counts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from rl_conformance.models import make_tiny_model
from rl_core.batch import BatchedDataDict
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

Step = Callable[[BatchedDataDict[Any]], float]


def ragged(rows: int, longest: int, shape: str) -> BatchedDataDict[Any]:
    """Rows whose longest is four times the mean, or four times the shortest."""
    generator = torch.Generator().manual_seed(0)
    if shape == "longest = 4 x mean":
        tail = -torch.rand(rows, generator=generator).log()
        tail *= longest / 4 / tail.mean()
        lengths = tail.long().clamp(2, longest)
        lengths[int(lengths.argmax())] = longest
    else:
        lengths = torch.randint(longest // 4, longest + 1, (rows,), generator=generator)
    ids = torch.randint(3, 270, (rows, longest), generator=generator)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def plain_loop(path: Path, size: int) -> Step:
    """What one writes by hand with transformers and torch."""
    model = AutoModelForCausalLM.from_pretrained(path).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def step(data: BatchedDataDict[Any]) -> float:
        ids, lengths = data["input_ids"], data["input_lengths"]
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        labels = torch.where(mask.bool(), ids, -100)
        count, total = mask[:, 1:].sum(), 0.0
        for at in range(0, len(ids), size):
            part = slice(at, at + size)
            logits = model(input_ids=ids[part], attention_mask=mask[part], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[part, 1:].flatten(), reduction="sum"
            )
            (loss / count).backward()
            total += float(loss.detach() / count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def through_rl_hf(path: Path, **config: Any) -> Step:
    """The policy backend."""
    policy = HuggingFacePolicy(str(path), optimizer={"lr": 1e-5}, **config)

    def step(data: BatchedDataDict[Any]) -> float:
        loss: float = policy.train(data, NLLLossFn())["loss"]
        return loss

    return step


def measure(steps: dict[str, Step], data: BatchedDataDict[Any], rounds: int) -> dict[str, float]:
    """Useful tokens per second of each; their first losses must agree."""
    losses = {name: step(data) for name, step in steps.items()}
    reference = losses["loop"]
    assert all(abs(loss - reference) < 1e-3 for loss in losses.values()), losses
    tokens = int(data["input_lengths"].sum())
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step(data)
            best[name] = min(best[name], time.perf_counter() - start)
    return {name: tokens / seconds for name, seconds in best.items()}


def main(
    rows: Annotated[int, typer.Option(help="Rows of the global batch.")] = 32,
    longest: Annotated[int, typer.Option(help="Padded width, in tokens.")] = 384,
    size: Annotated[int, typer.Option(help="Rows of a padded microbatch.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 192,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 3,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 3,
    threads: Annotated[int, typer.Option(help="Threads of torch.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the table and writes it as JSON."""
    torch.set_num_threads(threads)
    logging.disable_progress_bar()
    results: dict[str, Any] = {"rows": rows, "longest": longest, "threads": threads, "batches": {}}
    budget = {"enabled": True, "train_mb_tokens": size * longest}
    table = Table(title="training, useful tokens per second")
    for column in ("batch", "useful", "loop", "padded", "dynamic", "packed", "packed / loop"):
        table.add_column(column, justify="left" if column == "batch" else "right")
    with TemporaryDirectory() as folder:
        path = make_tiny_model(
            folder,
            "qwen2",
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=1024,
            max_position_embeddings=longest,
            weight_scale=1.0,
        )
        for shape in ("longest = 4 x mean", "longest = 4 x shortest"):
            data = ragged(rows, longest, shape)
            steps = {
                "loop": plain_loop(path, size),
                "padded": through_rl_hf(
                    path, train_micro_batch_size=size, sequence_packing={"enabled": False}
                ),
                "dynamic": through_rl_hf(path, dynamic_batching=budget),
                "packed": through_rl_hf(path, sequence_packing=budget),
            }
            rates = measure(steps, data, rounds)
            useful = float(data["input_lengths"].sum()) / (rows * longest)
            ratios = {f"{name} / loop": rate / rates["loop"] for name, rate in rates.items()}
            results["batches"][shape] = {"useful": useful, "tokens/s": rates, **ratios}
            shown = [f"{rates[name]:.0f}" for name in steps]
            table.add_row(shape, f"{useful:.0%}", *shown, f"{ratios['packed / loop']:.2f}")
    Console().print(table)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
