"""R8, R9, R15: refits that go wrong, and how they end."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_conformance.doubles import (
    TensorEngine,
    TensorPolicy,
    casting_down,
    dropping,
    failing_write,
    misplacing,
    sink_class,
)
from rl_conformance.expect import fail, raises, require, same_tensor
from rl_conformance.leftovers import Leftovers
from rl_conformance.peers import RemoteGeneration, RemotePolicy
from rl_conformance.refits import (
    DEADLINE_S,
    agree,
    equal,
    greedy,
    odd_tensors,
    run_refit,
    unequal_pair,
)
from rl_conformance.registry import check
from rl_conformance.weights import same_weights
from rl_core.errors import RefitCorrupted, RefitError, RLError, WeightsTornError
from rl_core.refit.transports.ipc import IpcServer
from rl_core.refit.transports.memory import SharedRegion

if TYPE_CHECKING:
    from rl_conformance.context import Context

# -- R8: killed ------------------------------------------------------------------------------------

_MOMENTS: dict[str, dict[str, Any]] = {
    "before_the_first_tensor": {"method": "begin", "count": 0},
    "between_two_tensors": {"method": "write", "count": 3},
    "before_the_commit": {"method": "finish", "count": 0},
}


@check("R8", cases=_MOMENTS, timeout_s=240.0)
def a_killed_engine_is_reported(ctx: Context, method: str, count: int) -> None:
    """The trainer gets a RefitError before the deadline, and serves the next engine."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    before = Leftovers.now()
    with RemoteGeneration(ctx) as generation:
        generation.die_at(method, count)
        started = time.monotonic()
        error = _failure_of(policy, generation)
        took = time.monotonic() - started
        require(took < DEADLINE_S, f"it took {took:.1f} s, the deadline is {DEADLINE_S:g} s")
        require(isinstance(error, RefitError), f"not a RefitError but {error!r}")
        require(str(generation.process.pid) in str(error), f"the peer is not named: {error}")
    survivor = ctx.fresh_generation()
    survivor.prepare_for_generation()
    run_refit(policy, survivor)
    equal(policy, survivor)
    survivor.shutdown()
    policy.shutdown()
    left = [name for name in before.wait_until_back() if "file descriptor" not in name]
    require(not left, f"left behind: {left}")


def _failure_of(policy: Any, generation: RemoteGeneration) -> BaseException:
    """What the trainer's own future ends with; the killed engine's cannot say anything."""
    generation.prepare_refit_info(policy.prepare_refit_info())
    (sending,) = policy.stream_weights_via_ipc_zmq(deadline_s=DEADLINE_S)
    (receiving,) = generation.update_weights_via_ipc_zmq(deadline_s=DEADLINE_S)
    error = sending.exception(DEADLINE_S + 10)
    receiving.exception(DEADLINE_S)
    if error is None:
        fail("the trainer reports success with an engine that was killed")
    assert isinstance(error, BaseException)
    return error


@check("R8", cases={f"after_{n}_tensors": {"count": n} for n in (0, 5)}, timeout_s=240.0)
def a_killed_trainer_is_survived(ctx: Context, count: int) -> None:
    """The engine gets a RefitError, serves no torn weights, and recovers with a new trainer."""
    policy, generation = unequal_pair(ctx)
    before = greedy(ctx, generation)
    with RemotePolicy(ctx, model_name=str(ctx.model("qwen2", seed=1))) as killed:
        killed.die_at_tensor(count)
        generation.prepare_refit_info(killed.prepare_refit_info())
        killed.stream_weights_via_ipc_zmq(bucket_bytes=4096, deadline_s=DEADLINE_S)
        (receiving,) = generation.update_weights_via_ipc_zmq(deadline_s=DEADLINE_S)
        error = receiving.exception(DEADLINE_S + 10)
        require(isinstance(error, RefitError), f"not a RefitError but {error!r}")
    try:
        same_tensor(greedy(ctx, generation)["logprobs"], before["logprobs"], "logprobs")
    except WeightsTornError:
        require(count > 0, "torn although nothing had been sent")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    run_refit(policy, generation)
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R8")
def torn_weights_are_never_served(ctx: Context) -> None:
    """After a loader that raises midway generate refuses, until a full refit commits."""
    policy, generation = unequal_pair(ctx)
    with failing_write(sink_class(generation), after=5), raises(Exception):
        run_refit(policy, generation)
    with raises(WeightsTornError):
        greedy(ctx, generation)
    run_refit(policy, generation)
    agree(ctx, policy, generation)


# -- R9: damaged -----------------------------------------------------------------------------------

Send = Callable[[IpcServer, str, bytes], bool]


