"""P5: step after step, training is what the configuration says, as written out by the oracle.

The weights are float32 whatever the run's are: it is the arithmetic of the optimizer that is looked
at, and in float32 every part of it shows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import require
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch, training_config
from rl_conformance.training_oracle import TrainingOracle, update_error
from rl_conformance.weights import policy_weights

if TYPE_CHECKING:
    from rl_conformance.context import Context
    from rl_conformance.training_oracle import Step
    from rl_core.interfaces import ColocatablePolicyInterface

_LENGTHS = (9, 3, 12, 1, 6)
#: Of an update: what the order of sums may change in AdamW's, which divides small gradients.
_OF_AN_UPDATE = 3e-2


def _pair(
    ctx: Context, config: dict[str, Any], family: str = "qwen2"
) -> tuple[ColocatablePolicyInterface, TrainingOracle]:
    """A policy in float32 with just these keys, and the oracle of its training."""
    ctx.tolerance_of("float32")
    path = ctx.model(family)
    policy = ctx.workshop.build("policy", "float32", {"model_name": str(path), **config})
    ctx.closing(policy).prepare_for_training()
    return policy, TrainingOracle(path, config)


def _agrees(ctx: Context, result: dict[str, Any], step: Step) -> None:
    mean, largest = ctx.tolerance_of("float32")
    ctx.measure("loss_error", abs(float(result["loss"]) - step.loss), largest)
    norm = abs(float(result["grad_norm"]) - step.grad_norm) / max(step.grad_norm, 1e-6)
    ctx.measure("grad_norm_relative_error", norm, max(mean, 1e-3))
    rate = abs(float(result["lr"]) - step.lr) / step.lr
    require(rate < 1e-5, f"lr is {result['lr']}, should be {step.lr}")


def _moved_alike(ctx: Context, policy: ColocatablePolicyInterface, oracle: TrainingOracle) -> None:
    error, name = update_error(policy_weights(policy), oracle.weights(), oracle.start)
    ctx.measure(f"update_relative_error of {name}", error, _OF_AN_UPDATE)


_PLAIN: dict[str, Any] = {"lr": 1e-3, "eps": 1e-4, "weight_decay": 0.0}
#: With it the size of a gradient shows in the step, as it does not in AdamW's usual one.
_BLUNT: dict[str, Any] = {"lr": 0.1, "eps": 0.1, "weight_decay": 0.0}
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": _PLAIN},
    "betas": {"optimizer": _PLAIN | {"betas": (0.5, 0.8)}},
    "eps_and_no_clipping": {"optimizer": _BLUNT, "max_grad_norm": None},
    "clipping": {"optimizer": _BLUNT, "max_grad_norm": 3.0},
    "clipping_above_the_norm": {"optimizer": _BLUNT, "max_grad_norm": 1e6},
    "clipping_by_default": {"optimizer": _BLUNT},
    "weight_decay": {"optimizer": _PLAIN | {"weight_decay": 5.0}},
    "weight_decay_by_default": {"optimizer": {"lr": 10.0, "eps": 1e3}},
    "temperature": {"optimizer": _BLUNT, "temperature": 0.6},
    "all_by_default": {},
}


@check("P5", cases={name: {"config": config} for name, config in _OPTIONS.items()})
def every_step_is_the_one_configured(ctx: Context, config: dict[str, Any]) -> None:
    """Four steps of AdamW: losses, norms before clipping, and how far each tensor moved."""
    policy, oracle = _pair(ctx, config)
    for seed in range(4):
        data = training_batch(_LENGTHS, seed=seed)
        data["sample_mask"][seed] = 0
        _agrees(ctx, policy.train(data, NegativeLogLikelihood(), mbs=2), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


@check("P5", cases={family: {"family": family} for family in ("llama", "qwen3")})
def every_family_steps_as_configured(ctx: Context, family: str) -> None:
    """Also where heads are not tied, and where queries and keys have norms, which do not decay."""
    policy, oracle = _pair(ctx, {"optimizer": _PLAIN | {"weight_decay": 5.0}}, family)
    for seed in range(2):
        data = training_batch(_LENGTHS, seed=seed)
        _agrees(ctx, policy.train(data, NegativeLogLikelihood()), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


_FALL: dict[str, Any] = {"warmup_steps": 2, "total_steps": 5, "min_lr_ratio": 0.25}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "warmup": {"name": "constant", "warmup_steps": 3},
    "linear": {"name": "linear", **_FALL},
    "cosine": {"name": "cosine", **_FALL},
    "cosine_to_zero": {"name": "cosine", "total_steps": 8},
}


@check("P5", cases={name: {"schedule": schedule} for name, schedule in _SCHEDULES.items()})
def every_step_has_its_rate(ctx: Context, schedule: dict[str, Any]) -> None:
    """Seven steps have the schedule's rates, beyond its end too, and are as long as they say."""
    policy, oracle = _pair(ctx, {"optimizer": _PLAIN, "scheduler": schedule})
    for seed in range(7):
        data = training_batch((6, 4), seed=seed)
        if seed == 3:  # only steps count
            policy.train(data, NegativeLogLikelihood(), eval_mode=True)
        _agrees(ctx, policy.train(data, NegativeLogLikelihood()), oracle.step(data))
    _moved_alike(ctx, policy, oracle)


