"""R8, R9, R15: refits that go wrong, and how they end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_conformance.doubles import TensorEngine, TensorPolicy
from rl_conformance.expect import fail, raises, require
from rl_conformance.faults import (
    at_the_first_bucket,
    casting_down,
    detached,
    dropping,
    failing_finish,
    failing_write,
    in_the_engine,
    misplacing,
    writes_in_place,
)
from rl_conformance.leftovers import Leftovers
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
    whole_tensors,
)
from rl_conformance.registry import CORE, check
from rl_conformance.served import greedy, same_output
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import same_weights
from rl_core.errors import RefitCorrupted, RefitError, RLError, WeightsTornError
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.transports.control import ControlServer

if TYPE_CHECKING:
    from rl_conformance.context import Context

# -- R8: killed ------------------------------------------------------------------------------------

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
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    if ctx.settings.device == "cuda":  # what the first refit of a process sets up, it keeps
        first = fresh_engine(ctx)
        run_refit(policy, first)
        first.shutdown()
    before = Leftovers.now()
    with RemoteGeneration(ctx, model_name=str(ctx.model("qwen2", seed=0))) as generation:
        pids = generation.die_at(method, count)
        started = time.monotonic()
        error = _failure_of(policy, generation)
        took = time.monotonic() - started
        require(took < DEADLINE_S, f"it took {took:.1f} s, the deadline is {DEADLINE_S:g} s")
        require(isinstance(error, RefitError), f"not a RefitError but {error!r}")
        named = any(str(pid) in str(error) for pid in pids)
        require(named, f"the peer {pids} is not named: {error}")
        del error  # its traceback has the tensors that were to be sent
    survivor = fresh_engine(ctx)
    run_refit(policy, survivor)
    equal(policy, survivor)
    survivor.shutdown()
    policy.shutdown()
    left = [name for name in before.wait_until_back() if "file descriptor" not in name]
    require(not left, f"left behind: {left}")


def _failure_of(policy: Any, generation: RemoteGeneration) -> BaseException:
    """What the trainer's own future ends with; the killed engine's cannot say anything."""
    generation.prepare_refit_info(policy.prepare_refit_info())
    (sending,) = policy.send_weights(deadline_s=DEADLINE_S)
    (receiving,) = generation.receive_weights(deadline_s=DEADLINE_S)
    error = sending.exception(DEADLINE_S + 10)
    receiving.exception(DEADLINE_S)
    if error is None:
        fail("the trainer reports success with an engine that was killed")
    assert isinstance(error, BaseException)
    return error


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
    with RemotePolicy(ctx, model_name=str(ctx.model("qwen2", seed=1))) as killed:
        killed.die_at(method, count)
        generation.prepare_refit_info(killed.prepare_refit_info())
        killed.send_weights(bucket_bytes=4096, deadline_s=DEADLINE_S)
        (receiving,) = generation.receive_weights(deadline_s=DEADLINE_S)
        error = receiving.exception(DEADLINE_S + 10)
        require(isinstance(error, RefitError), f"not a RefitError but {error!r}")
    try:
        same_output(ctx, greedy(ctx, generation, seed=0), before)
    except WeightsTornError:
        require(count > 0 or method == "confirm", "torn although nothing had been sent")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
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
        require(attempt(policy, generation) is not None, "a refit that failed is reported as done")
    with raises(WeightsTornError):
        greedy(ctx, generation, seed=0)
    run_refit(policy, generation)
    agree(ctx, policy, generation)


# -- R9: damaged -----------------------------------------------------------------------------------

Send = Callable[[ControlServer, str, bytes], bool]


class _Line(ABC):
    """Fault: what happens to the sender's messages on their way, by their number.

    Empty frames, with which a connection is tried, are no messages.
    """

    def __init__(self, at: int) -> None:
        self.at = at
        self.sent: list[bytes] = []

    @abstractmethod
    def carry(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        """Carries one message, or does not."""


class _Altered(_Line):
    """One message is carried in another way."""

    def carry(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        self.sent.append(frame)
        if len(self.sent) - 1 == self.at:
            return self.disturb(send, server, key, frame)
        return send(server, key, frame)

    @abstractmethod
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        """What happens to the chosen message."""


class _Lost(_Altered):
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        return True


class _Doubled(_Altered):
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame) and send(server, key, frame)


class _Flipped(_Altered):
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame[:-1] + bytes([frame[-1] ^ 1]))


class _Cut(_Altered):
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame[: len(frame) // 2])


class _Replayed(_Altered):
    def disturb(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        return send(server, key, self.sent[-2])


class _Swapped(_Line):
    """The message waits until the next one has gone."""

    def carry(self, send: Send, server: ControlServer, key: str, frame: bytes) -> bool:
        self.sent.append(frame)
        number = len(self.sent) - 1
        if number == self.at:
            return True
        done = send(server, key, frame)
        return done and (send(server, key, self.sent[self.at]) if number == self.at + 1 else True)


#: Ways on which tensors travel; an offer and a plan, then buckets: message 3 is in their midst.
_WAYS: dict[str, dict[str, Any]] = {
    "direct": {"mode": "direct"},
    "packed": {"mode": "packed"},
    "collective": {"transport": "collective"},
}
_DAMAGE: dict[str, dict[str, Any]] = {
    "lost": {"line": _Lost},
    "doubled": {"line": _Doubled},
    "flipped": {"line": _Flipped},
    "cut_short": {"line": _Cut},
    "replayed": {"line": _Replayed},
    "swapped": {"line": _Swapped},
}


@check(
    "R9",
    cases={f"{d}_{w}": {**_DAMAGE[d], "way": _WAYS[w]} for d in _DAMAGE for w in _WAYS},
    needs=(CORE,),
)
def a_disturbed_message_never_commits(ctx: Context, line: type[_Line], way: Any) -> None:
    """A bucket's message that is lost, doubled, damaged, replayed or swapped ends the refit."""
    policy, engine = _doubles(ctx, way)
    disturbed, send = line(at=3), ControlServer.send

    def carry(server: ControlServer, key: str, frame: bytes) -> bool:
        return disturbed.carry(send, server, key, frame) if frame else send(server, key, frame)

    with mock.patch.object(ControlServer, "send", carry):
        error = attempt(policy, engine, bucket_bytes=4096, deadline_s=3.0, **way)
    require(len(disturbed.sent) > 3, "the refit ended before the message was disturbed")
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    _recovers(policy, engine, way)


