"""Steps of TRL's ``GRPOTrainer``: its own generation against an engine of rl-core by ``rl-trl``.

    python benchmarks/bench_trl.py [--rows 32] [--new-tokens 64] [--json out.json]

One model, one configuration, one run; the two take turns, and of each the median step of its best
turn counts. ``generation`` is the part of a step in which completions are sampled: TRL's
``model.generate``, or the engine's ``generate``. A step of rl-trl also has a verified refit and a
comparison of all log-probs, which a step of TRL has not: it generates with the trainer's own model.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import typer
from bench_generation import make_model
from datasets import Dataset
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import rl_trl
from rl_core import create_generation


class Clock(TrainerCallback):
    """Seconds of each step, and of the generation in it."""

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.generation: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """A step begins."""
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """It ends."""
        self.steps.append(time.perf_counter() - self.began)

    def timing(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """A generation whose seconds are kept."""

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return generate(*args)
            finally:
                self.generation.append(time.perf_counter() - start)

        return timed


def share_of_even(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def main(
    rows: Annotated[int, typer.Option(help="Completions of a step.")] = 32,
    new_tokens: Annotated[int, typer.Option(help="Tokens of each, at most.")] = 64,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 256,
    layers: Annotated[int, typer.Option(help="Depth of the model.")] = 4,
    steps: Annotated[int, typer.Option(help="Of each turn; the first is not counted.")] = 6,
    rounds: Annotated[int, typer.Option(help="Turns of each.")] = 2,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the table and writes it as JSON."""
    torch.set_num_threads(1)
    best: dict[str, dict[str, float]] = {}
    with TemporaryDirectory() as folder:
        path = str(make_model(Path(folder, "model"), hidden, layers))
        config = {"backend": "hf", "model_name": path, "max_new_tokens": new_tokens}
        generation = create_generation({**config, "stop_token_ids": [1], "seed": 0})
        args = GRPOConfig(
            str(Path(folder, "run")),
            max_steps=steps,
            per_device_train_batch_size=rows,
            num_generations=8,
            max_completion_length=new_tokens,
            learning_rate=1e-5,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        prompts = [f"{number} plus {number + 1} is " for number in range(64)]
        data = Dataset.from_dict({"prompt": prompts})
        generate = generation.generate
        for way in ("trl", "rl-trl") * rounds:
            clock = Clock()
            generation.generate = clock.timing(generate)  # type: ignore[method-assign]
            rollout = rl_trl.rollout(generation) if way == "rl-trl" else None
            with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
                trainer = GRPOTrainer(
                    path,
                    share_of_even,
                    args,
                    train_dataset=data,
                    rollout_func=rollout,
                    callbacks=[clock],
                )
                own = trainer._generate_single_turn
                trainer._generate_single_turn = clock.timing(own)
                trainer.train()
            medians = {
                "step": statistics.median(clock.steps[1:]),
                "generation": statistics.median(clock.generation[1:]),
            }
            if way not in best or medians["step"] < best[way]["step"]:
                best[way] = medians
        generation.shutdown()
    table = Table(title="a step of GRPO, seconds")
    for column in ("", "step", "generation in it"):
        table.add_column(column, justify="right" if column else "left")
    for way, seconds in best.items():
        table.add_row(way, f"{seconds['step']:.2f}", f"{seconds['generation']:.2f}")
    faster = best["trl"]["step"] / best["rl-trl"]["step"]
    table.add_row("trl / rl-trl", f"{faster:.2f}", "")
    Console().print(table)
    if json_path is not None:
        settings = {"rows": rows, "new_tokens": new_tokens, "hidden": hidden, "layers": layers}
        json_path.parent.mkdir(parents=True, exist_ok=True)
        results = {**settings, "steps": steps, "seconds": best, "trl / rl-trl": faster}
        json_path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
