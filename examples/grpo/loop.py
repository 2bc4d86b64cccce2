"""The loop itself; everything in it goes through the interfaces, nothing names a backend."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.additions import MAX_NEW_TOKENS, Additions, make_model
from rl_conformance.diagnostics.agreement import validate_log_probability_consistency
from rl_core import (
    ColocatablePolicyInterface,
    GenerationInterface,
    create_generation,
    create_policy,
    training_batch,
)
from rl_core.interfaces import Cluster
from rl_core.weights import refit
from rl_losses import GRPOLossFn, NLLLossFn, grpo_advantages

Show = Callable[[str, int, float], None]


@dataclass(frozen=True)
class Settings:
    """One run. ``model`` None makes a tiny checkpoint; the rest is as the options say."""

    policy: str
    policy_ranks: int
    policy_options: dict[str, Any]
    generation: str
    model: Path | None
    layers: int
    steps: int
    warmup: int
    prompts: int
    samples: int
    seed: int
    embedded: bool
    updates: int = 8
    kl_penalty: float = 0.001
    learning_rate: float = 2e-4


@dataclass
class Step:
    """Figures of one GRPO step; times in seconds."""

    reward: float
    loss: float
    kl: float
    logprob_error: float
    consistent: bool
    refit_gb_per_s: float
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Run:
    """Figures of one run."""

    settings: Settings
    reward_before: float = 0.0
    reward_after: float = 0.0
    seconds: float = 0.0
    steps: list[Step] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "settings": vars(self.settings) | {"model": None}}


def run(settings: Settings, folder: Path, show: Show) -> Run:
    """Warms up by example, then improves by reward.

    Args:
        settings: The run.
        folder: Where a checkpoint is made.
        show: Called with phase, step and mean reward.
    """
    from transformers import AutoTokenizer

    start = time.perf_counter()
    result = Run(settings)
    model = settings.model or make_model(folder / "model", settings.seed, settings.layers)
    task = Additions(AutoTokenizer.from_pretrained(model), settings.seed)
    warm = folder / "warm"
    warm_up(settings, model, task, warm, show)
    with backends(settings, warm) as (policy, generation):
        result.reward_before = evaluate(generation, task)
        for index in range(settings.steps):
            result.steps.append(grpo_step(settings, policy, generation, task))
            show("GRPO", index + 1, result.steps[-1].reward)
        result.reward_after = evaluate(generation, task)
    result.seconds = time.perf_counter() - start
    return result


def warm_up(settings: Settings, model: Path, task: Additions, path: Path, show: Show) -> None:
    """Teaches the format and some of the sums by example; the result is GRPO's start."""
    config = {
        "optimizer": {"lr": 1e-3, "weight_decay": 0.0},
        "train_micro_batch_size": 64,
    }
    with ExitStack() as stack:
        policy = start_policy(settings, model, config, policy_cluster(settings, stack))
        stack.callback(policy.shutdown)
        policy.prepare_for_training()
        for index in range(settings.warmup):
            metrics = policy.train(task.solved(task.draw(64)), NLLLossFn())
            show("warm-up", index + 1, metrics["loss"])
        policy.save_checkpoint(str(path))


def policy_cluster(settings: Settings, stack: ExitStack) -> Cluster | None:
    """Where the trainer's ranks run; a single one runs in this process."""
    if settings.policy_ranks == 1:
        return None
    if settings.embedded:
        from rl_hosting import LocalCluster

        return stack.enter_context(LocalCluster(settings.policy_ranks))
    return stack.enter_context(ray_cluster(settings, settings.policy_ranks, "policy"))


def ray_cluster(settings: Settings, workers: int, name: str) -> AbstractContextManager[Cluster]:
    """Workers of Ray; if it does not run yet, with as many CPUs as all workers together count."""
    from rl_ray import RayVirtualCluster

    joins = "RAY_ADDRESS" in os.environ
    counted = max(settings.policy_ranks + 1, os.cpu_count() or 1)
    return RayVirtualCluster(
        [workers], name=name, ray_options={} if joins else {"num_cpus": counted}
    )


def start_policy(
    settings: Settings, model: Path, config: dict[str, Any], cluster: Cluster | None
) -> ColocatablePolicyInterface:
    """A trainer of a checkpoint; what a person asked for comes last."""
    given = {"backend": settings.policy, "model_name": str(model), "seed": settings.seed}
    return create_policy({**given, **config, **settings.policy_options}, cluster)


