"""R8 and R15: refits that fail, and weights that were not installed."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

from rl_conformance.checks.common import fresh_doubles, renew_tensors
from rl_conformance.deadline import stretched
from rl_conformance.doubles import Sink
from rl_conformance.expect import raised, raises, require, require_fault, same
from rl_conformance.faults import (
    at_the_first_bucket,
    casting_down,
    detached,
    dropping,
    failing_finish,
    failing_write,
    in_the_engine,
    misplacing,
    source_class,
    writes_in_place,
)
from rl_conformance.leftovers import is_running, left_each_time
from rl_conformance.peers import RemoteGeneration, RemotePolicy
from rl_conformance.refits import (
    DEADLINE_S,
    MODES,
    agree,
    attempt,
    equal,
    fresh_engine,
    run_refit,
    supports,
    unequal_pair,
)
from rl_conformance.registry import CORE, check
from rl_conformance.served import greedy, same_output
from rl_conformance.ways import exact, settable_trainer, shuffle, ways_of
from rl_conformance.weights import same_weights
from rl_core.errors import RefitCorrupted, RefitError, RLError, WeightsTornError
from rl_core.futures import wait

if TYPE_CHECKING:
    from rl_conformance.context import Context


_AT_FIRST: dict[str, dict[str, Any]] = {
    "before_the_first_tensor": {"method": "begin", "count": 0},
}


_MOMENTS: dict[str, dict[str, Any]] = {
    "between_two_tensors": {"method": "write", "count": 3},
    "before_the_commit": {"method": "finish", "count": 0},
}


@check("R8", cases=_AT_FIRST, needs=(CORE,), device="cpu", timeout_s=240.0)
@check("R8", cases=_MOMENTS, timeout_s=240.0)
def a_killed_engine_is_reported(ctx: Context, method: str, count: int) -> None:
    """The trainer gets a RefitError before the deadline, and serves the next engine."""
    if ctx.settings.device == "cuda":  # what the first refit of a process sets up, it keeps
        policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
        first = fresh_engine(ctx)
        run_refit(policy, first)
        first.shutdown()
        policy.shutdown()
    left = left_each_time(lambda: _kill(ctx, method, count), files=False)
    same(left, [], "left behind after both sides were shut down")


def _kill(ctx: Context, method: str, count: int) -> None:
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        pids = generation.die_at(method, count)
        started, deadline_s = time.monotonic(), stretched(DEADLINE_S)
        generation.prepare_refit_info(policy.prepare_refit_info() or {})
        (sending,) = policy.send_weights(deadline_s=deadline_s)
        (receiving,) = generation.receive_weights(deadline_s=deadline_s)
        error = sending.exception(deadline_s + 10)
        took = time.monotonic() - started
        require(took < deadline_s, "seconds until the error", f"< {deadline_s:.0f}", f"{took:.1f}")
        died = not all(map(is_running, pids))
        require_fault(died, f"SIGKILL in {method} of the sink", "the refit does not call it")
        raised(error, RefitError)
        named = any(str(pid) in str(error) for pid in pids)
        require(named, "the RefitError", f"it names a process of {pids}", error)
        receiving.exception(deadline_s)
        del error, sending  # its traceback has the tensors that were to be sent
    survivor = fresh_engine(ctx)
    run_refit(policy, survivor)
    equal(policy, survivor)
    survivor.shutdown()
    policy.shutdown()


_TRAINER_AT_FIRST: dict[str, dict[str, Any]] = {
    "after_0_tensors": {"method": "tensors", "count": 0},
}


_TRAINERS: dict[str, dict[str, Any]] = {
    "after_5_tensors": {"method": "tensors", "count": 5},
    "before_the_commit": {"method": "confirm", "count": 0},
}


@check("R8", cases=_TRAINER_AT_FIRST, needs=(CORE,), device="cpu", timeout_s=240.0)
@check("R8", cases=_TRAINERS, timeout_s=240.0)
def a_killed_trainer_is_survived(ctx: Context, method: str, count: int) -> None:
    """The engine gets a RefitError, serves no torn weights, and recovers with a new trainer."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation, seed=0)
    deadline_s = stretched(DEADLINE_S)
    with RemotePolicy(ctx, model_name=str(ctx.model("qwen2", seed=1))) as killed:
        killed.die_at(method, count)
        generation.prepare_refit_info(killed.prepare_refit_info())
        killed.send_weights(bucket_bytes=4096, deadline_s=deadline_s)
        (receiving,) = generation.receive_weights(deadline_s=deadline_s)
        error = receiving.exception(deadline_s + 10)
        raised(error, RefitError)
    try:
        same_output(ctx, greedy(ctx, generation, seed=0), before)
    except WeightsTornError as torn:
        begun = count > 0 or method == "confirm"
        require(begun, "generate, before anything was sent", "it serves the old weights", torn)
    same(
        generation.weights_version,
        ctx.first_version,
        "weights_version after the trainer was killed",
    )
    run_refit(policy, generation)
    equal(policy, generation)
    agree(ctx, policy, generation)


