"""P9: checkpoints."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from rl_conformance.checks.common import adapted_policy, train_adapters
from rl_conformance.continuing import changes_no_step, train, trainer
from rl_conformance.expect import raises, require, same, same_tensor
from rl_conformance.models import families_of
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import checkpoint_weights, policy_weights, same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_core.interfaces import ColocatablePolicyInterface


@check("P9")
def saving_changes_no_step(ctx: Context) -> None:
    """To one path again and again, steps and reference are as if it were never saved."""
    path, data = ctx.directory() / "checkpoint", training_batch((5, 6), seed=9)
    seen: list[torch.Tensor] = []

    def save(policy: ColocatablePolicyInterface) -> None:
        policy.save_checkpoint(str(path))
        seen.append(policy.get_reference_policy_logprobs(data)["reference_logprobs"])
        same_tensor(seen[-1], seen[0], "reference_logprobs")

    changes_no_step(ctx, save)


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
    """Fails unless both have the same weights, and the same after the next step.

    The message of a failure names the part of the state that differs first.
    """
    same_weights(policy_weights(resumed), policy_weights(other), "the weights that were resumed")
    results = [train(policy, seed) for policy in (other, resumed)]
    parts = {
        "lr": "the learning rate, or the count of steps",
        "loss": "the random state of dropout, as the weights are the same",
        "grad_norm": "the random state, as weights and loss are the same",
    }
    for key, part in parts.items():
        one, two = (float(result[key]) for result in results)
        same(two, one, f"{part}: {key} of the step after resuming")
    what = "the optimizer's moments, as weights, rate, loss and gradient norm were the same"
    same_weights(policy_weights(resumed), policy_weights(other), f"{what}: weights a step later")


@check(
    "P9",
    device="cpu",
    cases={"tied": {"family": "qwen2"}, "untied": {"family": "llama"}},
)
def a_resumed_run_can_be_resumed_again(ctx: Context, family: str) -> None:
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


@check("P9", cases=families_of("P9"))
def every_family_resumes(ctx: Context, family: str) -> None:
    """A checkpoint of any architecture loads, and gives the log-probs of what was saved."""
    path, data = ctx.directory() / "checkpoint", training_batch((7, 12, 4), seed=9)
    model: dict[str, Any] = {"model_name": str(ctx.model(family)), "dropout": False}
    with ctx.refusable(family):
        policy = trainer(ctx, **model)
    train(policy, 0)
    policy.save_checkpoint(str(path))
    resumed = trainer(ctx, resume_from=str(path), **model)
    scores = [each.get_logprobs(data)["logprobs"] for each in (resumed, policy)]
    same_tensor(scores[0], scores[1], "logprobs of the checkpoint")


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
    one, two = (float(result["loss"]) for result in results)
    same(two, one, "loss of the last step, as without resuming")


@check("P9", device="cpu", cases={f"step_{step}": {"step": step} for step in (0, 1)})
def loading_another_state_shows(ctx: Context, step: int) -> None:
    """Log-probs and the next step are of what was loaded last, also if it was never trained."""
    path, data = ctx.directory() / "checkpoint", training_batch((7, 12, 4), seed=9)
    policy, other = (trainer(ctx, dropout=False, **_FULL) for _ in range(2))
    if not hasattr(policy, "load_checkpoint"):
        ctx.not_run("the policy loads checkpoints only when it is built", excused=True)
    train(policy, 0)
    for seed in range(step):
        train(other, 1 + seed)
    other.save_checkpoint(str(path))
    before = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    policy.get_logprobs(data)  # which a policy may keep until its weights change
    policy.load_checkpoint(str(path))
    scores = [each.get_logprobs(data)["logprobs"] for each in (policy, other)]
    same_tensor(scores[0], scores[1], "logprobs after the load")
    after = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
    same_tensor(after, before, "reference_logprobs after the load")
    _goes_on_as(policy, other, 2)


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
def saving_again_replaces_only_its_own_path(ctx: Context) -> None:
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
def a_failed_save_raises(ctx: Context) -> None:
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
        raised_it = False
        with mock.patch(operation, side_effect=full) as stopped:
            try:
                policy.save_checkpoint(str(path))
            except Exception:
                raised_it = True
        what = f"save_checkpoint raises, where {operation} has no space left"
        same(raised_it, stopped.called, what)
        if not stopped.called:
            old = policy_weights(policy)
            continue
        failed.append(operation)
        try:
            resumed = ctx.fresh_policy(resume_from=str(path))
        except RLError:
            continue
        same_weights(policy_weights(resumed), old, f"what resumes after {operation} failed")
    used = f"a call of one of {', '.join(_WRITES)}"
    require(failed, "save_checkpoint", used, "none of them")
    policy.save_checkpoint(str(path))
    _goes_on_as(_resumed(ctx, path), plain, 2)


@check("P9")
def a_refused_checkpoint_changes_nothing_else(ctx: Context) -> None:
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


_LENGTHS = (12, 3, 30, 17)


class Interrupted(BaseException):
    """Fault: the process is stopped in the middle of a save."""


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
    same(rates[1], rates[0], "lr of two steps after resuming")
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
    require(exported, f"{path} after save_checkpoint", "a config.json", sorted(path.rglob("*")))
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
    used = f"a call of one of {', '.join(_FILE_OPERATIONS)}"
    require(stopped, "save_checkpoint", used, "none of them")


@check("P9")
def an_interrupted_save_keeps_the_old_checkpoint(ctx: Context) -> None:
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


@check("P9")
def adapters_are_merged_in_an_export_and_resumed_by_a_checkpoint(ctx: Context) -> None:
    """The model beside a checkpoint has them merged; who loads it has the policy's log-probs."""
    policy, data, path = adapted_policy(ctx), training_batch((7, 4, 9)), ctx.directory() / "saved"
    train_adapters(policy)
    policy.save_checkpoint(str(path))
    exported = next((file.parent for file in sorted(path.rglob("config.json"))), None)
    require(exported, f"{path} after save_checkpoint", "a config.json", sorted(path.rglob("*")))
    policy.prepare_for_lp_inference()
    logprobs = policy.get_logprobs(data)["logprobs"]
    oracle = ctx.oracle(exported)
    ctx.measure_error(logprobs, oracle.batch_logprobs(data["input_ids"], data["input_lengths"]))
    resumed = adapted_policy(ctx, resume_from=str(path))
    resumed.prepare_for_lp_inference()
    same_tensor(resumed.get_logprobs(data)["logprobs"], logprobs, "log-probs after loading")
    base = ctx.oracle(ctx.model("qwen2", seed=1))
    reference = resumed.get_reference_policy_logprobs(data)["reference_logprobs"]
    plain = base.batch_logprobs(data["input_ids"], data["input_lengths"])
    ctx.measure_error(reference, plain)
