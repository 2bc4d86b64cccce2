"""P9: saving, resuming, exporting, and being interrupted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.expect import raises, require, same_tensor
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import checkpoint_weights, policy_weights, same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface

_LENGTHS = (12, 3, 30, 17)


class Interrupted(BaseException):
    """Fault: the process is told to stop in the middle of a save."""


def _policy_after(ctx: Context, steps: int, **config: Any) -> ColocatablePolicyInterface:
    policy = ctx.fresh_policy(**config)
    policy.prepare_for_training()
    for step in range(steps):
        policy.train(training_batch(_LENGTHS, seed=step), NegativeLogLikelihood())
    return policy


@check("P9", device="cpu")
def the_step_after_resuming_is_bit_equal(ctx: Context) -> None:
    """Save, go on, and resume elsewhere: both take the same next steps, bit for bit.

    The model has dropout, so that a random state that does not resume shows.
    """
    path = ctx.directory() / "checkpoint"
    config: dict[str, Any] = {
        "model_name": str(ctx.model("qwen2", attention_dropout=0.5)),
        "scheduler": {"name": "linear", "total_steps": 8},
    }
    first = _policy_after(ctx, 2, **config)
    first.save_checkpoint(str(path))
    rates = [_two_more_steps(first)]
    torch.manual_seed(99)
    second = ctx.fresh_policy(resume_from=str(path), **config)
    rates.append(_two_more_steps(second))
    require(rates[0] == rates[1], f"learning rates are {rates[1]}, were {rates[0]}")
    same_weights(policy_weights(second), policy_weights(first), "weights two steps later")


def _two_more_steps(policy: ColocatablePolicyInterface) -> list[float]:
    policy.prepare_for_training()
    data = training_batch(_LENGTHS, seed=5)
    return [float(policy.train(data, NegativeLogLikelihood())["lr"]) for _ in range(2)]


@check("P9")
def weights_are_exported_for_transformers(ctx: Context) -> None:
    """The saved directory loads with transformers and gives the policy's log-probs."""
    path = ctx.directory() / "checkpoint"
    policy, data = _policy_after(ctx, 1), training_batch(_LENGTHS)
    policy.save_checkpoint(str(path))
    exported = next((file.parent for file in sorted(path.rglob("config.json"))), None)
    require(exported, f"there is no config.json in {path}")
    assert exported is not None
    weights = policy_weights(policy)
    for name, tensor in checkpoint_weights(exported).items():
        same_tensor(tensor, weights[name], name)
    policy.prepare_for_lp_inference()
    ctx.measure_error(
        policy.get_logprobs(data)["logprobs"],
        ctx.oracle(exported).batch_logprobs(data["input_ids"], data["input_lengths"]),
    )


#: Where a save can be stopped; a backend goes through some of them.
_FILE_OPERATIONS = (
    "torch.save",
    "safetensors.torch.serialize_file",
    "os.replace",
    "os.rename",
)


@check("P9")
def an_interrupted_save_never_loads(ctx: Context) -> None:
    """Stopped at any of its file operations, nothing is left that resumes."""
    policy, stopped = _policy_after(ctx, 1), []
    for operation in _FILE_OPERATIONS:
        path = ctx.directory() / "checkpoint"
        if _save_interrupted_at(policy, operation, path):
            stopped.append(operation)
            with raises(RLError):
                ctx.fresh_policy(resume_from=str(path))
    require(stopped, f"saving went through none of {', '.join(_FILE_OPERATIONS)}")


@check("P9")
def an_interrupted_save_spares_the_one_before(ctx: Context) -> None:
    """Over an older checkpoint: what loads is the old one whole, or nothing."""
    path, policy = ctx.directory() / "checkpoint", _policy_after(ctx, 1)
    policy.save_checkpoint(str(path))
    old = policy_weights(policy)
    policy.train(training_batch(_LENGTHS), NegativeLogLikelihood())
    for operation in _FILE_OPERATIONS:
        if not _save_interrupted_at(policy, operation, path):
            policy.save_checkpoint(str(path))
            old = policy_weights(policy)
            continue
        try:
            resumed = ctx.fresh_policy(resume_from=str(path))
        except RLError:
            continue
        same_weights(policy_weights(resumed), old, f"what resumes after a stop at {operation}")


def _save_interrupted_at(policy: ColocatablePolicyInterface, operation: str, path: Path) -> bool:
    """Whether the save went through the operation, and so was interrupted."""
    with mock.patch(operation, side_effect=Interrupted):
        try:
            policy.save_checkpoint(str(path))
        except Interrupted:
            return True
    return False


@check("P9")
def a_damaged_checkpoint_never_loads(ctx: Context) -> None:
    """A file that lost its end raises a typed error naming the directory or file."""
    path, policy = ctx.directory() / "checkpoint", _policy_after(ctx, 1)
    policy.save_checkpoint(str(path))
    largest = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-16])
    with raises(RLError, "checkpoint"):
        ctx.fresh_policy(resume_from=str(path))


@check("P9")
def a_missing_checkpoint_is_named(ctx: Context) -> None:
    """Resuming from nowhere raises a typed error naming the path."""
    path = ctx.directory() / "no-such-checkpoint"
    with raises(RLError, path.name):
        ctx.fresh_policy(resume_from=str(path))
