"""R9: damaged, lost, repeated or reordered messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_conformance.checks.common import frames_of, fresh_doubles, messages_of, renew_tensors
from rl_conformance.deadline import stretched
from rl_conformance.doubles import Engine, Trainer
from rl_conformance.expect import raised, require, require_fault, same
from rl_conformance.faults import at_the_first_bucket
from rl_conformance.refits import (
    MODES,
    agree,
    attempt,
    equal,
    run_refit,
    supports,
    take_step,
    unequal_pair,
    whole_tensors,
)
from rl_conformance.registry import CORE, check
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import same_weights
from rl_core.errors import LifecycleError, RefitCorrupted, RefitError, RLError
from rl_core.weights.protocol.messages import BucketReady
from rl_core.weights.sending.share import Share
from rl_core.weights.transports.control import ControlClient, ControlServer

if TYPE_CHECKING:
    from rl_conformance.context import Context


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
    """The message waits until the next one is sent."""

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
        error = attempt(policy, engine, bucket_bytes=4096, deadline_s=stretched(3.0), **way)
    sent = len(disturbed.sent)
    require_fault(sent > 3, "a change of message 3", f"the refit ended after {sent}")
    raised(error, RLError)
    same(engine.weights_version, 1, "weights_version after the disturbed refit")
    _recovers(policy, engine, way)


def _doubles(ctx: Context, way: dict[str, Any]) -> tuple[Trainer, Engine]:
    """Tensors as a trainer and an engine that have done a refit on that way, and differ again."""
    policy = ctx.closing(Trainer(whole_tensors(1, ctx.settings.device)))
    engine = ctx.closing(Engine(whole_tensors(2, ctx.settings.device)))
    run_refit(policy, engine, bucket_bytes=4096, **way)
    for name, tensor in whole_tensors(3, ctx.settings.device).items():
        policy.tensors[name].copy_(tensor)
    return policy, engine


def _recovers(policy: Trainer, engine: Engine, way: dict[str, Any]) -> None:
    run_refit(policy, engine, **way)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


@check("R9", cases={name: {"way": way} for name, way in _WAYS.items()}, needs=(CORE,))
def damaged_bytes_never_commit(ctx: Context, way: Any) -> None:
    """A byte that changes in a buffer, or in the tensor itself, once it was hashed is found."""
    policy, engine = _doubles(ctx, way)
    lanes: list[Any] = []
    honest = Share.prepare

    def remember(*args: Any, **options: Any) -> Any:
        layout = honest(*args, **options)
        lanes.append(layout.lane)
        return layout

    def damage() -> None:
        lanes[-1].data[5] ^= 64

    with (
        mock.patch.object(Share, "prepare", remember),
        at_the_first_bucket(damage),
    ):
        error = attempt(policy, engine, bucket_bytes=4096, deadline_s=stretched(10.0), **way)
    raised(error, RefitCorrupted)
    same(engine.weights_version, 1, "weights_version after the damaged refit")
    _recovers(policy, engine, way)


@check("R9", cases=MODES)
def weights_that_change_meanwhile_never_commit(ctx: Context, mode: str) -> None:
    """A step of the optimizer during a refit ends the refit; the next one is exact."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, mode)
    policy.prepare_for_training()

    def train() -> None:
        policy.train(training_batch((9, 14, 6)), NegativeLogLikelihood())

    with at_the_first_bucket(train):
        error = attempt(policy, generation, mode=mode, bucket_bytes=4096)
    raised(error, RLError)
    same(
        generation.weights_version,
        ctx.first_version,
        "weights_version after a step during the refit",
    )
    run_refit(policy, generation, mode=mode)
    equal(policy, generation)
    agree(ctx, policy, generation)


@check("R9")
def the_reference_may_score_during_a_refit(ctx: Context) -> None:
    """Scoring the reference policy during a refit ends the refit or has no effect on it."""
    policy, generation = unequal_pair(ctx)
    supports(ctx, policy, "packed")
    take_step(policy)

    def score() -> None:
        policy.get_reference_policy_logprobs(training_batch((9, 14)))

    with at_the_first_bucket(score):
        error = attempt(policy, generation, mode="packed", bucket_bytes=4096)
    if error is not None:
        raised(error, (LifecycleError, RefitError))
    if error is None:
        equal(policy, generation)
    else:
        same(
            generation.weights_version, ctx.first_version, "weights_version after the failed refit"
        )
    run_refit(policy, generation)
    equal(policy, generation)


#: Small enough that there are several buckets.
_BUCKET = 4096


