"""Refits of adapters alone next to refits of merged weights, into vLLM, and what rows cost.

    python benchmarks/refit_adapters.py [--repeats 5]

Needs vLLM and peft. For each model two engines with the same base weights take turns: one takes
merged weights, the other serves the adapter. Seconds are the least of all refits.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer

from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy
from rl_core.batch import BatchedDataDict
from rl_core.weights import refit

#: Width, layers and heads of the models: 0.3 and 107 million parameters.
MODELS: dict[str, dict[str, int]] = {
    "tiny": {},
    "107M": {"hidden_size": 1024, "num_layers": 12, "num_attention_heads": 8},
}
#: As many tokens as a row makes.
TOKENS = 32
ROWS = 8


def measure(path: Path, repeats: int) -> dict[str, dict[str, float]]:
    """Bytes and seconds of a refit, and seconds of a call, by what the policy sends."""
    lora = {"r": 16, "target_modules": "all-linear"}
    pairs: dict[str, tuple[Any, Any]] = {}
    for kind in ("merged", "adapter"):
        engine: dict[str, Any] = {"kv_cache_memory_bytes": 128 << 20, "max_num_seqs": ROWS}
        if kind == "adapter":
            engine["lora"] = lora
        shared = {"model_name": str(path), "torch_dtype": "bfloat16"}
        policy = create_policy({**shared, "backend": "hf", "lora": {**lora, "refit": kind}})
        generation = create_generation(
            {**shared, "backend": "vllm", "max_new_tokens": TOKENS, "vllm_cfg": engine}
        )
        generation.prepare_for_generation()
        pairs[kind] = policy, generation
    found: dict[str, dict[str, float]] = {kind: {} for kind in pairs}
    ids = torch.randint(3, 260, (ROWS, 16), generator=torch.Generator().manual_seed(0))
    prompts = BatchedDataDict({"input_ids": ids, "input_lengths": torch.full((ROWS,), 16)})
    for _ in range(repeats):
        for kind, (policy, generation) in pairs.items():
            with torch.no_grad():
                for name, parameter in policy.model.named_parameters():
                    if "lora_" in name:
                        parameter.add_(0.01)
            report = refit(policy, generation)
            began = time.perf_counter()
            generation.generate(prompts, greedy=True)
            seconds = {"refit": report.seconds, "call": time.perf_counter() - began}
            best = found[kind]
            best["bytes"] = report.bytes
            best |= {name: min(best.get(name, taken), taken) for name, taken in seconds.items()}
    for policy, generation in pairs.values():
        generation.shutdown()
        policy.shutdown()
    return found


def main(repeats: Annotated[int, typer.Option(help="Refits of each kind.")] = 5) -> None:
    """Prints a table of Markdown."""
    print("| model | sends | MB | refit, ms | to merged | a call, ms | to merged |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for name, sizes in MODELS.items():
        with TemporaryDirectory() as directory:
            found = measure(make_tiny_model(Path(directory, name), "qwen2", **sizes), repeats)
        merged = found["merged"]
        for kind, row in found.items():
            ratios = {key: row[key] / merged[key] for key in ("refit", "call")}
            print(
                f"| {name} | {kind} | {row['bytes'] / 1e6:.2f} | {row['refit'] * 1e3:.0f} | "
                f"{ratios['refit']:.2f} | {row['call'] * 1e3:.0f} | {ratios['call']:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    typer.run(main)
