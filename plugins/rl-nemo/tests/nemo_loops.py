"""NeMo RL's loops as they call policies and engines, for a machine that cannot install them.

Test doubles: each function makes the calls of the function of theirs that it is named after, in
its order, with its keywords, and does with the results what theirs does. The comments name file
and line at commit 7ea279abf, without ``nemo_rl/algorithms``.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_core.batch import BatchedDataDict


class Timer:
    """Their stopwatch, as far as policies see it (utils/timer.py)."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def time(self, label: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.times[label].append(time.perf_counter() - start)


def refit_policy_generation(
    policy: Any, generation: Any, *, timer: Any = None, kv_scales: Any = None
) -> dict[str, float]:
    synchronizer = getattr(generation, "weight_synchronizer", None)  # grpo.py:2337
    return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}


def rows_of(prompts: torch.Tensor, samples: int) -> BatchedDataDict[Any]:
    repeated = prompts.repeat_interleave(samples, 0)
    return BatchedDataDict(
        {
            "input_ids": repeated,
            "input_lengths": torch.full((len(repeated),), repeated.shape[1]),
            "stop_strings": [None] * len(repeated),  # experience/rollouts.py:480
        }
    )


async def generate_responses_async(
    generation: Any, rows: BatchedDataDict[Any]
) -> BatchedDataDict[Any]:
    """Every row by a call of its own, all at once (experience/rollouts.py:560-640)."""
    config = getattr(generation, "cfg", None) or getattr(generation, "sglang_cfg", None) or {}
    assert config.get("backend", "") == "megatron", "Async generation is not enabled."
    assert hasattr(generation, "generate_async")

    async def one(row: int) -> BatchedDataDict[Any]:
        outputs = []
        async for item in generation.generate_async(rows.slice(row, row + 1), greedy=False):
            outputs.append(item)  # noqa: PERF401 - as theirs does
        outputs.sort(key=lambda item: item[0])
        assert outputs, "Generation returned no outputs for a non-empty batch."
        return outputs[0][1]

    done = await asyncio.gather(*(one(row) for row in range(rows.size)))
    pads = {"output_ids": 0, "logprobs": 0.0}
    return BatchedDataDict.from_batches(list(done), pad_value_dict=pads)


def summed(results: dict[str, Any], metrics: dict[str, Any]) -> dict[str, float]:
    """What becomes of the results of a step (grpo.py:3433-3495, dpo.py:633, sft.py:510)."""
    metrics |= {"loss": results["loss"].numpy(), "grad_norm": results["grad_norm"].numpy()}
    metrics.update(results["all_mb_metrics"])
    for key, value in metrics.items():
        if key in {"probs_ratio_min", "probs_ratio_clamped_min"}:
            metrics[key] = np.min(value).item()
        elif key in {"probs_ratio_max", "probs_ratio_clamped_max"}:
            metrics[key] = np.max(value).item()
        elif key in {"lr", "wd", "reward", "global_valid_seqs", "global_valid_toks"}:
            metrics[key] = np.mean(value).item()
        elif isinstance(value, np.ndarray | list):
            metrics[key] = np.sum(value).item()
    return metrics


