"""DPO on preference pairs, written over the interfaces: right sums are preferred to wrong ones.

    python -m examples.dpo --policy megatron

A tiny model first learns the format by example, then prefers right answers by pairs alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from examples.preflight import check, plain_errors, require_packages

require_packages("torch", "transformers", "tokenizers", "rl_core", "rl_losses")

from transformers import AutoTokenizer  # noqa: E402

from examples.additions import MAX_NEW_TOKENS, Additions, make_model, warm_up  # noqa: E402
from rl_core import create_generation, create_policy, refit  # noqa: E402
from rl_losses import DPOLossFn  # noqa: E402

if TYPE_CHECKING:
    from rl_core import ColocatablePolicyInterface, GenerationInterface


def dpo_step(
    policy: ColocatablePolicyInterface, task: Additions, loss_fn: DPOLossFn, pairs: int
) -> dict[str, float]:
    """Trains on fresh pairs; returns the figures of the step."""
    batch = task.preferences(task.draw(pairs))
    reference = policy.get_reference_policy_logprobs(batch)
    batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    metrics = policy.train(batch, loss_fn)
    return {name: metrics[name] for name in ("loss", "accuracy", "rewards_margin")}


def solved(generation: GenerationInterface, task: Additions) -> float:
    """Fraction of 512 fresh problems that a greedy answer solves."""
    generation.prepare_for_generation()
    output = generation.generate(task.prompts(task.draw(512)), greedy=True)
    generation.finish_generation()
    return float(task.rewards(output).mean())


def train(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Warms up, starts both backends and does the steps; returns all figures."""
    model = make_model(folder / "model", options.seed)
    task = Additions(AutoTokenizer.from_pretrained(model), options.seed)
    start = warm_up(options.policy, model, task, folder / "warm")
    both = {"model_name": str(start), "seed": options.seed}
    policy = create_policy(
        {
            "backend": options.policy,
            "train_micro_batch_size": 2 * options.pairs,
            "optimizer": {"lr": 1e-4, "weight_decay": 0.0},
            "scheduler": {"name": "constant", "warmup_steps": 10},
            **both,
        }
    )
    stack.callback(policy.shutdown)
    generation = create_generation(
        {"backend": options.generation, "max_new_tokens": MAX_NEW_TOKENS, **both}
    )
    stack.callback(generation.shutdown)
    figures: dict[str, Any] = {"solved_before": solved(generation, task), "steps": []}
    loss_fn = DPOLossFn(beta=0.1, sft_loss_weight=0.1)
    policy.prepare_for_training()
    for number in range(1, options.steps + 1):
        step = dpo_step(policy, task, loss_fn, options.pairs)
        figures["steps"].append(step)
        shown = (f"{name} {value:.3g}" for name, value in step.items())
        print(f"step {number}/{options.steps}:", ", ".join(shown), flush=True)
    refit(policy, generation)
    figures["solved_after"] = solved(generation, task)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="hf", help="the backend that trains")
    parser.add_argument("--generation", default="hf", help="the backend that generates")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=64, help="pairs of each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    chosen = parser.parse_args()
    with plain_errors(), ExitStack() as stack:
        check(policy=chosen.policy, generation=chosen.generation, file=chosen.json)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dpo-")))
        figures = train(chosen, folder, stack)
    print(f"greedy answers right {figures['solved_before']:.3f} -> {figures['solved_after']:.3f}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
