"""R5, R8, R9, S2: what a refit promises when others are at work: busy threads, old frames, changes.

Faults sit where a transport's frames and a loader's bytes pass, so that they are the same for any
transport and backend.
"""

from __future__ import annotations

import concurrent.futures
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from unittest import mock

import zmq

from rl_conformance.doubles import TensorEngine, TensorPolicy
from rl_conformance.expect import raises, require
from rl_conformance.faults import at_the_first_bucket
from rl_conformance.refits import DEADLINE_S, attempt, equal, run_refit, whole_tensors
from rl_conformance.registry import CORE, check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.ways import by_ticket, engine_for, exact, settable_trainer, shuffle, ticket_for
from rl_conformance.weights import same_weights
from rl_core.errors import RLError, WeightsTornError
from rl_core.futures import wait
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import BucketReady, Offer
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.tensors import NamedTensorSink
from rl_core.weights.transports.control import ControlClient, ControlServer

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_conformance.context import Context

#: Seconds in which a busy engine lets a refit of a tiny model through.
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
                run_refit(policy, engine, delta=version == 3, deadline_s=_TURN_S)
        finally:
            done.set()
        wait(busy, DEADLINE_S)
    exact(ctx, policy, engine, "after refits of a busy engine", 3)
    mixed = [versions for versions, _ in rows if len(set(versions)) > 1]
    require(not mixed, f"one call gave rows of the versions {mixed[:1]}")
    last = engine.generate(data, greedy=True)["logprobs"]
    for versions, logprobs in rows:
        if versions[0] == 3:
            ctx.measure_error(logprobs, last)


@check("R5", needs=("policy",))
def tickets_never_mix_two_states(ctx: Context) -> None:
    """A training step between a ticket and its refit ends that: no engine commits a mixture."""
    policy = ctx.fresh_policy(model_name=str(ctx.model("qwen2", seed=1)))
    engine = engine_for(ctx, "trainer")
    run_refit(policy, engine)
    for _ in range(2):
        ticket = ticket_for(policy, engine, mode="packed")
        policy.prepare_for_training()
        policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())
        with raises(RLError):
            engine.update_weights(ticket)
        require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    by_ticket(policy, engine)
    equal(policy, engine)


# -- doubles of tensors ----------------------------------------------------------------------------


def _doubles(
    ctx: Context, sink: type[NamedTensorSink] = NamedTensorSink
) -> tuple[TensorPolicy, TensorEngine]:
    policy = ctx.closing(TensorPolicy(whole_tensors(1)))
    return policy, ctx.closing(TensorEngine(whole_tensors(2), sink=sink))


def _renew(policy: TensorPolicy, seed: int) -> None:
    for name, tensor in whole_tensors(seed).items():
        policy.tensors[name].copy_(tensor)


class _Disturbed(NamedTensorSink):
    """Fault: the sender's memory changes while the engine takes what lies there."""

    lane: Any = None

    def targets(self) -> None:
        """Everything is written through :meth:`write`."""

    def write(self, name: str, offset: int, data: torch.Tensor, **of: Any) -> None:
        """Scribbles over the lane, once, before it copies."""
        if name == "last" and type(self).lane is not None:  # all else was looked at and copied
            lane, type(self).lane = type(self).lane, None
            lane.bitwise_xor_(1)
        super().write(name, offset, data, **of)


@check("R9", needs=(CORE,))
def what_is_held_is_what_was_written(ctx: Context) -> None:
    """Memory that changes between the look at it and the copy: what commits is the trainer's."""
    policy, engine = _doubles(ctx, _Disturbed)
    run_refit(policy, engine, mode="packed")
    _renew(policy, 3)
    honest, lanes = RefitSender.buckets, []

    def remember(*args: Any, **options: Any) -> Any:
        layout = honest(*args, **options)
        lanes.append(layout.lane)
        return layout

    def disturb() -> None:
        _Disturbed.lane = lanes[-1].data

    with mock.patch.object(RefitSender, "buckets", remember), at_the_first_bucket(disturb):
        error = attempt(policy, engine, mode="packed")
    require(_Disturbed.lane is None, "the memory was not disturbed")
    if error is None:
        same_weights(engine.tensors, policy.tensors, "engine")
    else:
        require(isinstance(error, RLError), f"not an error of ours but {error!r}")
        require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    run_refit(policy, engine, mode="packed", delta=True)
    same_weights(engine.tensors, policy.tensors, "engine after a delta")


