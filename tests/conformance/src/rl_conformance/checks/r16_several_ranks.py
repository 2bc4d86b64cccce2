"""R16: refits from several ranks, each of which sends the parts that it has."""

from __future__ import annotations

import os
import signal
import time
import warnings
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from rl_conformance.deadline import stretched
from rl_conformance.doubles import Engine, Engines, Sink
from rl_conformance.expect import raised, require, same, within
from rl_conformance.faults import InjectedFault
from rl_conformance.memory import MemoryPeak
from rl_conformance.reference import make_reference
from rl_conformance.refits import DEADLINE_S, Watched, attempt, run_refit
from rl_conformance.registry import check
from rl_conformance.several_ranks import (
    beside,
    exported,
    layouts_of,
    policy_on,
    ranks_of,
    scores_fit,
    settings_of,
)
from rl_conformance.training import NegativeLogLikelihood, training_batch, training_config
from rl_conformance.ways import ways_of
from rl_conformance.weights import checkpoint_weights, policy_weights, same_weights
from rl_core.errors import LoopWarning, RLError, WeightsTornError
from rl_core.futures import as_concurrent
from rl_core.interfaces import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from rl_conformance.context import Context
    from rl_conformance.doubles import Hooks, Tensors
    from rl_conformance.several_ranks import Beside, Layout


#: Small enough that every rank sends several buckets.
_BUCKET = 1 << 15


@contextmanager
def _trained(ctx: Context, layout: Layout) -> Generator[tuple[Beside, Tensors]]:
    """The policies of a layout after a step, and what the one on several ranks exports."""
    with beside(ctx, layout) as pair:
        _train(pair)
        yield pair, exported(ctx, pair.many)


def _train(pair: Beside) -> None:
    pair.train(training_batch((12, 3, 30, 1, 17), seed=pair.steps), NegativeLogLikelihood())


class _Rows(Engine):
    """An engine of zeros that keeps some rows of every tensor.

    Args:
        like: Tensors of the same shapes.
        rows: Of so many rows those that it keeps.
        name: For errors.
    """

    def __init__(
        self, like: Tensors, rows: Callable[[int], slice] = slice, name: str = "engine"
    ) -> None:
        tensors = {key: torch.zeros_like(tensor) for key, tensor in like.items()}
        super().__init__(tensors, name, lambda: _RowsSink(tensors, self.on, self.kept))
        self.rows = rows

    def kept(self, of: Tensors) -> Tensors:
        """Of these tensors what it keeps."""
        return {name: tensor[self.rows(len(tensor))] for name, tensor in of.items()}


class _RowsSink(Sink):
    def __init__(self, tensors: Tensors, on: Hooks, kept: Callable[[Tensors], Tensors]) -> None:
        super().__init__(tensors, on)
        self._kept = kept

    def pieces(self) -> list[Piece] | None:
        if self.on:
            return None
        found = []
        for name, part in self._kept(dict(self.tensors_by_name)).items():
            first = part.storage_offset() // part.stride(0)
            box = ((first, first + len(part)), *((0, size) for size in part.shape[1:]))
            found.append(Piece(name, box, part))
        return found


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def every_way_is_exact(ctx: Context) -> None:
    """After a step an engine has what the policy exports, and scores as it does (R1)."""
    for layout in layouts_of(ctx):
        with _trained(ctx, layout) as (pair, expected):
            policy: Any = pair.many
            config = {"model_name": str(pair.path), "torch_dtype": ctx.settings.dtype}
            heat, prompts = pair.config["temperature"], ctx.prompts(5, 9, 3)
            sampling = {"max_new_tokens": 3, "temperature": heat}
            serving = ctx.closing(make_reference("generation", config | sampling))
            serving.prepare_for_generation()
            first = run_refit(policy, serving, verify="installed").version
            scores_fit(ctx, policy, prompts, serving.generate(prompts), scale=1 / heat)
            names = ("packed", "staged", "ticket", "collective")
            ways = ways_of(ctx, policy, "trainer", *names)
            for version, (name, way) in enumerate(ways.items(), first + 1):
                engine = ctx.closing(_Rows(expected))
                way(policy, engine)
                same_weights(engine.tensors, expected, f"the engine, {name}")
                found = engine.weights_version, engine.weights_origin
                same(found, (version, policy.weights_origin), f"version and origin, {name}")