_LATE: dict[str, dict[str, Any]] = {
    "in_a_write": {"fault": failing_write, "how": {"after": 5}},
    "at_the_finish": {"fault": failing_finish, "how": {}},
}


@check("R8", cases=_LATE)
def torn_weights_are_never_served(ctx: Context, fault: Any, how: dict[str, Any]) -> None:
    """After an engine that fails midway generate refuses, until a full refit commits."""
    policy, generation = unequal_pair(ctx)
    with in_the_engine(generation, fault, **how):
        raised(attempt(policy, generation), Exception)
    with raises(WeightsTornError):
        greedy(ctx, generation, seed=0)
    run_refit(policy, generation)
    agree(ctx, policy, generation)


_ENDINGS: dict[str, dict[str, Any]] = {"committed": {"fails": False}, "failed": {"fails": True}}


@check("R8", needs=("policy",), cases=_ENDINGS)
def every_source_is_closed_once(ctx: Context, fails: bool) -> None:
    """Each weight source that the policy makes for a refit is closed, and not a second time."""
    policy, generation = unequal_pair(ctx)
    kind, make = source_class(policy), cast("Any", policy).weight_source
    close, made, closed = kind.close, [], []

    def make_source() -> Any:
        made.append(make())
        return made[-1]

    def close_source(source: Any) -> None:
        closed.append(source)
        close(source)

    broken = in_the_engine(generation, failing_write, after=3) if fails else nullcontext()
    with (
        mock.patch.object(policy, "weight_source", make_source),
        mock.patch.object(kind, "close", close_source),
        broken,
    ):
        error = attempt(policy, generation)
    same(error is not None, fails, "whether the refit failed")
    require(bool(made), "weight_source", "it is called for a refit", "no call")
    times = [sum(each is source for each in closed) for source in made]
    same(times, [1] * len(made), "how often each source was closed")


_LOADERS: dict[str, dict[str, Any]] = {
    "dropping": {"fault": dropping},
    "misplacing": {"fault": misplacing},
    "casting_down": {"fault": casting_down},
    "detached": {"fault": detached},
}


_TENSOR = "model.layers.1.mlp.up_proj.weight"


@check("R15", cases=_LOADERS)
def a_loader_that_does_not_load_is_caught(ctx: Context, fault: Any) -> None:
    """The read-back differs from what was sent: RefitCorrupted, no commit, nothing served."""
    policy, generation = unequal_pair(ctx)
    if fault is detached and not writes_in_place(generation):
        ctx.not_run("a refit does not write into the engine's own tensors in place", excused=True)
    with in_the_engine(generation, fault, tensor=_TENSOR):
        _is_corrupted(attempt(policy, generation, verify="installed"))
    same(generation.weights_version, ctx.first_version, "weights_version after the failed refit")
    with raises(WeightsTornError):
        greedy(ctx, generation, seed=0)
    run_refit(policy, generation, verify="installed")
    equal(policy, generation)


@check("R15", needs=(CORE,))
def both_names_of_a_tied_tensor_are_read_back(ctx: Context) -> None:
    """A loader that drops the second name of a tensor is found, though the first one is right."""
    policy, engine = fresh_doubles(ctx)
    read = Sink.read

    def stale(sink: Sink, names: Any) -> Any:
        for name, tensor in read(sink, names):
            yield name, tensor + 1 if name == "tied.again" else tensor

    with mock.patch.object(Sink, "read", stale):
        _is_corrupted(attempt(policy, engine, verify="installed"), "tied.again")