def _doubles(ctx: Context, way: dict[str, Any]) -> tuple[TensorPolicy, TensorEngine]:
    """Tensors as a trainer and an engine that have done a refit on that way, and differ again."""
    policy = ctx.closing(TensorPolicy(whole_tensors(1, ctx.settings.device)))
    engine = ctx.closing(TensorEngine(whole_tensors(2, ctx.settings.device)))
    run_refit(policy, engine, bucket_bytes=4096, **way)
    for name, tensor in whole_tensors(3, ctx.settings.device).items():
        policy.tensors[name].copy_(tensor)
    return policy, engine


def _recovers(policy: TensorPolicy, engine: TensorEngine, way: dict[str, Any]) -> None:
    run_refit(policy, engine, **way)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


@check("R9", cases={name: {"way": way} for name, way in _WAYS.items()}, needs=(CORE,))
def damaged_bytes_never_commit(ctx: Context, way: Any) -> None:
    """A byte that changes in a buffer, or in the tensor itself, once it was hashed is found."""
    policy, engine = _doubles(ctx, way)
    lanes: list[Any] = []
    honest = RefitSender.buckets

    def remember(*args: Any, **options: Any) -> Any:
        layout = honest(*args, **options)
        lanes.append(layout.lane)
        return layout

    def damage() -> None:
        lanes[-1].data[5] ^= 64

    with (
        mock.patch.object(RefitSender, "buckets", remember),
        at_the_first_bucket(damage),
    ):
        error = attempt(policy, engine, bucket_bytes=4096, deadline_s=10.0, **way)
    require(isinstance(error, RefitCorrupted), f"not RefitCorrupted but {error!r}")
    require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    _recovers(policy, engine, way)


@check("R9", cases=MODES)
def weights_that_change_meanwhile_never_commit(ctx: Context, mode: str) -> None:
    """A step of the optimizer in the midst of a refit ends it; the next one is exact."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    policy.prepare_for_training()

    def train() -> None:
        policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())

    with at_the_first_bucket(train):
        error = attempt(policy, generation, mode=mode, bucket_bytes=4096)
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    require(generation.weights_version == 0, f"it committed version {generation.weights_version}")
    run_refit(policy, generation, mode=mode)
    equal(policy, generation)
    agree(ctx, policy, generation)


# -- R15: not what was installed -------------------------------------------------------------------

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
        ctx.not_run("the engine is not written in place", excused=True)
    with in_the_engine(generation, fault, tensor=_TENSOR):
        _is_corrupted(attempt(policy, generation, verify="installed"))
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    with raises(WeightsTornError):
        greedy(ctx, generation, seed=0)
    run_refit(policy, generation, verify="installed")
    equal(policy, generation)


@check("R15", cases=MODES)
def what_a_delta_left_out_is_read_back_too(ctx: Context, mode: str) -> None:
    """A tensor that changed in the engine behind the refit's back, and is not sent, is found."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    options: dict[str, Any] = {"mode": mode, "delta": True, "verify": "installed"}
    run_refit(policy, generation, **options)
    _overwrite(generation, _TENSOR)
    _is_corrupted(attempt(policy, generation, **options))
    require(generation.weights_version == 1, f"the version is {generation.weights_version}")
    report = run_refit(policy, generation, **options)
    require(report.skipped == 0, "the next refit still trusts what the engine holds")
    equal(policy, generation)
    agree(ctx, policy, generation)


def _overwrite(generation: Any, tensor: str) -> None:
    """Fault: one element of the engine's tensor is another one."""
    sink = generation.weight_sink()
    [(_, installed)] = sink.read([tensor])
    of = next(spec for spec in sink.specs() if spec.name == tensor)
    sink.write(tensor, 7, installed.reshape(-1)[7:8] + 1, of=of)


def _is_corrupted(error: BaseException | None) -> None:
    require(isinstance(error, RefitCorrupted), f"not RefitCorrupted but {error!r}")
    require("up_proj" in str(error), f"the tensor is not named: {error}")