#: Two engines that share the rows: where the one's end, no rank's end.
_SHARES: tuple[Callable[[int], slice], ...] = (
    lambda size: slice(size // 3),
    lambda size: slice(size // 3, size),
)


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def each_part_is_sent_once_to_who_keeps_it(ctx: Context) -> None:
    """The bytes of the report are the model's, and those of each engine are what it keeps."""
    for layout in layouts_of(ctx):
        with _trained(ctx, layout) as (pair, expected):
            total = sum(tensor.nbytes for tensor in expected.values())
            for shares in ((slice,), (slice, slice), _SHARES):
                engines = [ctx.closing(_Rows(expected, rows)) for rows in shares]
                watched = Watched(Engines(*engines))
                report = run_refit(pair.many, watched, bucket_bytes=_BUCKET)
                same(report.bytes, total, f"bytes sent to {len(engines)} engines")
                for engine, future in zip(engines, watched.futures, strict=True):
                    kept = engine.kept(expected)
                    same_weights(engine.kept(engine.tensors), kept, "what an engine keeps")
                    taken = future.result(DEADLINE_S)["bytes"]
                    same(taken, sum(t.nbytes for t in kept.values()), "bytes that an engine takes")


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def the_ranks_may_change_between_refits(ctx: Context) -> None:
    """One rank, those of each layout, one again: each delta is exact, from any of them."""
    layouts = layouts_of(ctx)
    engine: _Rows | None = None
    with _taken_over():
        for layout in [*layouts, layouts[0]]:
            with _trained(ctx, layout) as (pair, expected):
                engine = engine or ctx.closing(_Rows(expected))
                ranks: dict[str, tuple[Any, Tensors]] = {
                    f"{layout.ranks} ranks": (pair.many, expected),
                    "one rank": (pair.one, policy_weights(pair.one)),
                }
                for name, (policy, weights) in ranks.items():
                    run_refit(policy, engine, delta=True)
                    same_weights(engine.tensors, weights, f"the engine, after {name}")
                    same(engine.weights_origin, policy.weights_origin, "weights_origin")
                    report = run_refit(policy, engine, delta=True)
                    same(report.bytes, 0, f"bytes of a delta after no change on {name}")


@contextmanager
def _taken_over() -> Generator[None]:
    """Engines are taken over from another trainer on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* had version", LoopWarning)
        yield


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def no_rank_and_no_engine_commits_alone(ctx: Context) -> None:
    """An engine that fails, or a step meanwhile: all ranks and engines get an error (R8, R9, R13).

    No version moves, torn weights do not serve, and the next refit is exact.
    """
    for layout in layouts_of(ctx):
        with _trained(ctx, layout) as (pair, expected):
            engines = [ctx.closing(_Rows(expected, name=f"engine-{n}")) for n in (1, 2)]
            both, last = Engines(*engines), engines[-1]
            faults: dict[str, tuple[str, Any, str]] = {
                "an engine gives up at the end": ("finish", _give_up, "engine-2"),
                "the ranks take a step amid": ("begin", partial(_train, pair), "weights changed"),
            }
            for what, (moment, fault, cause) in faults.items():
                before = run_refit(pair.many, both).version
                with within(f"{what} of the refit"):
                    last.on[moment] = fault
                    errors = _outcomes(pair.many, both)
                    last.on.clear()
                    for party, error in errors.items():
                        require(error, f"the refit of {party}", "an error", "success")
                    raised(errors["rank 0"], RLError, cause)
                    versions = [each.weights_version for each in (pair.many, *engines)]
                    same(versions, [before] * 3, "weights_version of the policy and the engines")
                    for engine in engines:
                        _is_torn_or_has(engine, expected)
                    run_refit(pair.many, both, delta=True)
                    committed = exported(ctx, pair.many)
                    for engine in engines:
                        same_weights(engine.tensors, committed, "the engine after the next refit")


def _give_up() -> None:
    raise InjectedFault("the engine gave up")


def _outcomes(policy: Any, engines: Engines) -> dict[str, BaseException | None]:
    """What a refit ends with, for every rank of the policy and every engine."""
    engines.prepare_refit_info(policy.prepare_refit_info())
    options = {"receivers": engines.receiver_count, "bucket_bytes": _BUCKET}
    sending = ranks_of(policy).submit_refit("send_weights", **options, deadline_s=DEADLINE_S)
    receiving = engines.receive_weights(deadline_s=DEADLINE_S)
    calls = {f"rank {n}": call for n, call in enumerate(sending)}
    calls |= {f"engine {n}": call for n, call in enumerate(receiving, 1)}
    ended = {name: as_concurrent(call) for name, call in calls.items()}
    return {name: call.exception(DEADLINE_S + 10) for name, call in ended.items()}


def _is_torn_or_has(engine: Engine, weights: Tensors) -> None:
    """Fails if an engine serves anything else."""
    try:
        engine.receiver.check()
    except WeightsTornError:
        return
    same_weights(engine.tensors, weights, "an engine that serves after a refit that failed")


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=400.0)
def a_rank_that_stops_or_dies_is_named(ctx: Context) -> None:
    """Any rank, before the deadline; the engine then takes a refit of the ranks that remain."""
    layout = layouts_of(ctx)[0]
    path, config = settings_of(ctx, "untied")
    dtype = ctx.settings.dtype
    expected = {n: t.to(getattr(torch, dtype)) for n, t in checkpoint_weights(path).items()}
    engine = ctx.closing(_Rows(expected))
    last = layout.ranks - 1
    with _taken_over():
        for killed in (last, 0):
            policy: Any = policy_on(ctx, layout.ranks, {**config, **layout.config}, dtype)
            ctx.closing(policy)
            _recovers(policy, engine, expected)
            if killed == last:
                with _interrupted(policy, engine, expected, last, signal.SIGSTOP) as process:
                    os.kill(process, signal.SIGCONT)
                _recovers(policy, engine, expected)
            with _interrupted(policy, engine, expected, killed, signal.SIGKILL):
                policy.shutdown()
        _recovers(ctx.fresh_policy(**config), engine, expected)


def _recovers(policy: Any, engine: Engine, expected: Tensors) -> None:
    for tensor in engine.tensors.values():
        tensor.zero_()
    run_refit(policy, engine)
    engine.receiver.check()
    same_weights(engine.tensors, expected, "the engine")


@contextmanager
def _interrupted(
    policy: Any, engine: Engine, before: Tensors, rank: int, by: signal.Signals
) -> Generator[int]:
    """A refit in which a rank gets a signal once the engine begins; the process of the rank."""
    process = ranks_of(policy).places[rank]["pid"]
    version, struck = engine.weights_version, list[float]()

    def strike() -> None:
        os.kill(process, by)
        struck.append(time.monotonic())

    engine.on["begin"] = strike
    error = attempt(policy, engine, bucket_bytes=_BUCKET)
    engine.on.clear()
    require(struck, "the refit", "the engine begins with it", error)
    try:
        with within(f"rank {rank} got {by.name}"):
            took = time.monotonic() - struck[0]
            most = stretched(DEADLINE_S / 2)
            require(took < most, "seconds until the error", f"< {most:.0f}", f"{took:.1f}")
            raised(error, RLError)
            named = getattr(error, "details", {}).get("rank")
            same(named, rank, f"details['rank'] of {type(error).__name__}: {error}")
            same(engine.weights_version, version, "weights_version after it")
            _is_torn_or_has(engine, before)
    finally:
        yield process


#: Refits in a row, after so many with which all is warm.
_REFITS, _WARM = 20, 3


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def refit_after_refit_leaves_nothing(ctx: Context) -> None:
    """Twenty refits in a row, some after a step: no rank keeps files or shared memory (R6)."""
    layout = layouts_of(ctx)[0]
    with beside(ctx, layout) as pair:
        engine = ctx.closing(_Rows(exported(ctx, pair.many)))
        processes = {"this process": psutil.Process()}
        for rank, place in enumerate(ranks_of(pair.many).places):
            processes[f"rank {rank}"] = psutil.Process(place["pid"])

        def refit(times: int) -> None:
            for number in range(times):
                if not number % 5:
                    _train(pair)
                run_refit(pair.many, engine)

        refit(_WARM)
        before = {name: _held(process) for name, process in processes.items()}
        refit(_REFITS)
        same_weights(engine.tensors, exported(ctx, pair.many), "the engine after the last refit")
        for name, process in processes.items():
            kept = {what: n - before[name][what] for what, n in _held(process).items()}
            grown = {what: n for what, n in kept.items() if n >= _REFITS // 2}
            same(grown, {}, f"what {name} keeps of {_REFITS} refits")


def _held(process: psutil.Process) -> dict[str, int]:
    """How many files it has open, stretches of shared memory mapped, and threads and children."""
    maps = Path(f"/proc/{process.pid}/maps").read_text(encoding="utf-8", errors="replace")
    return {
        "files": process.num_fds(),
        "shared memory": sum(" rw-s " in line for line in maps.splitlines()),
        "threads": process.num_threads(),
        "children": len(process.children()),
    }


@check("R16", needs=("policy",), modules=("rl_hosting",), gpus=2, timeout_s=300.0)
def no_process_takes_memory_for_the_model(ctx: Context) -> None:
    """No process takes more than the buckets of all ranks and the constant (R12)."""
    constant, layout = ctx.manifest.refit_constant_bytes, layouts_of(ctx)[0]
    path = str(ctx.large_model(constant + constant // 2))
    config = {**training_config(), "model_name": path, **layout.config}
    policy = ctx.closing(policy_on(ctx, layout.ranks, config, ctx.settings.dtype))
    served = {"model_name": path, "torch_dtype": ctx.settings.dtype, "max_new_tokens": 1}
    engine = ctx.closing(make_reference("generation", served))
    engine.prepare_for_generation()
    data = training_batch((5, 5))
    engine.generate(data, greedy=True)  # checkpoints that are mapped are read by now
    policy.get_logprobs(data)
    peak, bucket = MemoryPeak(trim=True), 1 << 20
    report = run_refit(policy, engine, mode="packed", bucket_bytes=bucket)
    buffers = 2 * bucket * layout.ranks
    ctx.measure("buffers", report.extra_memory_bytes, buffers, "bytes")
    ctx.measure("resident_peak", peak.resident(), buffers + constant, "bytes")
