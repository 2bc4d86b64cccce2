"""R6 and R12: a hundred refits, and memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from rl_conformance.checks.common import refit_in_sequence
from rl_conformance.expect import raises, same
from rl_conformance.leftovers import left_each_time
from rl_conformance.memory import MemoryPeak
from rl_conformance.refits import equal, modes_of, run_refit, take_step, unequal_pair
from rl_conformance.registry import check, refusal
from rl_conformance.served import greedy, same_output
from rl_conformance.training import training_batch
from rl_conformance.ways import every_pair, ways_of
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from rl_conformance.context import Context


_REFITS = 100
#: Each of them comes after each.
_MODES = ("direct", "packed", "delta", "staged")
#: Memory is watched for the last so many. What grows is watched again: an allocator settles.
_WATCHED, _LOOKS = 50, 6
#: 40 KiB for each of them.
_MOST_GROWTH = 2 << 20


@check("R6", timeout_s=300.0)
def refit_after_refit_stays_exact(ctx: Context) -> None:
    """A hundred refits of changing weights, in every mode by turns: each exact, nothing grows."""
    policy, generation = unequal_pair(ctx)
    ways = ways_of(ctx, policy, "engine", *_MODES)
    turns = itertools.cycle(every_pair(list(ways)))
    refits = growth = 0

    def refit(times: int) -> None:
        nonlocal refits
        for _ in range(times):
            take_step(policy)
            ways[next(turns)](policy, generation)
            equal(policy, generation)
            refits += 1

    def watch() -> None:
        nonlocal growth
        for _ in range(_LOOKS):
            peak = MemoryPeak()
            refit(_WATCHED)
            if (growth := peak.resident()) <= _MOST_GROWTH:
                break

    refit(_REFITS - _WATCHED)
    left = left_each_time(watch)
    same(generation.weights_version, refits, f"weights_version after {refits} refits")
    same(left, [], f"left behind by {_WATCHED} refits, each time")
    ctx.measure("memory_growth", growth, _MOST_GROWTH, "bytes")


@check("R12")
def extra_memory_stays_bounded(ctx: Context) -> None:
    """At no moment more than two buckets and the declared constant, and never a second copy.

    A direct refit takes no buffers, once the tensors lie where engines read them.
    """
    constant = ctx.manifest.refit_constant_bytes
    path = str(ctx.large_model(constant + constant // 2))
    policy, generation = ctx.fresh_policy(model_name=path), ctx.fresh_generation(model_name=path)
    generation.prepare_for_generation()
    generation.generate(ctx.prompts(5), greedy=True)  # checkpoints that are mapped are read by now
    policy.get_logprobs(training_batch((5,)))
    for bucket in (64 << 10, 1 << 20):
        _bounded(ctx, policy, generation, 2 * bucket, mode="packed", bucket_bytes=bucket)
    if "direct" in modes_of(policy):
        run_refit(policy, generation, mode="direct")
        _bounded(ctx, policy, generation, 0, mode="direct")


def _bounded(ctx: Context, policy: Any, generation: Any, buffers: int, **options: Any) -> None:
    """Measures a refit."""
    peak, constant = MemoryPeak(trim=True), ctx.manifest.refit_constant_bytes
    report = run_refit(policy, generation, **options)
    ctx.measure("buffers", report.extra_memory_bytes, buffers, "bytes")
    resident = "resident_peak" if peak.exact else "resident_kept"
    ctx.measure(resident, peak.resident(), buffers + constant, "bytes")
    ctx.measure("device_peak", peak.device(), buffers + constant, "bytes")


@refusal("generation", "staged")
def staged_isolation_is_refused(ctx: Context) -> None:
    """isolation="staged" raises CapabilityError and the engine serves as before."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation, seed=0)
    with raises(CapabilityError):
        run_refit(policy, generation, isolation="staged")
    same(generation.weights_version, ctx.first_version, "weights_version after the refused refit")
    same_output(ctx, greedy(ctx, generation, seed=0), before)


_WAYS = ("direct", "packed", "delta", "staged", "ticket", "asleep")


@check("R6", needs=("generation",), timeout_s=300.0)
def an_engine_accepts_refit_modes_in_any_order(ctx: Context) -> None:
    """Direct, packed, delta, staged, by ticket, asleep: any after any, each exact."""
    refit_in_sequence(ctx, "engine", *_WAYS)


@check("R6", needs=("policy",), timeout_s=300.0)
def a_trainer_sends_refit_modes_in_any_order(ctx: Context) -> None:
    """Direct, packed, delta, staged, by ticket: any after any, each exact."""
    refit_in_sequence(ctx, "trainer", *_WAYS[:-1])
