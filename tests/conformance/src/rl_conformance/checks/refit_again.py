"""R1, R4, R6, R10: the second refit and those after it, whatever came before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_conformance.expect import require
from rl_conformance.refits import run_refit
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import (
    engine_for,
    every_pair,
    exact,
    settable_trainer,
    shuffle,
    ways_of,
)

if TYPE_CHECKING:
    from rl_conformance.context import Context

_WAYS = ("direct", "packed", "delta", "staged", "ticket", "asleep")


def _trainer(ctx: Context, side: str) -> Any:
    """The policy under test, or one whose weights can be set where an engine is."""
    if side == "engine":
        return settable_trainer(ctx)
    return ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))


def _change(policy: Any, side: str, step: int, way: str) -> None:
    """New weights: one tensor's where only that is to be sent."""
    if side == "trainer":
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6), seed=step), NegativeLogLikelihood())
        return
    names = sorted(name for name, _ in policy.model.named_parameters())
    one = [names[5 * step % len(names)]] if way == "delta" else None
    shuffle(policy, step, one)


def _in_sequence(ctx: Context, side: str, *names: str) -> None:
    """Every way after every other one: each time exact, each time the next version."""
    policy, engine = _trainer(ctx, side), engine_for(ctx, side)
    run_refit(policy, engine)
    exact(ctx, policy, engine, "the first refit", 1)
    ways, before = ways_of(ctx, policy, side, *names), "packed"
    for step, way in enumerate(every_pair(list(ways)), 2):
        _change(policy, side, step, way)
        ways[way](policy, engine)
        exact(ctx, policy, engine, f"refit {step}, {way} after {before}", step)
        before = way


@check("R6", needs=("generation",), timeout_s=300.0)
def an_engine_takes_every_way_after_every_other(ctx: Context) -> None:
    """Direct, packed, delta, staged, by ticket, asleep: any after any, each exact."""
    _in_sequence(ctx, "engine", *_WAYS)


@check("R6", needs=("policy",), timeout_s=300.0)
def a_trainer_goes_every_way_after_every_other(ctx: Context) -> None:
    """Direct, packed, delta, staged, by ticket: any after any, each exact."""
    _in_sequence(ctx, "trainer", *_WAYS[:-1])


@check("R4", needs=("generation",), timeout_s=240.0)
def an_engine_changes_the_transport(ctx: Context) -> None:
    """Over a group after shared memory and back, a delta among them, each exact."""
    _in_sequence(ctx, "engine", "collective", "packed", "delta")


@check("R4", needs=("policy",), timeout_s=240.0)
def a_trainer_changes_the_transport(ctx: Context) -> None:
    """Over a group after shared memory and back, a delta among them, each exact."""
    _in_sequence(ctx, "trainer", "collective", "packed", "delta")


@check("R1", needs=("generation",))
def one_changed_tensor_is_enough(ctx: Context) -> None:
    """Delta after delta, each with another tensor that changed: it alone is sent, and it serves."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    for version, (name, _) in enumerate(policy.model.named_parameters(), 2):
        shuffle(policy, version, [name])
        report = run_refit(policy, engine, delta=True)
        require(report.tensors == 1, f"{report.tensors} tensors were sent, {name} had changed")
        exact(ctx, policy, engine, f"a delta with {name}", version)


@check("R10", needs=("generation",))
def a_version_may_go_back_with_its_weights(ctx: Context) -> None:
    """Old weights under their old number, then the new ones again: outputs follow the weights."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    kept = {name: value.clone() for name, value in policy.model.state_dict().items()}
    for seed, version in enumerate((3, 4, 3, 4, 9)):
        if version == 3:
            policy.model.load_state_dict(kept)
        else:
            shuffle(policy, seed)
        run_refit(policy, engine, version=version)
        exact(ctx, policy, engine, f"refit {seed + 1}", version)
        rows = engine.generate(ctx.prompts(5, 150, 3), greedy=True)["weights_version"].tolist()
        require(rows == [version] * 3, f"rows of version {version} say {rows}")