class _Line(ABC):
    """Fault: what happens to the sender's messages on their way, by their number."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.sent: list[bytes] = []

    @abstractmethod
    def carry(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        """Carries one message, or does not."""


class _Altered(_Line):
    """One message is carried in another way."""

    def carry(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        self.sent.append(frame)
        if len(self.sent) - 1 == self.at:
            return self.disturb(send, server, key, frame)
        return send(server, key, frame)

    @abstractmethod
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        """What happens to the chosen message."""


class _Lost(_Altered):
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        return True


class _Doubled(_Altered):
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame) and send(server, key, frame)


class _Flipped(_Altered):
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame[:-1] + bytes([frame[-1] ^ 1]))


class _Cut(_Altered):
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        return send(server, key, frame[: len(frame) // 2])


class _Replayed(_Altered):
    def disturb(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        return send(server, key, self.sent[-2])


class _Swapped(_Line):
    """The message waits until the next one has gone."""

    def carry(self, send: Send, server: IpcServer, key: str, frame: bytes) -> bool:
        self.sent.append(frame)
        number = len(self.sent) - 1
        if number == self.at:
            return True
        done = send(server, key, frame)
        return done and (send(server, key, self.sent[self.at]) if number == self.at + 1 else True)


#: Offer, Prepare, then buckets: message 3 is in the midst of them.
_DAMAGE: dict[str, dict[str, Any]] = {
    "lost": {"line": _Lost},
    "doubled": {"line": _Doubled},
    "flipped": {"line": _Flipped},
    "cut_short": {"line": _Cut},
    "replayed": {"line": _Replayed},
    "swapped": {"line": _Swapped},
}


@check("R9", cases=_DAMAGE, needs=())
def a_disturbed_message_never_commits(ctx: Context, line: type[_Line]) -> None:
    """A bucket's message that is lost, doubled, damaged, replayed or swapped ends the refit."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1)))
    engine = ctx.closing(TensorEngine(odd_tensors(2)))
    disturbed, send = line(at=3), IpcServer.send
    with mock.patch.object(IpcServer, "send", lambda s, k, f: disturbed.carry(send, s, k, f)):
        error = _attempt(policy, engine, bucket_bytes=4096, deadline_s=3.0)
    require(len(disturbed.sent) > 3, "the refit ended before the message was disturbed")
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    require(engine.weights_version == 0, f"it committed version {engine.weights_version}")
    run_refit(policy, engine)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


@check("R9", needs=())
def damaged_bytes_never_commit(ctx: Context) -> None:
    """A byte that changes in shared memory after it was packed is found before the commit."""
    policy = ctx.closing(TensorPolicy(odd_tensors(1)))
    engine = ctx.closing(TensorEngine(odd_tensors(2)))
    regions: list[SharedRegion] = []
    create, send = SharedRegion.create, IpcServer.send
    count = iter(range(1 << 30))

    def remember(*args: Any, **kwargs: Any) -> SharedRegion:
        regions.append(create(*args, **kwargs))
        return regions[-1]

    def damage(server: IpcServer, key: str, frame: bytes) -> bool:
        if next(count) == 2:  # the first bucket's message: the bucket lies in its slot
            regions[-1].data[5] ^= 64
        return send(server, key, frame)

    with (
        mock.patch.object(SharedRegion, "create", remember),
        mock.patch.object(IpcServer, "send", damage),
    ):
        error = _attempt(policy, engine, bucket_bytes=4096, deadline_s=10.0)
    require(isinstance(error, RefitCorrupted), f"not RefitCorrupted but {error!r}")
    require(engine.weights_version == 0, f"it committed version {engine.weights_version}")
    run_refit(policy, engine)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


def _attempt(policy: Any, engine: Any, **options: Any) -> BaseException | None:
    try:
        run_refit(policy, engine, **options)
    except Exception as error:
        return error
    return None


# -- R15: not what was installed -------------------------------------------------------------------

_LOADERS: dict[str, dict[str, Any]] = {
    "dropping": {"fault": dropping},
    "misplacing": {"fault": misplacing},
    "casting_down": {"fault": casting_down},
}


@check("R15", cases=_LOADERS)
def a_loader_that_does_not_load_is_caught(ctx: Context, fault: Any) -> None:
    """The read-back differs from what was sent: RefitCorrupted, no commit, nothing served."""
    policy, generation = unequal_pair(ctx)
    with (
        fault(sink_class(generation), "model.layers.1.mlp.up_proj.weight"),
        raises(RefitCorrupted, "up_proj"),
    ):
        run_refit(policy, generation, verify="installed")
    require(generation.weights_version == 0, f"the version is {generation.weights_version}")
    with raises(WeightsTornError):
        greedy(ctx, generation)
    run_refit(policy, generation, verify="installed")
    equal(policy, generation)
