"""R13: several receivers."""

from __future__ import annotations

import concurrent.futures
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_conformance.doubles import Engine, Engines, Trainer, broken_tensor
from rl_conformance.expect import raised, same
from rl_conformance.faults import InjectedFault
from rl_conformance.refits import (
    DEADLINE_S,
    MODES,
    equal,
    fresh_engine,
    odd_tensors,
    run_refit,
    unequal_pair,
    whole_tensors,
)
from rl_conformance.registry import check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import by_ticket, engine_for, exact, settable_trainer, shuffle
from rl_conformance.weights import same_weights
from rl_core.errors import LoopWarning

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_conformance.context import Context


@check("R13")
def all_receivers_advance(ctx: Context) -> None:
    """Two engines take one refit and both serve it."""
    policy, first = unequal_pair(ctx)
    second = fresh_engine(ctx)
    report = run_refit(policy, Engines(first, second))
    same(report.receivers, 2, "receivers of the report")
    for engine in (first, second):
        same(engine.weights_version, 1, "weights_version of each engine")
        equal(policy, engine)


@check("R13", cases=MODES)
def no_receiver_advances_alone(ctx: Context, mode: str) -> None:
    """If one engine fails, it is named and no engine advances; the next refit brings all on."""
    policy = ctx.closing(Trainer(whole_tensors(1, ctx.settings.device)))
    engines = [
        ctx.closing(Engine(odd_tensors(n, ctx.settings.device), f"engine-{n}")) for n in (2, 3)
    ]
    both, bad = Engines(*engines), engines[1]
    for fault in (broken_tensor(bad, "large"), _unwilling(bad, "half"), _unwilling(bad, "finish")):
        with fault:
            both.prepare_refit_info(policy.prepare_refit_info() or {})
            (sending,) = policy.send_weights(receivers=2, deadline_s=DEADLINE_S, mode=mode)
            receiving = both.receive_weights(deadline_s=DEADLINE_S)
            error = sending.exception(DEADLINE_S + 10)
            concurrent.futures.wait(receiving, DEADLINE_S)
        raised(error, Exception, "engine-3")
        versions = [engine.weights_version for engine in engines]
        same(versions, [0, 0], "weights_version of both engines after one failed")
    run_refit(policy, both, mode=mode)
    for engine in engines:
        same_weights(engine.tensors, policy.tensors, "the engine")


@contextmanager
def _unwilling(engine: Engine, moment: str) -> Generator[None]:
    """Fault: it raises between two tensors, or when the other one may have them all."""

    def give_up() -> None:
        raise InjectedFault("the engine gave up")

    engine.on[moment] = give_up
    try:
        yield
    finally:
        engine.on.clear()


#: Trainer, engine and how, in turn; versions are counted by trainer.
_TURNS: tuple[tuple[int, int, dict[str, Any] | None], ...] = (
    (0, 0, {}),
    (1, 1, {"mode": "packed"}),
    (1, 0, {"delta": True}),
    (0, 1, {"delta": True}),
    (0, 0, {"delta": True}),
    (1, 1, None),
    (0, 1, {"isolation": "quiesced", "verify": "installed"}),
    (1, 0, None),
    (1, 1, {"delta": True, "verify": "installed"}),
)


def _in_turn(
    ctx: Context, trainers: list[Any], engines: list[Any], change: Any, dtypes: Any
) -> None:
    """Refits criss-cross; after each the engine is exact and the other is what it was."""
    versions, sent = [0, 0], [0, 0]
    origins: dict[int, int] = {}
    served: list[Any] = [None, None]
    data = ctx.prompts(5, 150)
    for step, (trainer, engine, options) in enumerate(_TURNS):
        change(trainers[trainer], step)
        if options is None:
            by_ticket(trainers[trainer], engines[engine])
        else:
            with warnings.catch_warnings():  # that it was the other trainer's before
                warnings.simplefilter("ignore", LoopWarning)
                run_refit(trainers[trainer], engines[engine], **options)
        sent[trainer] += 1
        versions[engine] = sent[trainer]
        what = f"turn {step}: trainer {trainer} to engine {engine}"
        exact(ctx, trainers[trainer], engines[engine], what, versions[engine], dtypes[engine])
        origin = engines[engine].weights_origin
        same(origin, origins.setdefault(trainer, origin), f"{what}: weights_origin")
        served[engine] = engines[engine].generate(data, greedy=True)
        other = 1 - engine
        if served[other] is not None:
            found = engines[other].weights_version
            same(found, versions[other], f"{what}: weights_version of the other engine")
            again = engines[other].generate(data, greedy=True)
            ctx.measure_error(again["logprobs"], served[other]["logprobs"], dtypes[other])


@check("R13", needs=("generation",), timeout_s=240.0)
def engines_of_one_process_are_apart(ctx: Context) -> None:
    """Two engines, one of another dtype if it casts, and two trainers in turn: each is exact."""
    first = ctx.refit_generation()
    casts = getattr(first, "weight_sink", lambda: None)()
    narrow = getattr(casts, "casts", False) and "bfloat16" in ctx.manifest.tolerances
    dtype = "bfloat16" if narrow else ctx.settings.dtype
    second = ctx.fresh_generation(
        model_name=str(ctx.model("qwen2", seed=0)), max_new_tokens=3, dtype=dtype
    )
    second.prepare_for_generation()
    trainers = [settable_trainer(ctx, seed=1), settable_trainer(ctx, seed=2)]
    _in_turn(ctx, trainers, [first, second], shuffle, (None, dtype))


@check("R13", needs=("policy",), timeout_s=240.0)
def trainers_of_one_process_are_apart(ctx: Context) -> None:
    """Two trainers in turn to two engines: each engine has what it was sent last."""

    def train(policy: Any, step: int) -> None:
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6), seed=step), NegativeLogLikelihood())

    trainers = [ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=n))) for n in (1, 2)]
    _in_turn(ctx, trainers, [engine_for(ctx, "trainer") for _ in "ab"], train, (None, None))