@check("R8", needs=(CORE,), cases={i: {"isolation": i} for i in ("staged", "quiesced")})
def weights_that_are_dropped_meanwhile_stay_torn(ctx: Context, isolation: str) -> None:
    """An engine that loses its weights amid a refit neither commits nor serves what it had."""
    policy, engine = _doubles(ctx)
    run_refit(policy, engine)
    _renew(policy, 3)
    with at_the_first_bucket(engine.receiver.dropped):
        error = attempt(policy, engine, isolation=isolation, bucket_bytes=_BUCKET)
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    with raises(WeightsTornError):
        engine.receiver.check()
    report = run_refit(policy, engine, delta=True)
    require(not report.skipped, f"{report.skipped} tensors that were dropped were not sent")
    engine.receiver.check()
    same_weights(engine.tensors, policy.tensors, "engine")


# -- frames ----------------------------------------------------------------------------------------

_ANSWERS: dict[str, dict[str, Any]] = {
    "lost": {"sent": lambda frame, before: []},
    "doubled": {"sent": lambda frame, before: [frame, frame]},
    "flipped": {"sent": lambda frame, before: [frame[:-1] + bytes([frame[-1] ^ 1])]},
    "cut_short": {"sent": lambda frame, before: [frame[: len(frame) // 2]]},
    "replayed": {"sent": lambda frame, before: [before[-1]]},
    "reflected": {"sent": lambda frame, before: [_Heard.frames[-1]]},
}


class _Heard:
    """The frames that the trainer sent, to be sent back to it."""

    frames: list[bytes] = []  # noqa: RUF012


@check("R9", cases=_ANSWERS, needs=(CORE,))
def a_disturbed_answer_never_commits(ctx: Context, sent: Any) -> None:
    """An engine's message that is lost, doubled, damaged, replayed or another's ends the refit."""
    policy, engine = _doubles(ctx)
    run_refit(policy, engine)
    _renew(policy, 3)
    before: list[bytes] = []
    receive, send = ControlClient.receive, ControlClient.send
    _Heard.frames.clear()

    def hear(client: ControlClient, timeout_s: float) -> bytes | None:
        frame = receive(client, timeout_s)
        if frame:
            _Heard.frames.append(frame)
        return frame

    def answer(client: ControlClient, frame: bytes) -> None:
        said = sent(frame, before) if len(before) == _AMID else [frame]
        before.append(frame)
        for one in said:
            send(client, one)

    with (
        mock.patch.object(ControlClient, "send", answer),
        mock.patch.object(ControlClient, "receive", hear),
    ):
        error = attempt(policy, engine, bucket_bytes=_BUCKET, deadline_s=2.0)
    require(len(before) > _AMID, "the refit ended before an answer was disturbed")
    require(isinstance(error, RLError), f"not an error of ours but {error!r}")
    require(engine.weights_version == 1, f"it committed version {engine.weights_version}")
    run_refit(policy, engine)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


#: The engine's message that is disturbed: a Hello, Ready and Prepared were before it.
_AMID = 4


@check("R9", needs=(CORE,), cases={side: {"side": side} for side in ("sender", "receiver")})
def a_refit_that_was_recorded_is_not_played_again(ctx: Context, side: str) -> None:
    """Frames of an earlier refit in place of any of this one's: what commits is the trainer's."""
    policy, engine = _doubles(ctx)
    recorded = _frames_of(side, lambda: run_refit(policy, engine, bucket_bytes=_BUCKET))
    last = len(recorded) - 1
    for version, place in enumerate(sorted({0, 1, 2, last // 2, last - 1, last}), 3):
        _renew(policy, version)
        error: list[Any] = []
        _frames_of(
            side,
            lambda: error.append(attempt(policy, engine, bucket_bytes=_BUCKET, deadline_s=2.0)),  # noqa: B023
            {place: recorded[place]},
        )
        before = engine.weights_version
        if error[0] is None:
            same_weights(engine.tensors, policy.tensors, f"with the recorded frame {place}")
        else:
            require(isinstance(error[0], RLError), f"not an error of ours but {error[0]!r}")
        run_refit(policy, engine, bucket_bytes=_BUCKET)
        require(engine.weights_version > before, "no refit commits any more")
        same_weights(engine.tensors, policy.tensors, "engine after the next refit")


def _frames_of(
    side: str, act: Callable[[], object], instead: dict[int, bytes] | None = None
) -> list[bytes]:
    """What one side sends, while other frames go in the place of some."""
    sent: list[bytes] = []
    with ExitStack() as patches:
        kind: Any = ControlServer if side == "sender" else ControlClient
        honest = kind.send

        def send(end: Any, *arguments: Any) -> Any:
            *key, frame = arguments
            if not frame:
                return honest(end, *arguments)
            sent.append(frame)
            return honest(end, *key, (instead or {}).get(len(sent) - 1, frame))

        patches.enter_context(mock.patch.object(kind, "send", send))
        act()
    return sent


def _messages(act: Callable[[], object]) -> list[Any]:
    """What both sides say, as messages."""
    said: list[Any] = []
    encode = Channel.encode

    def keep(channel: Channel, message: object) -> bytes:
        said.append(message)
        return encode(channel, message)

    with mock.patch.object(Channel, "encode", keep):
        act()
    return said


@check("S2", needs=(CORE,))
def a_hello_that_was_recorded_takes_nobodys_place(ctx: Context) -> None:
    """Whoever says an engine's Hello again, amid the refit, neither joins nor disturbs it."""
    policy, engine = _doubles(ctx)
    run_refit(policy, engine)
    _renew(policy, 3)
    endpoint = policy.sender.prepare()["addresses"]["ipc"]["endpoint"]
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    hellos: list[bytes] = []

    def hear(client: ControlClient, frame: bytes) -> None:
        hellos.append(frame)
        send(client, frame)

    def say_it_again() -> None:
        stranger.connect(endpoint)
        for frame in hellos[:1] * 3:
            stranger.send(frame)
        stranger.poll(300)  # the trainer's thread is this one: it reads them next

    send = ControlClient.send
    try:
        with mock.patch.object(ControlClient, "send", hear), at_the_first_bucket(say_it_again):
            report = run_refit(policy, engine, bucket_bytes=_BUCKET)
    finally:
        context.destroy(0)
    require(report.receivers == 1, f"{report.receivers} receivers took part")
    same_weights(engine.tensors, policy.tensors, "engine")
    run_refit(policy, engine)


@check("S2", needs=(CORE,))
def no_refit_is_like_another(ctx: Context) -> None:
    """Sessions and nonces are new each time, long, and nothing that is sent twice looks alike."""
    policy, engine = _doubles(ctx)
    frames: list[bytes] = []
    sessions: list[str] = []
    for _ in range(3):
        said: list[Any] = []
        frames += _frames_of(
            "sender",
            lambda: said.extend(_messages(lambda: run_refit(policy, engine))),  # noqa: B023
        )
        frames += _frames_of("receiver", lambda: run_refit(policy, engine))
        sessions += [message.session for message in said if isinstance(message, Offer)]
    require(len(set(sessions)) == len(sessions) == 3, f"sessions {sessions}")
    require(min(map(len, sessions)) >= 16, f"a session of {min(map(len, sessions))} characters")
    require(len(set(frames)) == len(frames), "a frame was sent twice, bit for bit")


@check("R9", needs=(CORE,))
def digests_over_a_network_need_the_token(ctx: Context) -> None:
    """Two trainers of the same tensors tell other digests of them where strangers can listen."""
    told: list[set[bytes]] = []
    for _ in range(2):
        policy, engine = _doubles(ctx)
        said = _messages(lambda: run_refit(policy, engine, transport="collective"))  # noqa: B023
        told.append(
            {
                m.digests[n : n + 16]
                for m in said
                if isinstance(m, BucketReady)
                for n in range(0, len(m.digests), 16)
            }
        )
    require(all(told), "no digests were told")
    require(not told[0] & told[1], "digests do not depend on the token")
