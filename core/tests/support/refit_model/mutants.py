"""The protocol with one of its defences taken back, which the search must notice."""

from __future__ import annotations

import sys
from collections import deque
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import msgspec

from refit_model.ranks import TwoRanks
from rl_core.weights import driver as _driver
from rl_core.weights import engine_lock
from rl_core.weights import job as _job
from rl_core.weights.data.digests import Hasher
from rl_core.weights.engine_lock import EngineLock
from rl_core.weights.job import Endpoint
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import Abort, Over, RankConfirmed
from rl_core.weights.protocol.rank_session import RankSession
from rl_core.weights.protocol.receiver_session import ReceiverSession
from rl_core.weights.protocol.sender_session import SenderSession, _Peer
from rl_core.weights.protocol.session import Answered, Packed, Phase, Publish, Send
from rl_core.weights.receiving import receiver as _receiver
from rl_core.weights.receiving.loading import ReceiverBuckets, _Step
from rl_core.weights.receiving.receiver import ReceiveJob, RefitReceiver
from rl_core.weights.receiving.staging import StagedSink
from rl_core.weights.sending.kept import Kept
from rl_core.weights.sending.send_job import SendJob
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.sending.share import Share

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from contextlib import AbstractContextManager


def _with(owner: Any, **replaced: Any) -> Callable[[], AbstractContextManager[Any]]:
    """Replaces functions of a class or module."""
    return lambda: patch.multiple(owner, **replaced)


def _around(
    owner: Any, name: str, change: Callable[..., Any]
) -> Callable[[], AbstractContextManager[Any]]:
    """Replaces a function by one that is also given the function it takes the place of."""
    before = getattr(owner, name)
    return lambda: patch.object(owner, name, lambda *given: change(before, *given))


def _verified_in_the_lane(self: ReceiverBuckets, first: int, group: list[Any]) -> _Step:
    runs = [piece.of(self.data).view(self.data.dtype) for piece in group]
    digests = Hasher(runs, self._hash, self.plan.block_bytes).digests
    writes = self._writes(group, self.data, 0)
    return _Step(first, self._names(group), [], digests, writes, False)


def _takes_it_at_once(self: EngineLock, timeout: float = -1) -> bool:
    self._holder, self._depth = engine_lock.threading.get_ident(), self._depth + 1
    return True


class _LastComesFirst(deque[int]):
    append = deque.appendleft


@contextmanager
def _torn_as_before() -> Generator[None]:
    attach, release = ReceiveJob._attach, ReceiveJob._release

    def attaches(self: Any, *given: Any) -> str:
        self.torn_before = self.endpoint.torn
        return attach(self, *given)

    def releases(self: Any) -> None:
        staged = isinstance(self._sink, StagedSink)
        release(self)
        if staged:
            self.endpoint.torn = self.torn_before

    with patch.multiple(ReceiveJob, _attach=attaches, _release=releases):
        yield


def _without_nonce(init: Any, self: Any, token: str, nonce: bytes, side: Any) -> None:
    init(self, token, b"", side)
    self.nonce = nonce


@contextmanager
def _no_counter() -> Generator[None]:
    encode, decode = Channel.encode, Channel.decode

    def uncounted(self: Any, function: Any, thing: Any) -> Any:
        self._sent = self._received = 0
        return function(self, thing)

    encodes = lambda self, message: uncounted(self, encode, message)  # noqa: E731
    decodes = lambda self, frame: uncounted(self, decode, frame)  # noqa: E731
    with patch.multiple(Channel, encode=encodes, decode=decodes):
        yield


def _last_hello_wins(on_hello: Any, self: Any, key: str, hello: Any) -> list[Any]:
    if self.phase != "DISCOVER" or key in self._peers or key in self._offered:
        return []
    if hello.number != self._number:
        return list(on_hello(self, key, hello))
    for known in (self._peers, self._offered):
        for old in [k for k, p in known.items() if p.hello.receiver == hello.receiver]:
            del known[old]
    self._offered[key] = _Peer(hello)
    return [Send(self.offer, key)]


