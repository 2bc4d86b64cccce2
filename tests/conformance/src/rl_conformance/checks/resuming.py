"""P9: saving again, resuming again, and what a save that fails leaves behind."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.continuing import train, trainer
from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import checkpoint_weights, policy_weights, same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface

_FULL: dict[str, Any] = {
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.6, 0.9), "eps": 1e-4},
    "scheduler": {"name": "cosine", "warmup_steps": 3, "total_steps": 6, "min_lr_ratio": 0.2},
}


def _resumed(ctx: Context, path: Path, **config: Any) -> ColocatablePolicyInterface:
    torch.manual_seed(99)  # of another process
    policy = ctx.fresh_policy(**_FULL, **config, max_grad_norm=1.0, resume_from=str(path))
    policy.prepare_for_training()
    return policy


def _goes_on_as(
    resumed: ColocatablePolicyInterface, other: ColocatablePolicyInterface, seed: int
) -> None:
    """Fails unless both have the same weights, and the same after the next step."""
    same_weights(policy_weights(resumed), policy_weights(other), "weights")
    results = [train(policy, seed) for policy in (other, resumed)]
    for key in ("loss", "grad_norm", "lr"):
        one, two = (float(result[key]) for result in results)
        require(one == two, f"{key} of the next step is {two}, and {one} without resuming")
    same_weights(policy_weights(resumed), policy_weights(other), "weights a step later")


@check(
    "P9",
    device="cpu",
    cases={"tied": {"family": "qwen2"}, "untied": {"family": "llama"}},
)
def resuming_what_was_resumed_goes_on(ctx: Context, family: str) -> None:
    """Saved before the first step, in the warm-up and after it: each goes on as without.

    With dropout, decay, a schedule and clipping, so that whatever is not saved shows.
    """
    model = str(ctx.model(family, attention_dropout=0.5))
    directory = ctx.directory()
    alone, resumed = (trainer(ctx, model_name=model, **_FULL) for _ in range(2))
    for seed in range(3):
        path = directory / f"step-{seed}"
        resumed.save_checkpoint(str(path))
        resumed.shutdown()
        resumed = _resumed(ctx, path, model_name=model)
        _goes_on_as(resumed, alone, 2 * seed)
        _goes_on_as(resumed, alone, 2 * seed + 1)


@check("P9", device="cpu")
def a_narrow_dtype_resumes_bit_equal(ctx: Context) -> None:
    """In bfloat16, where a step may be less than weights can show: what it is kept in resumes."""
    ctx.tolerance_of("bfloat16")  # or it does not run
    path = ctx.directory() / "checkpoint"
    small: dict[str, Any] = {"dropout": False, "dtype": "bfloat16", "optimizer": {"lr": 1e-4}}
    alone = trainer(ctx, **small)
    for seed in range(3):
        train(alone, seed)
    alone.save_checkpoint(str(path))
    resumed = trainer(ctx, resume_from=str(path), **small)
    for seed in range(3, 6):
        results = [train(policy, seed) for policy in (alone, resumed)]
        same_weights(policy_weights(resumed), policy_weights(alone), f"weights after step {seed}")
    require(float(results[0]["loss"]) == float(results[1]["loss"]), "the losses differ")


@check("P9")
def the_reference_resumes_too(ctx: Context) -> None:
    """A policy that resumes is compared with what the run started from, bit for bit."""
    data, path = training_batch((7, 12, 4), seed=9), ctx.directory() / "checkpoint"
    policy = trainer(ctx, dropout=False, **_FULL)
    before = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    train(policy, 0)
    policy.save_checkpoint(str(path))
    resumed = _resumed(ctx, path)
    same_tensor(
        resumed.get_reference_policy_logprobs(data)["reference_logprobs"], before, "once resumed"
    )
    train(resumed, 1)
    same_tensor(
        resumed.get_reference_policy_logprobs(data)["reference_logprobs"], before, "a step later"
    )


@check("P9", device="cpu")
def saving_again_replaces_and_spares(ctx: Context) -> None:
    """To the same path: the newer state alone. To another: the older one stays what it is."""
    directory = ctx.directory()
    newest, kept = directory / "newest", directory / "kept"
    policy, other = (trainer(ctx, dropout=False, **_FULL) for _ in range(2))
    for one in (policy, other):
        train(one, 0)
    for path in (newest, kept):
        policy.save_checkpoint(str(path))
    old = policy_weights(policy)
    for seed in (1, 2):
        train(policy, seed)
        policy.save_checkpoint(str(newest))
    _goes_on_as(_resumed(ctx, kept), other, 1)
    resumed = _resumed(ctx, newest)
    same_weights(policy_weights(resumed), policy_weights(policy), "weights of the newer one")
    for path, weights in ((newest, policy_weights(policy)), (kept, old)):
        exported = next(file.parent for file in sorted(path.rglob("config.json")))
        for name, tensor in checkpoint_weights(exported).items():
            same_tensor(tensor, weights[name], f"{name} exported to {path.name}")
    _goes_on_as(resumed, policy, 3)


_WRITES = ("torch.save", "safetensors.torch.serialize_file", "os.replace", "os.rename")


@check("P9", device="cpu")
def a_save_that_fails_says_so(ctx: Context) -> None:
    """A full disk raises; the older checkpoint resumes, and the policy goes on and saves."""
    path = ctx.directory() / "checkpoint"
    policy, plain = (trainer(ctx, dropout=False, **_FULL) for _ in range(2))
    for one in (policy, plain):
        train(one, 0)
    policy.save_checkpoint(str(path))
    old, failed = policy_weights(policy), []
    for one in (policy, plain):
        train(one, 1)
    for operation in _WRITES:
        full = OSError(errno.ENOSPC, "No space left on device")
        said = False
        with mock.patch(operation, side_effect=full) as stopped:
            try:
                policy.save_checkpoint(str(path))
            except Exception:
                said = True
        require(said == stopped.called, f"{operation} failed: {stopped.called}, a save: {said}")
        if not stopped.called:
            old = policy_weights(policy)
            continue
        failed.append(operation)
        try:
            resumed = ctx.fresh_policy(resume_from=str(path))
        except RLError:
            continue
        same_weights(policy_weights(resumed), old, f"what resumes after {operation} failed")
    require(failed, f"saving went through none of {', '.join(_WRITES)}")
    policy.save_checkpoint(str(path))
    _goes_on_as(_resumed(ctx, path), plain, 2)


@check("P9")
def resuming_what_is_broken_spares_the_others(ctx: Context) -> None:
    """The refused policy moves neither the global random state nor a policy beside it."""
    path = ctx.directory() / "checkpoint"
    policy = trainer(ctx, dropout=False, **_FULL)
    train(policy, 0)
    policy.save_checkpoint(str(path))
    weights, state = policy_weights(policy), torch.get_rng_state()
    largest = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-16])
    with raises(RLError):
        ctx.fresh_policy(resume_from=str(path))
    same_tensor(torch.get_rng_state(), state, "the global random state")
    same_weights(policy_weights(policy), weights, "weights")
    policy.train(training_batch((5, 3)), NegativeLogLikelihood())
    policy.save_checkpoint(str(path))
    resumed = ctx.fresh_policy(resume_from=str(path))
    same_weights(policy_weights(resumed), policy_weights(policy), "weights of the next save")
