"""A step of ``rl train``, of the same loop written by hand, and of TRL's ``GRPOTrainer``.

The first two take turns with one policy and one engine, so that what differs is what ``rl train``
does besides: reward functions in processes, figures, the log. TRL trains the same model with the
same data, reward and sizes, and generates with transformers. Prints the median seconds of a step,
and their ratios::

    python benchmarks/bench_rl_train.py --steps 12
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.additions import write_files

from rl_core import BatchedDataDict
from rl_losses import completions, grpo_advantages, training_batch
from rl_train.backends import Backends
from rl_train.config import check_run
from rl_train.data import Order, load_rows
from rl_train.encoding import Encoder
from rl_train.log import RunLog
from rl_train.methods import METHODS, Study, loss_of
from rl_train.rewards import Rewards

PROMPTS, SAMPLES, UPDATES = 64, 16, 8


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    return [float(text == right) for text, right in zip(completions, answer, strict=True)]


def configured(folder: Path) -> dict[str, Any]:
    return {
        "model": str(folder / "model"),
        "output": str(folder / "run"),
        "batch_size": PROMPTS,
        "data": {"path": str(folder / "train.jsonl")},
        "rewards": ["exact"],
        "grpo": {"num_generations": SAMPLES, "updates": UPDATES},
        "loss": {"ratio_clip_max": 0.28, "reference_policy_kl_penalty": 0.001},
        "policy": {
            "train_micro_batch_size": 128,
            "logprob_batch_size": PROMPTS * SAMPLES,
            "optimizer": {"lr": 2e-4, "weight_decay": 0.0},
        },
        "generation": {"max_new_tokens": 4, "temperature": 1.0},
        "log": {"plot": None},
    }


def step_by_hand(study: Study, tokenizer: Any) -> None:
    policy, generation = study.backends.policy, study.backends.generation
    rows = [study.rows[i] for i in study.order.take(PROMPTS)]
    texts = [row["prompt"] for row in rows]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
    prompts = BatchedDataDict(
        {"input_ids": given["input_ids"], "input_lengths": given["attention_mask"].sum(1)}
    ).repeat_interleave(SAMPLES)
    generation.prepare_for_generation()
    output = generation.generate(prompts)
    generation.finish_generation()
    made = completions(output, tokenizer, num_generations=SAMPLES)
    rewards = [float(each.text == rows[each.row]["answer"]) for each in made]
    relative = partial(grpo_advantages, group_size=SAMPLES)
    batch = training_batch(output, rewards, advantages=relative)
    policy.prepare_for_lp_inference()
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    reference = policy.get_reference_policy_logprobs(batch)
    batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    policy.prepare_for_training()
    policy.train(batch.select_indices(torch.randperm(batch.size)), study.loss)
    policy.finish_training()


def ours(folder: Path, steps: int) -> dict[str, float]:
    from transformers import AutoTokenizer

    config = check_run(configured(folder))
    tokenizer = AutoTokenizer.from_pretrained(config["model"])
    data = load_rows(config["data"], tokenizer)
    backends = Backends(config)
    times: dict[str, list[float]] = {"rl train": [], "by hand": []}
    with RunLog(config["output"], config["log"], total_steps=steps) as log, Rewards(["exact"]) as r:
        study = Study(
            config,
            backends,
            data,
            Encoder(tokenizer, config["data"]),
            Order(len(data), 0),
            torch.Generator().manual_seed(0),
            loss_of(config),
            r,
        )
        for step in range(1, steps + 2):
            start = time.perf_counter()
            metrics, shown = METHODS["grpo"](study, {})
            backends.refit(2 * step)
            log.step(step, metrics)
            log.completions(step, shown)
            between = time.perf_counter()
            step_by_hand(study, tokenizer)
            backends.refit(2 * step + 1)
            if step > 1:  # the first one starts processes
                times["rl train"].append(between - start)
                times["by hand"].append(time.perf_counter() - between)
    backends.close()
    return {name: median(taken) for name, taken in times.items()}


def of_trl(folder: Path, steps: int) -> float:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                times.append(time.perf_counter())

    times: list[float] = []
    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        logging_steps=UPDATES,
        max_steps=(steps + 1) * UPDATES,
        per_device_train_batch_size=PROMPTS * SAMPLES // UPDATES,
        steps_per_generation=UPDATES,
        num_generations=SAMPLES,
        max_completion_length=4,
        learning_rate=2e-4,
        epsilon_high=0.28,
        beta=0.001,
        gradient_checkpointing=False,
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=exact,
        args=arguments,
        train_dataset=Dataset.from_list(list(rows)),
        callbacks=[Clock()],
    ).train()
    return median(b - a for a, b in pairwise(times))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="that are measured, of each")
    parser.add_argument("--json", type=Path, help="write the seconds there, too")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_files(folder)
        found = ours(folder, options.steps)
        found["TRL"] = of_trl(folder, options.steps)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))
    for side, seconds in found.items():
        print(f"{side}: {seconds:.3f} s a step, {seconds / found['by hand']:.3f} of by hand")


if __name__ == "__main__":
    main()