def _for_this_refit(on_hello: Any, self: Any, key: str, hello: Any) -> Any:
    return on_hello(self, key, msgspec.structs.replace(hello, number=self._number))


def _reads_within(do: Any, self: SendJob, effect: Any) -> list[Any]:
    following = do(self, effect)
    unreachable, self._unreachable = self._unreachable, []
    if unreachable:
        self.pump(0.0)
    return [*following, *(e for key in unreachable for e in self.session.lost(key))]


def _one_sealed_is_enough(all_did: Any, self: SenderSession, peer: _Peer) -> bool:
    return all_did(self, peer) or self.phase is Phase.INSTALL


def _publishes_what_is_installed(installed: Any, self: ReceiverSession) -> list[Any]:
    effects = installed(self)
    return [*effects, *([Publish(self._offer.version)] if effects else [])]


def _closes_after_commit(close: Any, self: Share, failure: Any = None) -> None:
    if failure is None and sys._getframe(2).f_code.co_name != "release_resources":
        close(self)


def _confirms_alone(ask: Any, self: SendJob, questions: Any, answer: Any, *rest: Any) -> Any:
    return ask(self, {} if answer is RankConfirmed else questions, answer, *rest)


def _forgets_digests(do: Any, self: SendJob, effect: Any) -> Any:
    if not isinstance(effect, Packed):
        return do(self, effect)
    return self.session.packed(effect.index, effect.digests, effect.lane)


def _takes_the_last(compare: Any, self: SendJob) -> dict[str, bytes]:
    return {name: it for table in self._tables.values() for name, it in table.known.items()}


def _takes_lost_for_confirmed(lost: Any, self: SenderSession, rank: int, error: Any) -> Any:
    if self.phase is not Phase.SEAL or self._expected is None:
        return lost(self, rank, error)
    self._expected = None
    return [Answered({})]


def _takes_abort_for_over(receive: Any, self: RankSession, message: Any) -> Any:
    if isinstance(message, Abort) and self.phase is Phase.SEAL:
        message = Over(message.session, {})
    return receive(self, message)