@check("R15", cases=MODES)
def what_a_delta_left_out_is_read_back_too(ctx: Context, mode: str) -> None:
    """A tensor that changed in the engine behind the refit's back, and is not sent, is found."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    options: dict[str, Any] = {"mode": mode, "delta": True, "verify": "installed"}
    run_refit(policy, generation, **options)
    engine: Any = generation
    sink = engine.weight_sink()
    [(_, installed)] = sink.read([_TENSOR])
    spec = next(spec for spec in sink.specs() if spec.name == _TENSOR)
    sink.write(_TENSOR, 7, installed.reshape(-1)[7:8] + 1, of=spec)  # the fault
    _is_corrupted(attempt(policy, generation, **options))
    same(generation.weights_version, 1, "weights_version after the failed refit")
    report = run_refit(policy, generation, **options)
    same(report.skipped, 0, "tensors that the refit after a failure skips")
    equal(policy, generation)
    agree(ctx, policy, generation)


def _is_corrupted(error: BaseException | None, name: str = "up_proj") -> None:
    raised(error, RefitCorrupted, name)


@check("R8", needs=("generation",))
def only_a_full_refit_ends_a_torn_state(ctx: Context) -> None:
    """Neither sleep nor preparing again mends torn weights; a refit by any way does."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    ways = ways_of(ctx, policy, "engine", "direct", "packed", "delta", "staged", "ticket")
    for number, (name, way) in enumerate([*ways.items(), *ways.items()], 2):
        before = engine.weights_version
        committed = {key: value.clone() for key, value in policy.model.state_dict().items()}
        shuffle(policy, 10 * number)
        fault, how = (failing_write, {"after": 3}) if number % 2 else (failing_finish, {})
        with in_the_engine(engine, fault, **how):
            failed = attempt(policy, engine, delta=number == 3)
        raised(failed, Exception)
        if "staged" in ways:
            with in_the_engine(engine, failing_write, after=3):
                raised(attempt(policy, engine, isolation="staged"), Exception)
        engine.prepare_refit_info(policy.prepare_refit_info() or {})
        with raises(WeightsTornError):
            engine.generate(ctx.prompts(5), greedy=True)
        engine.finish_generation()
        engine.prepare_for_generation()
        with raises(WeightsTornError):
            engine.generate(ctx.prompts(5), greedy=True)
        same(engine.weights_version, before, "weights_version while the weights are torn")
        if number > 1 + len(ways):  # the weights that the engine had before
            policy.model.load_state_dict(committed)
        way(policy, engine)
        version = engine.weights_version
        what = f"weights_version after a failure, and a refit ({name})"
        require(version > before, what, f"> {before}", version)
        exact(ctx, policy, engine, f"{name} after a failure", version)


#: Seconds, on a quiet machine, in which a busy engine lets a refit of a tiny model through.
_TURN_S = 10.0


#: Small enough that there are several buckets.
_BUCKET = 4096


@check("R8", needs=("generation",))
def a_refit_gets_its_turn(ctx: Context) -> None:
    """While threads keep the engine busy, a refit commits, and no row mixes two versions."""
    policy, engine = settable_trainer(ctx), ctx.refit_generation()
    run_refit(policy, engine)
    data, done = ctx.prompts(5, 9), threading.Event()
    rows: list[tuple[list[int], Any]] = []

    def keep_busy() -> None:
        while not done.is_set():
            output = engine.generate(data, greedy=True)
            rows.append((output["weights_version"].tolist(), output["logprobs"]))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        busy = [pool.submit(keep_busy) for _ in range(3)]
        try:
            for version in (2, 3):
                shuffle(policy, version)
                run_refit(policy, engine, delta=version == 3, deadline_s=stretched(_TURN_S))
        finally:
            done.set()
        wait(busy, DEADLINE_S)
    exact(ctx, policy, engine, "after refits of a busy engine", 3)
    mixed = [versions for versions, _ in rows if len(set(versions)) > 1]
    same(mixed[:1], [], "calls whose rows are of two versions")
    last = engine.generate(data, greedy=True)["logprobs"]
    for versions, logprobs in rows:
        if versions[0] == 3:
            ctx.measure_error(logprobs, last)


@check("R8", needs=(CORE,))
def a_failure_ends_the_wait_for_others(ctx: Context) -> None:
    """The driver of a refit does not wait for a side that cannot end any more."""
    failed, pending = (concurrent.futures.Future[None]() for _ in "ab")
    failed.set_exception(RefitError("the engine ended", fix="none"))
    started = time.monotonic()
    with raises(RefitError):
        wait([pending, failed], DEADLINE_S)
    took, most = time.monotonic() - started, DEADLINE_S / 2
    require(took < most, "seconds until the error", f"< {most:.0f}", f"{took:.1f}")


@check("R8", needs=(CORE,), cases={i: {"isolation": i} for i in ("staged", "quiesced")})
def weights_that_are_dropped_meanwhile_stay_torn(ctx: Context, isolation: str) -> None:
    """An engine that loses its weights during a refit neither commits nor serves the old ones."""
    policy, engine = fresh_doubles(ctx)
    run_refit(policy, engine)
    renew_tensors(policy, 3)
    with at_the_first_bucket(engine.receiver.dropped):
        error = attempt(policy, engine, isolation=isolation, bucket_bytes=_BUCKET)
    raised(error, RLError)
    same(engine.weights_version, 1, "weights_version after the weights were dropped")
    with raises(WeightsTornError):
        engine.receiver.check()
    report = run_refit(policy, engine, delta=True)
    same(report.skipped, 0, "dropped tensors that the next delta skips")
    engine.receiver.check()
    same_weights(engine.tensors, policy.tensors, "the engine")
