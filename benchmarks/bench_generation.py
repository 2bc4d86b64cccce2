"""Tokens per second of rl-hf's generation against ``model.generate`` of the same model.

One model, one batch, one run; the two take turns. The ragged batch has prompts of very different
lengths, and stop tokens end its rows at very different times; the even batch has neither. Only
tokens up to a row's stop count. In the greedy case both produce the same tokens, which is checked.
"""

from __future__ import annotations

import json
import time
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from rl_conformance.models import make_tiny_model
from rl_core.batch import BatchedDataDict
from rl_hf.generation import HuggingFaceGeneration

VOCABULARY = 8192
PAD = 0


def make_model(path: Path, hidden: int, layers: int) -> Path:
    with redirect_stderr(StringIO()):
        return make_tiny_model(
            path,
            "qwen2",
            hidden_size=hidden,
            num_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            intermediate_size=3 * hidden,
            vocab_size=VOCABULARY,
            max_position_embeddings=2048,
            weight_scale=3.0,
            eos_token_id=None,
        )


def make_prompts(rows: int, longest: int, *, ragged: bool) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.full((rows,), longest // 2)
    if ragged:
        share = torch.rand(rows, generator=generator)
        lengths = (longest ** (0.4 + 0.6 * share)).to(torch.int64)
    ids = torch.randint(1, VOCABULARY, (rows, int(lengths.max())), generator=generator)
    ids = torch.where(torch.arange(ids.shape[1]) < lengths[:, None], ids, PAD)
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def stop_tokens(ragged: bool, mean_length: int) -> list[int]:
    """A random part of the vocabulary, so that sampling ends a row after about the mean."""
    if not ragged:
        return []
    order = torch.randperm(VOCABULARY - 1, generator=torch.Generator().manual_seed(1)) + 1
    chosen: list[int] = order[: VOCABULARY // mean_length].tolist()
    return chosen


def left_padded(data: BatchedDataDict[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    ids, lengths = data["input_ids"], data["input_lengths"]
    width = ids.shape[1]
    mask = torch.arange(width) >= width - lengths[:, None]
    flipped = torch.full_like(ids, PAD)
    flipped[mask] = ids[torch.arange(width) < lengths[:, None]]
    return flipped, mask.to(torch.int64)


class Peer:
    """``model.generate`` on a left-padded batch."""

    def __init__(self, path: Path, stops: list[int], new_tokens: int) -> None:
        with redirect_stderr(StringIO()):
            self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.model.generation_config.top_k = None
        self.stops, self.new_tokens = stops, new_tokens

    def __call__(self, data: BatchedDataDict[Any], *, greedy: bool) -> list[list[int]]:
        """The generated tokens of each row, up to its stop."""
        ids, mask = left_padded(data)
        output = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=not greedy,
            temperature=None if greedy else 1.0,
            top_k=None if greedy else 0,
            max_new_tokens=self.new_tokens,
            eos_token_id=self.stops or None,
            pad_token_id=PAD,
        )
        rows = output[:, ids.shape[1] :].tolist()
        return [row[: self._length(row)] for row in rows]

    def _length(self, row: list[int]) -> int:
        return next((i + 1 for i, token in enumerate(row) if token in self.stops), len(row))


class Ours:
    """The backend's ``generate``, from batch to batch."""

    def __init__(self, path: Path, stops: list[int], new_tokens: int) -> None:
        self.backend = HuggingFaceGeneration(
            str(path), max_new_tokens=new_tokens, stop_token_ids=stops, seed=0
        )
        self.backend.prepare_for_generation()

    def __call__(self, data: BatchedDataDict[Any], *, greedy: bool) -> list[list[int]]:
        """The generated tokens of each row."""
        output = self.backend.generate(data, greedy=greedy)
        starts, ends = data["input_lengths"], output["unpadded_sequence_lengths"]
        return [
            row[start:end].tolist()
            for row, start, end in zip(output["output_ids"], starts, ends, strict=True)
        ]


def measure(
    path: Path, data: BatchedDataDict[Any], stops: list[int], *, new_tokens: int, rounds: int
) -> dict[str, dict[str, float]]:
    contenders: dict[str, Peer | Ours] = {
        "model.generate": Peer(path, stops, new_tokens),
        "rl-hf": Ours(path, stops, new_tokens),
    }
    results: dict[str, dict[str, float]] = {}
    for mode in ("greedy", "sampled"):
        rates = dict.fromkeys(contenders, 0.0)
        tokens = {}
        for _ in range(rounds):
            for name, generate in contenders.items():
                start = time.perf_counter()
                tokens[name] = generate(data, greedy=mode == "greedy")
                seconds = time.perf_counter() - start
                rates[name] = max(rates[name], sum(map(len, tokens[name])) / seconds)
        if mode == "greedy":
            assert tokens["rl-hf"] == tokens["model.generate"], "greedy tokens differ"
        lengths = torch.tensor([len(row) for row in tokens["rl-hf"]], dtype=torch.float32)
        results[mode] = {
            "model.generate tokens/s": rates["model.generate"],
            "rl-hf tokens/s": rates["rl-hf"],
            "ratio": rates["rl-hf"] / rates["model.generate"],
            "mean length": float(lengths.mean()),
            "longest": float(lengths.max()),
        }
    return results


def show(results: dict[str, Any]) -> None:
    table = Table(title="generation, useful tokens per second")
    for column in ("batch", "mode", "model.generate", "rl-hf", "ratio", "mean length", "longest"):
        table.add_column(column, justify="left" if column in {"batch", "mode"} else "right")
    for batch, modes in results["batches"].items():
        for mode, row in modes.items():
            table.add_row(
                batch,
                mode,
                f"{row['model.generate tokens/s']:.0f}",
                f"{row['rl-hf tokens/s']:.0f}",
                f"{row['ratio']:.2f}",
                f"{row['mean length']:.0f}",
                f"{row['longest']:.0f}",
            )
    Console().print(table)


def main(
    rows: Annotated[int, typer.Option(help="Prompts in the batch.")] = 64,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 4,
    longest: Annotated[int, typer.Option(help="Longest prompt, in tokens.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Most tokens generated per row.")] = 256,
    mean_length: Annotated[int, typer.Option(help="Sampled tokens per row, about.")] = 64,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 2,
    threads: Annotated[int, typer.Option(help="Of torch; 1 suffers least from others' load.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the table and writes it as JSON."""
    torch.set_num_threads(threads)
    results: dict[str, Any] = {
        "rows": rows,
        "hidden": hidden,
        "layers": layers,
        "threads": threads,
        "torch": torch.__version__,
        "batches": {},
    }
    with TemporaryDirectory() as folder:
        path = make_model(Path(folder), hidden, layers)
        for name, ragged in (("ragged", True), ("even", False)):
            results["batches"][name] = measure(
                path,
                make_prompts(rows, longest, ragged=ragged),
                stop_tokens(ragged, mean_length),
                new_tokens=new_tokens if ragged else new_tokens // 4,
                rounds=rounds,
            )
    show(results)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