#: What is taken back, how, and the scenario in which that shows.
MUTANTS: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "bytes are verified in the sender's memory": (
        _with(
            ReceiverBuckets,
            _verified_beside=_verified_in_the_lane,
            _verified_in_place=_verified_in_the_lane,
        ),
        "STALE_DIRECT",
    ),
    "a failed refit gives back the torn that it saw first": (_torn_as_before, "DROPPED"),
    "forget does not advance the epoch": (
        _with(RefitReceiver, forget=lambda self: setattr(self, "known", {})),
        "LOADED_DELTA",
    ),
    "nobody compares epochs": (
        _with(RefitReceiver, check_unchanged=lambda self, epoch: None),
        "DROPPED_DELTA",
    ),
    "a staged refit writes what is known before it commits": (
        partial(patch.object, _receiver, "dict", lambda known: known, create=True),
        "STAGED_CRASH",
    ),
    "no nonce binds an offer": (_around(Channel, "__init__", _without_nonce), "REPLAYED"),
    "one key serves all sessions": (
        _around(Channel, "_bind", lambda bind, self, *_: bind(self)),
        "POSED",
    ),
    "one key serves all connections that say a Hello": (
        _around(Channel, "_bind", lambda bind, *given: bind(*given[:2])),
        "POSED_ONCE",
    ),
    "frames are not counted": (_no_counter, "REPEATED"),
    "the last Hello takes the place of all others": (
        _around(SenderSession, "_on_hello", _last_hello_wins),
        "POSED_ONCE",
    ),
    "a Hello for any refit is one for this": (
        _around(SenderSession, "_on_hello", _for_this_refit),
        "CRASHED",
    ),
    "lanes of failed refits are used again": (
        _with(Kept, drop_lanes_after_failure=lambda self: None),
        "STALE_PACKED",
    ),
    "calls of refit for one pair do not take turns": (
        _with(_driver, exclusively=lambda *given: nullcontext()),
        "TWO_AT_ONCE",
    ),
    "nobody cancels what failed on the other side": (
        _with(_driver, _cancel=lambda *given: None),
        "GIVEN_UP",
    ),
    "frames are read while one is answered": (_around(SendJob, "do", _reads_within), "FLOODED"),
    "a refit that gives up stays in line": (
        _with(EngineLock, cancel_acquire=lambda self: None),
        "READERS",
    ),
    "a refit writes while readers decode": (
        _with(EngineLock, acquire_keeping_place=_takes_it_at_once),
        "READERS",
    ),
    "who comes last gets the engine first": (
        _with(engine_lock, deque=_LastComesFirst),
        "READER_BETWEEN",
    ),
    "a refit that is given up goes on": (
        _with(Endpoint, cancel=lambda self, number: None),
        "GIVEN_UP_FROM_OUTSIDE",
    ),
    "a refit that is given up before it is asked for begins": (
        _with(Endpoint, next_number=lambda self, given: given or self.number + 1),
        "GIVEN_UP_FROM_OUTSIDE",
    ),
    "refits of one side do not take turns": (
        _with(_job, exclusively=lambda *given: nullcontext()),
        "TWO_APART",
    ),
    "all engines commit once one has sealed": (
        _around(SenderSession, "_all_did", _one_sealed_is_enough),
        "TWO_ENGINES_CRASH",
    ),
    "an engine commits what nobody decided": (
        _around(ReceiverSession, "installed", _publishes_what_is_installed),
        "TWO_ENGINES_CRASH",
    ),
    "an engine that is written to is not torn": (
        _with(ReceiveJob, _mark_torn=lambda self: self.session.mark_torn()),
        "TWO_ENGINES_CRASH",
    ),
    "a dead engine is not noticed": (
        _with(SenderSession, lost=lambda self, key: []),
        "TWO_ENGINES_CRASH",
    ),
    "a trainer has no deadline": (_with(SenderSession, tick=lambda self: []), "TWO_ENGINES_PAUSE"),
    "an engine has no deadline": (_with(ReceiverSession, tick=lambda self: []), "DRIVER_PAUSE"),
    "a trainer that is described again keeps the source": (
        _with(RefitSender, _drop_described=lambda self: None),
        "TWO_APART",
    ),
    "a source is closed where its refit commits": (
        _around(Share, "close", _closes_after_commit),
        "GIVEN_UP",
    ),
    "weights are exchanged while readers decode": (
        _with(ReceiveJob, _quiesce=lambda self: True),
        "READERS_STAGED",
    ),
    "of two trainers' refits a reader sees both": (
        _with(EngineLock, acquire_keeping_place=_takes_it_at_once),
        "TWO_TRAINERS_READER",
    ),
    "rank 0 seals before a rank has confirmed": (
        _around(SendJob, "_ask", _confirms_alone),
        "RANKS_STEP",
    ),
    "the digests of another rank are not in the table": (
        _around(SendJob, "do", _forgets_digests),
        "RANKS",
    ),
    "a rank that is lost has confirmed": (
        _around(SenderSession, "lost_rank", _takes_lost_for_confirmed),
        "RANKS_CRASH",
    ),
    "the state of another rank is not compared": (
        _with(TwoRanks, check_state=lambda *given: None),
        "RANKS_STEP",
    ),
    "copies of two ranks are not compared": (
        _around(SendJob, "_compare_copies", _takes_the_last),
        "RANKS_DRIFT",
    ),
    "a rank that has confirmed takes every end for a good one": (
        _around(RankSession, "receive", _takes_abort_for_over),
        "RANKS_CRASH",
    ),
    "another rank has no deadline": (_with(RankSession, tick=lambda self: []), "RANKS_PAUSE_T"),
}