@contextmanager
def backends(
    settings: Settings, model: Path
) -> Iterator[tuple[ColocatablePolicyInterface, GenerationInterface]]:
    """The trainer in this process or in one for each rank, the engine in another (or here)."""
    with ExitStack() as stack:
        ranks = policy_cluster(settings, stack)
        cluster = None
        if not settings.embedded:
            cluster = stack.enter_context(ray_cluster(settings, 1, "generation"))
        generation = create_generation(
            {
                "backend": settings.generation,
                "model_name": str(model),
                "max_new_tokens": MAX_NEW_TOKENS,
                "temperature": 1.0,
                "seed": settings.seed,
            },
            cluster,
        )
        stack.callback(generation.shutdown)
        rows = settings.prompts * settings.samples
        config = {
            "temperature": 1.0,
            "train_global_batch_size": rows // settings.updates,
            "train_micro_batch_size": rows // settings.updates,
            "logprob_batch_size": rows,
            "max_grad_norm": 1.0,
            "optimizer": {
                "lr": settings.learning_rate,
                "betas": (0.9, 0.99),
                "weight_decay": 0.0,
            },
            "scheduler": {
                "name": "linear",
                "warmup_steps": 10 * settings.updates,
                "total_steps": max(settings.steps, 11) * settings.updates,
                "min_lr_ratio": 0.1,
            },
        }
        policy = start_policy(settings, model, config, ranks)
        stack.callback(policy.shutdown)
        yield policy, generation


def grpo_step(
    settings: Settings,
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    task: Additions,
) -> Step:
    """Generate, grade, score what the loss needs, train, refit, check."""
    seconds: dict[str, float] = {}
    prompts = task.prompts(task.draw(settings.prompts)).repeat_interleave(settings.samples)
    prompts["seed"] = torch.randint(0, 2**62, (prompts.size,), generator=task.generator)
    with timed(seconds, "generate"):
        generation.prepare_for_generation()
        output = generation.generate(prompts)
        generation.finish_generation()
    rewards = task.rewards(output)
    relative = partial(grpo_advantages, group_size=settings.samples)
    batch = training_batch(output, rewards, advantages=relative)
    on_policy = settings.updates == 1
    with timed(seconds, "score"):
        policy.prepare_for_lp_inference()
        if not on_policy:
            batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
        if settings.kl_penalty:
            reference = policy.get_reference_policy_logprobs(batch)
            batch["reference_policy_logprobs"] = reference["reference_logprobs"]
    with timed(seconds, "train"):
        policy.prepare_for_training()
        order = torch.randperm(batch.size, generator=task.generator)
        loss_fn = GRPOLossFn(
            ratio_clip_min=0.2,
            ratio_clip_max=0.28,
            reference_policy_kl_penalty=settings.kl_penalty,
            on_policy=on_policy,
        )
        metrics = policy.train(batch.select_indices(order), loss_fn)
        policy.finish_training()
    with timed(seconds, "refit"):
        report = refit(policy, generation)
    with timed(seconds, "check"):
        generation.prepare_for_generation()
        some = prompts.slice(0, min(32, prompts.size))
        consistent = validate_log_probability_consistency(policy, generation, some)
    # The ratio of the engine's and the trainer's probability before the steps, over all of them.
    largest = max(metrics["all_mb_metrics"]["token_mult_prob_error_max"])
    return Step(
        reward=float(rewards.mean()),
        loss=metrics["loss"],
        kl=metrics.get("kl", 0.0),
        logprob_error=math.log(largest),
        consistent=consistent,
        refit_gb_per_s=report.gb_per_s,
        seconds=seconds,
    )


def evaluate(generation: GenerationInterface, task: Additions, problems: int = 512) -> float:
    """Mean reward over fresh problems, one sample each."""
    prompts = task.prompts(task.draw(problems))
    prompts["seed"] = torch.randint(0, 2**62, (problems,), generator=task.generator)
    generation.prepare_for_generation()
    return float(task.rewards(generation.generate(prompts)).mean())


@contextmanager
def timed(seconds: dict[str, float], what: str) -> Iterator[None]:
    """Adds the block's wall time to ``seconds[what]``."""
    start = time.perf_counter()
    yield
    seconds[what] = seconds.get(what, 0.0) + time.perf_counter() - start
