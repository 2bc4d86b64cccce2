"""R4: the collective transport."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_conformance.checks.common import refit_in_sequence, tensor_trainer
from rl_conformance.deadline import stretched
from rl_conformance.doubles import Engines
from rl_conformance.expect import raised, raises, require, same
from rl_conformance.peers import RemoteGeneration
from rl_conformance.refits import (
    DEADLINE_S,
    agree,
    equal,
    run_refit,
    second_engine,
    take_step,
    unequal_engine,
)
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.ways import engine_for, settable_trainer
from rl_core.errors import CapabilityError, RefitError
from rl_core.futures import wait
from rl_core.ports import free_port

if TYPE_CHECKING:
    from rl_conformance.context import Context


_HOST = "127.0.0.1"


_SIZES: dict[str, dict[str, Any]] = {
    "newer_one_engine": {"older": False, "count": 1, "trainers": 1},
    "newer_two_trainers": {"older": False, "count": 1, "trainers": 2},
    "older_two_engines": {"older": True, "count": 2, "trainers": 1},
}


def _exact_twice(ctx: Context, side: str, older: bool, count: int, trainers: int) -> None:
    policy, first = tensor_trainer(ctx, side), engine_for(ctx, side)
    another = partial(second_engine, ctx) if side == "engine" else partial(engine_for, ctx, side)
    engines = Engines(first, *[another() for _ in range(count - 1)])
    # As ``trainers`` ranks, of which the first one sends.
    group = (_HOST, free_port(), trainers + engines.receiver_count)
    opening = policy.init_collective(*group, train_world_size=trainers)
    wait([*opening, *engines.init_collective(*group, train_world_size=trainers)], DEADLINE_S)
    for version in (1, 2):
        info = policy.prepare_info_for_collective() if older else policy.prepare_refit_info()
        if not older:
            engines.prepare_refit_info(info)
        sending = policy.broadcast_weights_for_collective(
            deadline_s=DEADLINE_S, bucket_bytes=1 << 16
        )
        given = {"info": info} if older else {}
        receiving = engines.update_weights_from_collective(**given, deadline_s=DEADLINE_S)
        wait([*sending, *receiving], DEADLINE_S + 10)
        for engine in engines.engines:
            same(engine.weights_version, version, "weights_version")
            equal(policy, engine)
            agree(ctx, policy, engine)
        take_step(policy)


@check("R4", cases=_SIZES, needs=("generation",))
def engines_join_a_group(ctx: Context, **case: Any) -> None:
    """init_collective, then two refits by the methods of either spelling: each exact."""
    _exact_twice(ctx, "engine", **case)


@check("R4", cases=_SIZES, needs=("policy",))
def a_trainer_opens_a_group(ctx: Context, **case: Any) -> None:
    """init_collective, then two refits by the methods of either spelling: each exact."""
    _exact_twice(ctx, "trainer", **case)


def _one_call(ctx: Context, side: str) -> None:
    policy, engine = tensor_trainer(ctx, side), engine_for(ctx, side)
    ours = not dist.is_initialized()
    if ours:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    group = dist.group.WORLD
    try:
        for verify in ("wire", "installed", "none"):
            report = run_refit(policy, engine, transport="collective", verify=verify)
            same(report.transport, "collective", "transport of the report")
            equal(policy, engine)
            take_step(policy)
        run_refit(policy, engine, transport="collective", delta=True)
        equal(policy, engine)
        agree(ctx, policy, engine)
        unchanged = dist.group.WORLD is group
        require(unchanged, "torch's default process group", "the same as before", "another")
        total = torch.ones(1)
        dist.all_reduce(total)
        same(total.item(), 1.0, "members of torch's default process group")
    finally:
        if ours:
            dist.destroy_process_group()


@check("R4", needs=("generation",))
def one_call_is_enough_for_an_engine(ctx: Context) -> None:
    """refit(transport="collective") needs no other call and leaves the default group alone."""
    _one_call(ctx, "engine")


@check("R4", needs=("policy",))
def one_call_is_enough_for_a_trainer(ctx: Context) -> None:
    """refit(transport="collective") needs no other call and leaves the default group alone."""
    _one_call(ctx, "trainer")


@check("R4", needs=("generation",), timeout_s=240.0)
def a_group_crosses_processes_and_survives_a_kill(ctx: Context) -> None:
    """Exact in an engine elsewhere; when it is killed it is named, and another takes over."""
    policy = settable_trainer(ctx)
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        both = Engines(generation, unequal_engine(ctx))
        run_refit(policy, both, transport="collective")
        equal(policy, both.engines[1])
        agree(ctx, policy, generation)  # type: ignore[arg-type]
        pids = generation.die_at("write", 3)
        both.prepare_refit_info(policy.prepare_refit_info())
        started, deadline_s = time.monotonic(), stretched(DEADLINE_S)
        (sending,) = policy.broadcast_weights_for_collective(receivers=2, deadline_s=deadline_s)
        receiving = both.update_weights_from_collective(deadline_s=deadline_s)
        error = sending.exception(deadline_s + 10)
        took = time.monotonic() - started
        for future in receiving:
            raised(future.exception(deadline_s + 10), Exception)
        raised(error, RefitError)
        require(
            took < deadline_s, "seconds until the refit ended", f"< {deadline_s:.0f}", f"{took:.1f}"
        )
        named = any(str(pid) in str(error) for pid in pids)
        require(named, "the RefitError", f"it names a process of {pids}", error)
    recovered = Engines(both.engines[1], engine_for(ctx, "trainer"))
    run_refit(policy, recovered, transport="collective")
    for engine in recovered.engines:
        equal(policy, engine)
        agree(ctx, policy, engine)


@refusal("generation", "collective")
def joining_a_group_is_refused(ctx: Context) -> None:
    """init_collective and the update raise CapabilityError; the engine serves as before."""
    generation = ctx.generation()
    before = greedy(ctx, generation)
    with raises(CapabilityError):
        generation.init_collective(_HOST, 1, 2)
    with raises(CapabilityError):
        generation.update_weights_from_collective()
    same_output(ctx, greedy(ctx, generation), before)


@check("R4", needs=("generation",), timeout_s=240.0)
def an_engine_changes_the_transport(ctx: Context) -> None:
    """Over a group after shared memory and back, a delta among them, each exact."""
    refit_in_sequence(ctx, "engine", "collective", "packed", "delta")


@check("R4", needs=("policy",), timeout_s=240.0)
def a_trainer_changes_the_transport(ctx: Context) -> None:
    """Over a group after shared memory and back, a delta among them, each exact."""
    refit_in_sequence(ctx, "trainer", "collective", "packed", "delta")
