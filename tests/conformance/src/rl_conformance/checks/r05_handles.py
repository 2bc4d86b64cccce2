"""R5: the older handle path."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rl_conformance.checks.common import change_nothing
from rl_conformance.deadline import stretched
from rl_conformance.expect import raises, require, same
from rl_conformance.refits import DEADLINE_S, agree, equal, run_refit, take_step, unequal_pair
from rl_conformance.registry import check
from rl_conformance.ways import by_ticket, engine_for, exact, settable_trainer, shuffle, ticket_for
from rl_conformance.weights import engine_weights, same_weights
from rl_core.errors import RLError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.context import Context


@check("R5")
def the_older_methods_are_exact(ctx: Context) -> None:
    """One group, one ticket, one update_weights, which commits."""
    policy, generation = unequal_pair(ctx)
    ticket = ticket_for(policy, generation)
    same(generation.weights_version, ctx.first_version, "weights_version before update_weights")
    same(generation.update_weights(ticket), True, "result of update_weights")
    same(generation.weights_version, 1, "weights_version after update_weights")
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R5", needs=("generation",))
def a_ticket_is_for_one_refit(ctx: Context) -> None:
    """One that another refit has followed, or that was taken, brings nothing any more."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    before = engine.weights_version
    exact(ctx, policy, engine, "a refit before tickets", before)
    old = ticket_for(policy, engine, deadline_s=1.0)
    shuffle(policy, 2)
    by_ticket(policy, engine)
    shuffle(policy, 3)
    taken = ticket_for(policy, engine, deadline_s=DEADLINE_S)
    engine.update_weights(taken)
    weights = engine_weights(engine)
    for ticket in (old, taken | {"deadline_s": 1.0}):
        started = time.monotonic()
        with raises(RLError):
            engine.update_weights(ticket)
        took, most = time.monotonic() - started, stretched(20.0)
        require(took < most, "seconds until a ticket is refused", f"< {most:.0f}", f"{took:.1f}")
    same(engine.weights_version, before + 2, "weights_version after tickets that were used up")
    same_weights(engine_weights(engine), weights, "after tickets that were used up")
    exact(ctx, policy, engine, "a refit by a ticket", before + 2)
    run_refit(policy, engine, delta=True)
    exact(ctx, policy, engine, "a refit after tickets", before + 3)


@check("R5", needs=("generation",))
def refused_tickets_change_nothing(ctx: Context) -> None:
    """What is no ticket, and one for other keys or options, is not begun with."""

    def refused(policy: Any, engine: Any) -> dict[str, Callable[[], object]]:
        [keys] = policy.prepare_weights_for_ipc()
        sound = ticket_for(policy, engine)
        wrong: dict[str, Any] = {
            "empty": {},
            "no tensors": {key: value for key, value in sound.items() if key != "tensors"},
            "another protocol": sound | {"protocol": 0},
            "changed": sound | {"digest": "0" * len(sound["digest"])},
            "text": "ticket",
        }
        calls: dict[str, Callable[[], object]] = {
            name: lambda ticket=ticket: engine.update_weights(ticket)  # type: ignore[misc]
            for name, ticket in wrong.items()
        }
        calls["an unknown key"] = lambda: policy.get_weights_ipc_handles([*keys, "no.such.tensor"])
        calls["a part of the keys"] = lambda: policy.get_weights_ipc_handles(keys[1:])
        return calls

    change_nothing(ctx, refused)


@check("R5", needs=("policy",))
def tickets_never_mix_two_states(ctx: Context) -> None:
    """A training step between a ticket and its refit ends that: no engine commits a mixture."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    engine = engine_for(ctx, "trainer")
    run_refit(policy, engine)
    for _ in range(2):
        ticket = ticket_for(policy, engine, mode="packed")
        take_step(policy)
        with raises(RLError):
            engine.update_weights(ticket)
        same(engine.weights_version, 1, "weights_version after the refused ticket")
    by_ticket(policy, engine)
    equal(policy, engine)