@check("P5", cases={"in_the_call": {"configured": False}, "configured": {"configured": True}})
def every_global_batch_is_a_step_of_its_own(ctx: Context, configured: bool) -> None:
    """Each is normalised by its own counts, one without any is no step, and all are in the result.

    Rows of 1 to 20 tokens in batches of 2, of which one is masked and one ends in a masked row.
    """
    schedule = {"scheduler": {"name": "linear", "total_steps": 8}}
    size: dict[str, Any] = {"train_global_batch_size": 2} if configured else {}
    policy, oracle = _pair(ctx, {"optimizer": _BLUNT, **schedule, **size})
    data = training_batch((20, 2, 7, 9, 1, 12, 5, 3))
    data["sample_mask"][[2, 3, 7]] = 0
    gbs = None if configured else 2
    result = policy.train(data, NegativeLogLikelihood(), gbs=gbs, mbs=1)
    steps, counts = [], []
    for start in range(0, 8, 2):
        batch = data.slice(start, start + 2)
        steps.append(oracle.step(batch))
        counts.append(float((batch["token_mask"] * batch["sample_mask"][:, None]).sum()))
    history = result.get("step_metrics", {})
    parts = result.get("all_mb_metrics", {})
    for key in ("loss", "grad_norm"):
        total = sum(float(value) for value in parts.get(key, []))
        mean = sum(float(value) for value in history.get(key, [])) / 4
        ctx.measure(f"{key}, added up", abs(total - mean), 1e-6 + 1e-5 * abs(mean))
    for position, (step, count) in enumerate(zip(steps, counts, strict=True)):
        values = {key: history.get(key, [])[position : position + 1] for key in _HISTORY}
        require(all(values.values()), f"step_metrics has no value for step {position}: {history}")
        one = {key: value[0] for key, value in values.items()}
        _agrees(ctx, one, step)
        got = float(one["global_valid_toks"])
        require(got == count, f"step {position}: {got} valid tokens, not {count}")
    _agrees(ctx, result, steps[-1])
    require(float(result["global_valid_toks"]) == counts[-1], "the result is not the last step's")
    _moved_alike(ctx, policy, oracle)


_HISTORY = ("loss", "grad_norm", "lr", "global_valid_toks", "global_valid_seqs")


@check("P5")
def policies_share_nothing(ctx: Context) -> None:
    """Two that train in turns, with different settings, train as each does alone."""
    one: dict[str, Any] = {
        "optimizer": _PLAIN,
        "scheduler": {"name": "linear", "total_steps": 4},
        "max_grad_norm": 1.0,
    }
    two: dict[str, Any] = {"optimizer": _BLUNT, "max_grad_norm": 1e3, "temperature": 0.5}
    (first, expected), (second, other) = _pair(ctx, one), _pair(ctx, two)
    third = ctx.fresh_policy()
    for seed in range(3):
        data = training_batch(_LENGTHS, seed=seed)
        _agrees(ctx, first.train(data, NegativeLogLikelihood()), expected.step(data))
        third.shutdown()
        data = training_batch((5, 4), seed=seed)
        _agrees(ctx, second.train(data, NegativeLogLikelihood()), other.step(data))
    _moved_alike(ctx, first, expected)
    _moved_alike(ctx, second, other)


@check("P5")
def dropout_is_drawn_anew_and_from_the_seed(ctx: Context) -> None:
    """A seed gives the same losses again and another seed others; no two steps draw the same."""
    path = str(ctx.model("qwen2", attention_dropout=0.5))
    data = training_batch((12, 9, 17))
    losses = {}
    still = training_config()["optimizer"] | {"lr": 0.0}
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        torch.manual_seed(7 if name == "again" else 5)
        policy = ctx.fresh_policy(model_name=path, seed=seed, optimizer=still)
        policy.prepare_for_training()
        # Rows do not change and weights do not move: what differs is what was dropped.
        losses[name] = [float(policy.train(data, NegativeLogLikelihood())["loss"]) for _ in "123"]
        plain = policy.train(data, NegativeLogLikelihood(), eval_mode=True)["loss"]
        require(len({*losses[name], float(plain)}) == 4, f"the losses are {losses[name]}, {plain}")
        policy.shutdown()
    require(losses["again"] == losses["first"], f"a seed has the losses {losses}")
    require(losses["other"] != losses["first"], f"two seeds have the losses {losses}")


_THRIFT: dict[str, dict[str, Any]] = {
    "gradient_checkpointing": {"key": "gradient_checkpointing", "value": True},
    "a_second_model_as_reference": {"key": "reference", "value": "copy"},
}


@check("P5", cases=_THRIFT)
def what_saves_memory_changes_no_step(ctx: Context, key: str, value: Any) -> None:
    """A key that a backend has for its use of memory gives the same steps."""
    if key not in ctx.target.config_keys["policy"]:
        ctx.not_run(f"the backend has no {key}", excused=True)
    policy, oracle = _pair(ctx, {"optimizer": _BLUNT})
    thrifty = ctx.workshop.build("policy", "float32", {"optimizer": _BLUNT, key: value})
    ctx.closing(thrifty).prepare_for_training()
    for seed in range(2):
        data = training_batch(_LENGTHS, seed=seed)
        step = oracle.step(data)
        for one in (policy, thrifty):
            _agrees(ctx, one.train(data, NegativeLogLikelihood()), step)
    _moved_alike(ctx, thrifty, oracle)