@check("R9", needs=(CORE,))
def committed_weights_are_the_trainers(ctx: Context) -> None:
    """Memory that changes between the look at it and the copy: what commits is the trainer's."""
    policy, engine = fresh_doubles(ctx)
    honest, lanes = Share.prepare, []
    ready: list[Any] = []

    def scribble() -> None:
        if ready:
            ready.pop().bitwise_xor_(1)

    engine.on["last"] = scribble  # all else was looked at and copied by then
    run_refit(policy, engine, mode="packed")
    renew_tensors(policy, 3)

    def remember(*args: Any, **options: Any) -> Any:
        layout = honest(*args, **options)
        lanes.append(layout.lane)
        return layout

    with (
        mock.patch.object(Share, "prepare", remember),
        at_the_first_bucket(lambda: ready.append(lanes[-1].data)),
    ):
        error = attempt(policy, engine, mode="packed")
    require_fault(not ready, "a change of memory", "the memory is the same as before")
    if error is None:
        same_weights(engine.tensors, policy.tensors, "the engine")
    else:
        raised(error, RLError)
        same(engine.weights_version, 1, "weights_version after the failed refit")
    run_refit(policy, engine, mode="packed", delta=True)
    same_weights(engine.tensors, policy.tensors, "engine after a delta")


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
    policy, engine = fresh_doubles(ctx)
    run_refit(policy, engine)
    renew_tensors(policy, 3)
    before: list[bytes] = []
    receive, send = ControlClient.receive, ControlClient.send
    _Heard.frames.clear()

    def hear(client: ControlClient, timeout_s: float) -> bytes | None:
        frame = receive(client, timeout_s)
        if frame:
            _Heard.frames.append(frame)
        return frame

    def answer(client: ControlClient, frame: bytes) -> None:
        answers = sent(frame, before) if len(before) == _AMID else [frame]
        before.append(frame)
        for one in answers:
            send(client, one)

    with (
        mock.patch.object(ControlClient, "send", answer),
        mock.patch.object(ControlClient, "receive", hear),
    ):
        error = attempt(policy, engine, **_quickly())
    count = len(before)
    require_fault(count > _AMID, f"a change of answer {_AMID}", f"the refit ended after {count}")
    raised(error, RLError)
    same(engine.weights_version, 1, "weights_version after the disturbed refit")
    run_refit(policy, engine)
    same_weights(engine.tensors, policy.tensors, "engine after the next refit")


#: The engine's message that is disturbed: a Hello, Ready and Prepared were before it.
_AMID = 4


def _quickly() -> dict[str, Any]:
    """Options of a refit that soon gives up what does not come."""
    return {"bucket_bytes": _BUCKET, "deadline_s": stretched(2.0)}


@check("R9", needs=(CORE,), cases={side: {"side": side} for side in ("sender", "receiver")})
def a_refit_that_was_recorded_is_not_played_again(ctx: Context, side: str) -> None:
    """Frames of an earlier refit in place of any of this one's: what commits is the trainer's."""
    policy, engine = fresh_doubles(ctx)
    recorded = frames_of(side, lambda: run_refit(policy, engine, bucket_bytes=_BUCKET))
    last = len(recorded) - 1
    for version, place in enumerate(sorted({0, 1, 2, last // 2, last - 1, last}), 3):
        renew_tensors(policy, version)
        error: list[Any] = []
        frames_of(
            side,
            lambda: error.append(attempt(policy, engine, **_quickly())),  # noqa: B023
            {place: recorded[place]},
        )
        before = engine.weights_version
        if error[0] is None:
            same_weights(engine.tensors, policy.tensors, f"with the recorded frame {place}")
        else:
            raised(error[0], RLError)
        run_refit(policy, engine, bucket_bytes=_BUCKET)
        found = engine.weights_version
        require(found > before, "weights_version after the next refit", f"> {before}", found)
        same_weights(engine.tensors, policy.tensors, "engine after the next refit")


@check("R9", needs=(CORE,))
def digests_over_a_network_need_the_token(ctx: Context) -> None:
    """Two trainers of the same tensors send different digests where strangers can listen."""
    digests: list[set[bytes]] = []
    for _ in range(2):
        policy, engine = fresh_doubles(ctx)
        sent = messages_of(lambda: run_refit(policy, engine, transport="collective"))  # noqa: B023
        digests.append(
            {
                m.digests[n : n + 16]
                for m in sent
                if isinstance(m, BucketReady)
                for n in range(0, len(m.digests), 16)
            }
        )
    require(all(digests), "digests of the buckets", "some from each trainer", digests)
    same(digests[0] & digests[1], set(), "digests that two trainers share")