def training_data(rows: BatchedDataDict[Any], output: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Sequences with a mask of the answers (grpo.py:3130-3200)."""
    lengths = output["unpadded_sequence_lengths"]
    places = torch.arange(output["output_ids"].shape[1])
    mask = (places >= rows["input_lengths"][:, None]) & (places < lengths[:, None])
    return BatchedDataDict(
        {
            "input_ids": output["output_ids"],
            "input_lengths": lengths,
            "generation_logprobs": output["logprobs"],
            "token_mask": mask.float(),
            "sample_mask": torch.ones(rows.size),
        }
    )


def spread(rewards: torch.Tensor, samples: int, mask: torch.Tensor) -> torch.Tensor:
    """Rewards less their group's mean, for every token of an answer."""
    groups = rewards.view(-1, samples)
    advantages = (groups - groups.mean(1, keepdim=True)).flatten()
    return advantages[:, None].expand(mask.shape) * mask


def grpo_train(
    policy: Any,
    generation: Any,
    loss_fn: Any,
    prompts: torch.Tensor,
    reward: Callable[[BatchedDataDict[Any]], torch.Tensor],
    *,
    steps: int,
    samples: int,
    colocated: bool = True,
    asynchronous: bool = False,
    checkpoint: Path | None = None,
    timer: Timer | None = None,
) -> list[dict[str, float]]:
    """grpo.py:2650-3700; asynchronous rollouts are those of run_async_multi_turn_rollout."""
    timer, history, stale = timer or Timer(), [], True
    for step in range(steps):
        if stale:  # 2757, 2915
            refit_policy_generation(policy, generation, timer=timer)
            stale = False
        else:
            if colocated:
                policy.offload_after_refit()
            generation.prepare_for_generation()
        if hasattr(generation, "snapshot_step_metrics"):  # 2926
            generation.snapshot_step_metrics()
        generation.clear_logger_metrics()  # 2932
        rows = rows_of(prompts, samples)
        with timer.time("generation"):
            if asynchronous:
                output = asyncio.run(generate_responses_async(generation, rows))
            else:
                output = generation.generate(rows, greedy=False)  # experience/rollouts.py:487
        generation.finish_generation()  # 3011
        logged = generation.get_logger_metrics()  # 3016
        rewards = reward(output)
        data = training_data(rows, output)
        policy.prepare_for_lp_inference()  # 3213
        keys = ("input_ids", "input_lengths", "token_mask", "sample_mask")
        scored = BatchedDataDict({key: data[key] for key in keys})
        data["prev_logprobs"] = policy.get_logprobs(scored, timer=timer)["logprobs"]  # 3239
        reference = policy.get_reference_policy_logprobs(scored, timer=timer)  # 3253
        data["reference_policy_logprobs"] = reference["reference_logprobs"]
        data["advantages"] = spread(rewards, samples, data["token_mask"])
        policy.prepare_for_training()  # 3328
        stale = True
        results = policy.train(data, loss_fn, timer=timer)  # 3333
        difference = data["prev_logprobs"] - output["logprobs"]
        apart = (difference * data["token_mask"]).abs().max()
        history.append(summed(results, {"reward": rewards.numpy(), "apart": apart.numpy()}))
        assert logged == generation.get_logger_metrics()
        printed = {name: history[-1][name] for name in ("gen_kl_error", "token_mult_prob_error")}
        assert printed["gen_kl_error"] < 1e-4  # 3653, 3708
        assert printed["token_mult_prob_error"] < 1.001
        if checkpoint is not None and step == steps - 1:  # 3581-3619
            policy.prepare_for_training()
            policy.save_checkpoint(
                weights_path=str(checkpoint / "policy" / "weights"),
                optimizer_path=str(checkpoint / "policy" / "optimizer"),
                tokenizer_path=str(checkpoint / "policy" / "tokenizer"),
                checkpointing_cfg={"enabled": True},
            )
            policy.finalize_async_save()
    return history


def async_grpo_train(
    policy: Any,
    generation: Any,
    loss_fn: Any,
    prompts: torch.Tensor,
    reward: Callable[[BatchedDataDict[Any]], torch.Tensor],
    *,
    steps: int,
    samples: int,
) -> list[dict[str, float]]:
    """grpo.py:4090-5260, the collector's part done between two steps; its order of calls."""
    history, timer = [], Timer()
    generation.clear_logger_metrics()  # 4426
    refit_policy_generation(policy, generation)
    generation.prepare_for_generation()  # 4336
    generation.finish_generation(release_gpu=False)  # 4375, after a validation
    for _ in range(steps):
        size = policy.sharding_annotations.get_axis_size("data_parallel")  # 4668
        assert len(prompts) * samples % size == 0
        rows = rows_of(prompts, samples)
        output = asyncio.run(generate_responses_async(generation, rows))
        if generation.blocks_training():  # 4762
            generation.get_logger_metrics()
            generation.finish_generation(release_gpu=True)
        data, rewards = training_data(rows, output), reward(output)
        data["advantages"] = spread(rewards, samples, data["token_mask"])
        policy.prepare_for_lp_inference()  # 4780
        data["prev_logprobs"] = policy.get_logprobs(data, timer=timer)["logprobs"]
        reference = policy.get_reference_policy_logprobs(data, timer=timer)
        data["reference_policy_logprobs"] = reference["reference_logprobs"]
        policy.prepare_for_training()  # 4889
        results = policy.train(data, loss_fn, timer=timer)
        blocks = generation.blocks_training()  # 4916
        assert not (blocks and generation.wake_carries_weight_updates())
        generation.get_logger_metrics()
        refit_policy_generation(policy, generation)
        generation.clear_logger_metrics()  # 4980
        generation.prepare_for_generation()  # 5010
        generation.finish_generation(release_gpu=False)  # 5034
        history.append(summed(results, {"reward": rewards.numpy()}))
    return history


#: DPOValMetrics (dpo.py:101).
PREFERENCE_METRICS = (
    "loss",
    "sft_loss",
    "preference_loss",
    "accuracy",
    "rewards_chosen_mean",
    "rewards_rejected_mean",
    "num_valid_samples",
    "global_valid_seqs",
    "global_valid_toks",
)


def dpo_train(
    policy: Any, loss_fn: Any, pairs: list[Any], *, gbs: int, mbs: int
) -> list[dict[str, float]]:
    """dpo.py:322-660: the reference's log-probs come rolled by one."""
    timer, history = Timer(), []
    policy.prepare_for_training()  # 577
    for batch in pairs:
        found = policy.get_reference_policy_logprobs(batch, micro_batch_size=mbs * 2)  # 336
        rolled = torch.roll(found["reference_logprobs"], -1, dims=-1)
        batch["reference_policy_logprobs"] = rolled
        results = policy.train(
            batch, loss_fn, eval_mode=False, gbs=gbs * 2, mbs=mbs * 2, timer=timer
        )  # 596
        history.append(summed(results, {}))
        printed = {name: float(history[-1][name]) for name in PREFERENCE_METRICS}  # 750
        assert printed["loss"] >= 0
    return history


def distillation_train(
    student: Any, teacher: Any, generation: Any, loss_fn: Any, prompts: torch.Tensor, *, steps: int
) -> list[dict[str, float]]:
    """distillation.py:800-940."""
    timer, history = Timer(), []
    teacher.offload_after_refit()  # 497
    for _ in range(steps):
        refit_policy_generation(student, generation, timer=timer)
        rows = rows_of(prompts, 1)
        output = generation.generate(rows, greedy=False)
        generation.finish_generation()  # 854
        data = training_data(rows, output)
        student.offload_before_refit()  # 902
        teacher.prepare_for_lp_inference()
        top = teacher.get_topk_logits(data, k=8, timer=timer)  # 907
        data["teacher_topk_logits"] = top["topk_logits"]
        data["teacher_topk_indices"] = top["topk_indices"]
        teacher.offload_after_refit()
        student.prepare_for_training()
        history.append(summed(student.train(data, loss_fn, timer=timer), {}))  # 923
    return history


# -- losses, as theirs are called (loss/loss_functions.py) ----------------------------------------


class Kind(enum.Enum):
    """Enums of their own (loss/interfaces.py)."""

    LOGPROB = "logprob"
    DISTILLATION = "distillation"
    DRAFT = "draft"
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class ClippedPG:
    """ClippedPGLossFn with its first options."""

    loss_type, input_type = Kind.TOKEN_LEVEL, Kind.LOGPROB

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        ratio = (next_token_logprobs - data["prev_logprobs"][:, 1:]).exp()
        advantages = data["advantages"][:, 1:]
        worst = torch.max(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
        loss = (worst * mask).sum() / global_valid_toks
        counted = data["sample_mask"].sum().item()
        extreme = ratio[mask.bool()].min().item() if mask.any() else float("inf")
        metrics = {"loss": loss.item(), "num_valid_samples": counted, "probs_ratio_min": extreme}
        apart = data["generation_logprobs"][:, 1:] - data["prev_logprobs"][:, 1:]
        kl = (-apart).expm1() + apart
        errors = {"gen_kl_error": kl, "token_mult_prob_error": apart.abs().exp()}
        for name, error in errors.items():
            metrics[name] = ((error * mask).sum() / global_valid_toks).item()
        return loss, metrics


class Preference:
    """DPOLossFn: rows in pairs, the better one first; the reference is rolled."""

    loss_type, input_type = Kind.SEQUENCE_LEVEL, Kind.LOGPROB

    def __call__(
        self,
        next_token_logprobs: torch.Tensor,
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        reference = data["reference_policy_logprobs"][:, :-1]
        rewards = ((next_token_logprobs - reference) * mask).sum(-1)
        losses = -torch.nn.functional.logsigmoid(rewards[::2] - rewards[1::2])
        loss = losses.sum() / (global_valid_seqs / 2)
        metrics = {
            "loss": loss.item(),
            "sft_loss": 0.0,
            "preference_loss": loss.item(),
            "accuracy": ((rewards[::2] > rewards[1::2]).sum() / (global_valid_seqs / 2)).item(),
            "rewards_chosen_mean": (rewards[::2].sum() / (global_valid_seqs / 2)).item(),
            "rewards_rejected_mean": (rewards[1::2].sum() / (global_valid_seqs / 2)).item(),
            "num_valid_samples": len(losses),
        }
        return loss, metrics


class Distillation:
    """DistillationLossFn of the forward kind."""

    loss_type, input_type = Kind.TOKEN_LEVEL, Kind.DISTILLATION
    kl_type, zero_outside_topk = "forward", False

    def __call__(
        self,
        student_topk_logprobs: torch.Tensor,
        teacher_topk_logprobs: torch.Tensor,
        H_all: torch.Tensor | None,  # noqa: N803 - their name
        data: Any,
        global_valid_seqs: torch.Tensor,
        global_valid_toks: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, float]]:
        probs = teacher_topk_logprobs.exp()
        divergence = (probs * (teacher_topk_logprobs - student_topk_logprobs)).sum(-1)
        mask = data["token_mask"][:, 1:][:, : divergence.shape[1]] * data["sample_mask"][:, None]
        loss = (divergence * mask).sum() / global_valid_toks
        return loss, {"loss": loss.item(), "num_valid_samples": data["input_ids"].shape[0]}


class Draft:
    """DraftCrossEntropyLossFn, for which there is nothing here."""

    loss_type, input_type = Kind.TOKEN_LEVEL, Kind.DRAFT
