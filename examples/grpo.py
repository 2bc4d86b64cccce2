"""GRPO on additions, written over the interfaces: any policy backend and any engine, by name.

    python -m examples.grpo --generation vllm

A tiny model learns the format and some of the sums by example, and the rest by reward.
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

import torch  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402

from examples.additions import MAX_NEW_TOKENS, Additions, make_model, warm_up  # noqa: E402
from rl_core import create_generation, create_policy, refit  # noqa: E402
from rl_losses import GRPOLossFn, grpo_advantages, training_batch  # noqa: E402

if TYPE_CHECKING:
    from rl_core import ColocatablePolicyInterface, GenerationInterface

PROBLEMS, UPDATES = 64, 8  # of a step: problems, and optimizer steps


def grpo_step(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    task: Additions,
    problems: int,
    samples: int,
) -> dict[str, float]:
    """Generates, grades, scores, trains and refits; returns the figures of the step."""
    prompts = task.prompts(task.draw(problems)).repeat_interleave(samples)
    generation.prepare_for_generation()
    output = generation.generate(prompts)
    generation.finish_generation()

    rewards = task.rewards(output)
    advantages = grpo_advantages(rewards, group_size=samples)
    batch = training_batch(output, rewards, advantages=advantages)
    policy.prepare_for_lp_inference()
    batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    reference = policy.get_reference_policy_logprobs(batch)
    batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    apart = (batch["prev_logprobs"] - batch["generation_logprobs"]) * batch["token_mask"]

    policy.prepare_for_training()
    order = torch.randperm(batch.size, generator=task.generator)
    loss_fn = GRPOLossFn(ratio_clip_max=0.28, reference_policy_kl_penalty=0.001)
    metrics = policy.train(batch.select_indices(order), loss_fn)
    policy.finish_training()
    report = refit(policy, generation)  # the engine has exactly these weights, or it raises
    return {
        "reward": float(rewards.mean()),
        "loss": float(metrics["loss"]),
        "kl": float(metrics["kl"]),
        "logprob_error": float(apart.abs().max()),
        "refit_seconds": report.seconds,
        "weights_version": generation.weights_version,
    }


def evaluate(generation: GenerationInterface, task: Additions) -> float:
    """Mean reward over 512 fresh problems."""
    generation.prepare_for_generation()
    output = generation.generate(task.prompts(task.draw(512)))
    generation.finish_generation()
    return float(task.rewards(output).mean())


def train(options: argparse.Namespace, folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Warms up, starts both backends and does the steps; returns all figures."""
    cluster, rows = None, PROBLEMS * options.samples
    model = options.model or make_model(folder / "model", options.seed)
    task = Additions(AutoTokenizer.from_pretrained(model), options.seed)
    start = warm_up(options.policy, model, task, folder / "warm")
    both = {"model_name": str(start), "temperature": 1.0, "seed": options.seed}
    if options.ray:
        from rl_ray import RayVirtualCluster

        cluster = stack.enter_context(RayVirtualCluster([1], name="generation"))
    generation = create_generation(
        {"backend": options.generation, "max_new_tokens": MAX_NEW_TOKENS, **both}, cluster
    )
    stack.callback(generation.shutdown)
    policy = create_policy(
        {
            "backend": options.policy,
            "train_global_batch_size": rows // UPDATES,
            "train_micro_batch_size": rows // UPDATES,
            "logprob_batch_size": rows,
            "optimizer": {"lr": 2e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
            "scheduler": {"name": "constant", "warmup_steps": 10 * UPDATES},
            **both,
        }
    )
    stack.callback(policy.shutdown)
    figures: dict[str, Any] = {"reward_before": evaluate(generation, task), "steps": []}
    for number in range(1, options.steps + 1):
        step = grpo_step(policy, generation, task, PROBLEMS, options.samples)
        figures["steps"].append(step)
        shown = (f"{name} {value:.3g}" for name, value in step.items())
        print(f"step {number}/{options.steps}:", ", ".join(shown), flush=True)
    figures["reward_after"] = evaluate(generation, task)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--policy", default="hf", help="the backend that trains")
    parser.add_argument("--generation", default="hf", help="the backend that generates")
    parser.add_argument("--model", type=Path, help="a checkpoint, instead of a tiny one")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--samples", type=int, default=16, help="completions of each problem")
    parser.add_argument("--ray", action="store_true", help="generate in a Ray actor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for all figures")
    chosen = parser.parse_args()
    if chosen.ray:
        require_packages("rl_ray")
    with plain_errors(), ExitStack() as stack:
        check(policy=chosen.policy, generation=chosen.generation, file=chosen.json)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-")))
        figures = train(chosen, folder, stack)
    print(f"mean reward {figures['reward_before']:.3f} -> {figures['reward_after']:.3f}")
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(figures, indent=1))
