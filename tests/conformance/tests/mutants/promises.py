"""Mutants of the protocol: a promise of it taken back, in core."""

from __future__ import annotations

import json
import math
import pickle
import runpy
import secrets
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_backends.generation import base as generation
from rl_backends.spellings import TakesWeights
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.weights.data.digests import BlockHash, Hasher
from rl_core.weights.protocol.sender_session import SenderSession
from rl_core.weights.receiving import loading as _loading
from rl_core.weights.receiving.receiver import RefitReceiver

_SESSION_BYTES = 16


@breaks("R9", checks="R9 and committed_weights")
def what_lies_ready_is_verified_and_copied_later() -> AbstractContextManager[Any]:
    """Digests are of the sender's memory, which is read again to be written."""

    def look_and_copy(buckets: Any, first: int, group: Any) -> Any:
        runs = [piece.of(buckets.data).view(torch.uint8) for piece in group]
        digests = Hasher(runs, buckets._hash, buckets.plan.block_bytes).digests
        writes = buckets._writes(group, buckets.data, 0)
        return _loading._Step(first, buckets._names(group), [], digests, writes, in_place=False)

    return mock.patch.multiple(
        _loading.ReceiverBuckets, _verified_beside=look_and_copy, _verified_in_place=look_and_copy
    )


@breaks("R8", checks="R8 and dropped")
def dropped_weights_are_committed() -> AbstractContextManager[Any]:
    """A refit does not ask whether the weights were dropped since it began."""
    return mock.patch.object(RefitReceiver, "check_unchanged", return_value=None)


@breaks("R8", checks="R8 and dropped")
def dropped_weights_are_no_news() -> AbstractContextManager[Any]:
    """Only what is held is forgotten; the refit goes on as if it were whole."""

    def forget(state: RefitReceiver) -> None:
        state.known = {}

    return mock.patch.object(RefitReceiver, "forget", forget)


@breaks("R9", checks="R9 and digests_over")
def digests_are_the_same_for_everybody() -> AbstractContextManager[Any]:
    """Blocks are hashed without a key, also where strangers listen."""
    choose = BlockHash.choose.__func__  # type: ignore[attr-defined]
    named = BlockHash.named.__func__  # type: ignore[attr-defined]

    def open_choice(cls: Any, device: Any, *, private: bool, token: str) -> Any:
        return choose(cls, device, private=True, token=token)

    def open_name(cls: Any, kind: str, *, private: bool, token: str) -> Any:
        return named(cls, kind, private=True, token=token)

    return mock.patch.multiple(
        BlockHash, choose=classmethod(open_choice), named=classmethod(open_name)
    )


@breaks("S2", checks="S2 and share_a_secret")
def nonces_are_used_again() -> AbstractContextManager[Any]:
    """An engine says the same Hello each time."""
    return mock.patch.object(secrets, "token_bytes", return_value=b"n" * 16)


@breaks("S2", checks="S2 and share_a_secret")
def sessions_are_numbered() -> AbstractContextManager[Any]:
    """Refits have short names that come again."""
    honest = secrets.token_hex

    def short(count: int | None = None) -> str:
        return "1" if count == _SESSION_BYTES else honest(count)

    return mock.patch.object(secrets, "token_hex", short)


@breaks("S2", checks="S2 and replayed")
def the_last_hello_counts() -> AbstractContextManager[Any]:
    """Who says an engine's Hello amid a refit takes its place."""
    honest = SenderSession._on_hello

    def replace(session: Any, key: str, hello: Any) -> Any:
        for known, peer in list(session._peers.items()):
            if peer.hello.receiver == hello.receiver and known != key:
                session._peers[key] = session._peers.pop(known)
        return honest(session, key, hello)

    return mock.patch.object(SenderSession, "_on_hello", replace)


class _ForReaders:
    """A lock that a writer gets when nobody has generated for a while."""

    refit_waiting = held_by_this_thread = False

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._counting = threading.Lock()
        self._last = 0.0
        self._readers = 0  # that read, or wait to

    def acquire(self, timeout: float = -1) -> bool:
        given_up = time.monotonic() + timeout if timeout >= 0 else math.inf
        while self._readers or time.monotonic() - self._last < 3.0:
            if time.monotonic() >= given_up:
                return False
            time.sleep(0.02)
        return self._lock.acquire(timeout=timeout)

    def release(self) -> None:
        self._lock.release()

    acquire_keeping_place = acquire

    def cancel_acquire(self) -> None:
        """Nobody stands in line."""

    def __enter__(self) -> None:
        with self._counting:
            self._readers += 1
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        with self._counting:
            self._readers -= 1
            self._last = time.monotonic()


@breaks("R8", checks="R8 and its_turn")
def who_generates_goes_first() -> AbstractContextManager[Any]:
    """A refit waits until nobody wants to generate."""
    return mock.patch.object(generation, "EngineLock", _ForReaders)


@breaks("S3", checks="S3")
class TheTokenizerBringsItsCode(ReferenceGeneration):
    """Code is asked about for the model, and not for its tokenizer."""

    def __init__(self, model_name: str, **config: Any) -> None:
        path = Path(model_name)
        named = json.loads((path / "tokenizer_config.json").read_text()).get("auto_map")
        if named:
            runpy.run_path(str(path / "remote_code.py"))
        super().__init__(model_name, **config)


@breaks("S3", checks="S3")
class TheReferenceBringsItsCode(ReferencePolicy):
    """The frozen copy is loaded with code and all."""

    def __init__(self, model_name: str, **config: Any) -> None:
        try:
            super().__init__(model_name, **config)
        finally:
            for path in Path(model_name).glob("remote_code.py"):
                runpy.run_path(str(path))


@breaks("S1", checks="S1 and unpickles")
def tickets_are_pickled() -> AbstractContextManager[Any]:
    """A ticket goes through pickle on its way in."""
    honest = TakesWeights.update_weights

    def update(engine: TakesWeights, ticket: Any) -> bool:
        return honest(engine, pickle.loads(pickle.dumps(ticket)))

    return mock.patch.object(TakesWeights, "update_weights", update)
