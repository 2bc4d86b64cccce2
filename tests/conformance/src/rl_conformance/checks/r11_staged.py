"""R11: staged refits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_conformance.doubles import Engine, Engines
from rl_conformance.expect import raised, same
from rl_conformance.faults import (
    InjectedFault,
    between_tensors,
    dropping,
    failing_finish,
    failing_write,
    in_the_engine,
    source_class,
)
from rl_conformance.refits import agree, attempt, equal, run_refit, unequal_pair
from rl_conformance.registry import check
from rl_conformance.served import greedy, same_output
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from rl_conformance.context import Context


_TENSOR = "model.layers.1.mlp.up_proj.weight"


_FAULTS: dict[str, dict[str, Any]] = {
    "at_a_write": {"fault": failing_write, "how": {"after": 3}},
    "at_the_finish": {"fault": failing_finish, "how": {}},
    "at_the_read_back": {"fault": dropping, "how": {"tensor": _TENSOR}},
}


@check("R11", cases=_FAULTS)
def a_failed_staged_refit_keeps_the_old_version(
    ctx: Context, fault: Any, how: dict[str, Any]
) -> None:
    """A loader that fails at any point leaves the old version, its bytes and its output."""
    policy, generation = unequal_pair(ctx)
    before, weights = greedy(ctx, generation, seed=0), engine_weights(generation)
    with in_the_engine(generation, fault, **how):
        error = attempt(policy, generation, isolation="staged", verify="installed")
    raised(error, RLError)
    same(generation.weights_version, ctx.first_version, "weights_version after the failed refit")
    same_weights(engine_weights(generation), weights, "after the failure")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
    run_refit(policy, generation, isolation="staged")
    equal(policy, generation)
    agree(ctx, policy, generation)


def _give_up() -> None:
    raise InjectedFault("the other engine gave up")


@check("R11")
def another_engines_failure_is_survived(ctx: Context) -> None:
    """If another engine of the refit fails at the last moment, this one serves what it had."""
    policy, generation = unequal_pair(ctx)
    before, weights = greedy(ctx, generation, seed=0), engine_weights(generation)
    other = ctx.closing(Engine(engine_weights(generation)))
    both = Engines(generation, other)
    other.on["finish"] = _give_up
    error = attempt(policy, both, isolation="staged")
    raised(error, RLError)
    same(generation.weights_version, ctx.first_version, "weights_version after the failed refit")
    same_weights(engine_weights(generation), weights, "after the failure")
    same_output(ctx, greedy(ctx, generation, seed=0), before)
    other.on.clear()
    run_refit(policy, both, isolation="staged")
    equal(policy, generation)


@check("R11")
def the_old_version_serves_meanwhile(ctx: Context) -> None:
    """During the transfer the engine generates, with the old weights."""
    policy, generation = unequal_pair(ctx)
    before, seen = greedy(ctx, generation, seed=0), []
    with between_tensors(
        source_class(policy), after=5, act=lambda: seen.append(greedy(ctx, generation, seed=0))
    ):
        run_refit(policy, generation, isolation="staged", bucket_bytes=4096)
    (during,) = seen
    same_output(ctx, during, before)
    same(
        sorted({*during["weights_version"].tolist()}),
        [ctx.first_version],
        "versions of rows meanwhile",
    )
    equal(policy, generation)
    agree(ctx, policy, generation)
