"""Refits and steps with the real model that ``examples/real/make.py`` writes to ``out/real``.

    python benchmarks/real_model.py refits vllm    # or sglang, hf: next to a plain copy
    python benchmarks/real_model.py step           # of rl train, next to TRL's GRPOTrainer

Both sides of a ratio are measured in one run. ``step`` reads the seconds of ``rl train`` from the
folder of a run, ``out/real/grpo``, and then has TRL take as many prompts, completions and tokens.
"""

from __future__ import annotations

import json
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from engine_pair import Ours, refits, show_refits

from rl_train.config import read_config
from rl_train.lines import read_metrics

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "out" / "real" / "model"
app = typer.Typer()


@app.command("refits")
def measure_refits(
    engine: str, rounds: Annotated[int, typer.Option(help="The best round counts.")] = 5
) -> None:
    """Prints the seconds of refits with every kind of verification, next to a plain copy."""
    show_refits(refits(Ours(engine, MODEL, {}, 8), MODEL, rounds))


@app.command()
def step(
    run: Annotated[Path, typer.Option(help="Folder of a run of rl train.")] = ROOT
    / "out/real/grpo",
    steps: Annotated[int, typer.Option(help="Steps of TRL, after one that does not count.")] = 4,
) -> None:
    """Prints the median seconds of a step of ``rl train`` and of TRL, and their ratio."""
    ours = median(row["step_time"] for row in read_metrics(run)[1:] if "step_time" in row)
    theirs = step_of_trl(read_config(ROOT / "examples/real/grpo.yaml")[0], steps)
    print(f"rl train {ours:.1f} s, TRL {theirs:.1f} s, TRL / rl train {theirs / ours:.2f}")


def step_of_trl(config: dict[str, Any], steps: int) -> float:
    """Median seconds of a step of TRL's trainer with the data, sizes and reward of a run."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    sys.path.insert(0, str(ROOT))
    from examples.real.rewards import last_number

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    def reward(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        return last_number([messages[0]["content"] for messages in completions], answer)

    times: list[float] = []
    lines = (ROOT / config["data"]["path"]).read_text(encoding="utf-8").splitlines()
    rows = [
        {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
        for row in map(json.loads, lines)
    ]
    arguments = GRPOConfig(
        output_dir=str(ROOT / "out" / "real" / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        max_steps=steps + 1,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=4,
        num_generations=config["grpo"]["num_generations"],
        max_completion_length=config["generation"]["max_new_tokens"],
        learning_rate=config["policy"]["optimizer"]["lr"],
        lr_scheduler_type="constant",
    )
    GRPOTrainer(
        model=str(MODEL),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        callbacks=[Clock()],
    ).train()
    return median(end - begin for begin, end in pairwise(times))


if __name__ == "__main__":
    torch.manual_seed(0)
    app()
