"""Refits by handles, the older interface: one group of tensors at a time.

The groups are the buckets of a plan that splits no tensor, and whose pace the caller sets. All that
are of one state of the weights are a set.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rl_core.errors import ConfigError, LifecycleError, RefitAborted, RefitProtocolError
from rl_core.weights.data.digests import BlockHash, DigestTable
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.plan import ALIGN, DataMode, TransferPlan, make_plan
from rl_core.weights.options import DEFAULT_DEADLINE_S
from rl_core.weights.protocol.frames import write_handles
from rl_core.weights.protocol.messages import Handles
from rl_core.weights.receiving.loading import Loader, ReceiverBuckets, settle
from rl_core.weights.sending.packing import Packer, SenderBuckets, checked_tensors
from rl_core.weights.transports.base import CPU

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.interfaces.weights import WeightSink, WeightSource
    from rl_core.weights.protocol.handshake import Trainer
    from rl_core.weights.transports.base import Lane, ReceiverEnd, SenderEnd


class HandleSender:
    """The trainer's side of one set.

    Args:
        end: Makes the memory that is handed over.
        source: The trainer's tensors, as they are now; asked for all groups.
        manifest: The source's.
        version: The version that these weights become.
        serial: Number of this set among the sender's.
        bucket_bytes: Size of a group at most, unless it is one larger tensor.
        name: How errors call the sender.
        rank_call_id: What every rank of the trainer calls the set.
        token: The trainer's secret.

    Attributes:
        groups: Names, grouped; one empty group if no tensor has an element.
        left: Indices of the groups that were not handed over yet.
        version: The version that these weights become.
    """

    def __init__(
        self,
        end: SenderEnd,
        source: WeightSource,
        manifest: WeightManifest,
        version: int,
        *,
        serial: int,
        bucket_bytes: int,
        name: str,
        rank_call_id: str,
        token: str,
    ) -> None:
        plan = make_plan(manifest, bucket_bytes, DataMode.HANDLES)
        self.version = version
        self.groups = [[s.spec.name for s in bucket.segments] for bucket in plan.buckets] or [[]]
        self.left = set(range(len(self.groups)))
        self._source = source
        self._manifest = manifest
        self._serial = serial
        self._bucket_bytes = bucket_bytes
        self._name = name
        self._rank_call_id = rank_call_id
        self._token = token
        self._open = True
        self._changed: LifecycleError | None = None
        lane = end.lane(max(plan.lane_bytes, ALIGN), torch.device("cpu"), [])
        block_hash = BlockHash.choose(lane.data.device, private=end.private, token=token)
        self._buckets = SenderBuckets(plan, lane, block_hash)

    def hand_over(self, keys: list[str]) -> bytes:
        """Packs a group into the memory; the frame that tells of it.

        Raises:
            ConfigError: The keys are not a group that is left.
            LifecycleError: The weights changed since the set began.
        """
        if self._changed is not None:
            raise self._changed
        index = self._index_of(keys)
        self._source.open(self._rank_call_id, DEFAULT_DEADLINE_S)
        try:
            specs = [self._manifest.by_name[name] for name in self.groups[index]]
            with closing(checked_tensors(self._source, specs)) as tensors:
                packer = Packer(self._buckets, tensors, DigestTable(self._manifest))
                digests = packer.put(index) if specs else b""
            self._source.confirm()  # before anything goes out, so that no engine has a mixture
        except LifecycleError as error:
            self._changed = error
            raise
        self.left.remove(index)
        if not self.left:
            self._close_source()
        message = Handles(
            self._serial,
            len(self.groups) - len(self.left),
            self._manifest.digest,
            self.version,
            self._bucket_bytes,
            index,
            dict(self._buckets.lane.ref),
            digests,
        )
        return write_handles(message, self._token)

    def close(self) -> None:
        """Closes the memory and the source. Idempotent."""
        self._buckets.lane.close()
        self._close_source()

    def _index_of(self, keys: list[str]) -> int:
        """Which group these are."""
        given, left = set(keys), {index: self.groups[index] for index in self.left}
        for index, group in left.items():
            if given == set(group):
                return index
        known = {name for group in left.values() for name in group}
        group = next((group for group in left.values() if given < set(group)), [])
        missing = [name for name in group if name not in given]
        wrong = next((key for key in keys if key not in known), "")
        if wrong:
            what = f"{wrong!r} is not a tensor that is left to hand over"
        elif missing:
            what = f"{', '.join(missing)} of the same group are missing"
        else:
            what = f"these {len(keys)} tensors are of several groups"
        raise ConfigError(
            f"{self._name}: {what}",
            fix="pass each group of prepare_weights_for_ipc once, as it is",
            key=wrong or "keys",
            missing=missing,
        )

    def _close_source(self) -> None:
        if self._open:
            self._open = False
            self._source.close()


class _State(Protocol):
    """What is asked of the engine's ``ReceiverBase``, which knows this module."""

    name: str
    new_sink: Callable[[], WeightSink]
    outside_changes: int
    torn: bool
    known: dict[str, bytes]

    def end(self, transport: str, trainer: Trainer) -> ReceiverEnd: ...
    def attach(
        self, end: ReceiverEnd, mode: DataMode, ref: Mapping[str, Any], device: torch.device
    ) -> Lane: ...
    def check_unchanged(self, since: int) -> None: ...
    def publish(self, version: int, origin: int) -> None: ...


@dataclass(slots=True)
class _Set:
    """A set that is under way.

    Attributes:
        trainer: Whose tensors they are, as they were checked.
        serial: Its number among the sender's.
        outside_changes: The receiver's when it began; as long as there are no more, it may end.
        sink: Where it is written.
        known: Digests, by name, of what the engine has; kept up to date.
        plan: Of the groups.
        groups: How many were written.
        left: Indices of the groups that are still to come.
        buckets: Of the lane, once there is one.
    """

    trainer: Trainer
    serial: int
    outside_changes: int
    sink: WeightSink
    known: dict[str, bytes]
    plan: TransferPlan
    groups: int
    left: set[int]
    buckets: ReceiverBuckets | None = None


class HandleReceiver:
    """The engine's side: one set at a time, each once, and none that another one has followed."""

    def __init__(self) -> None:
        self._set: _Set | None = None
        self._over: dict[str, int] = {}  # by token, the serial of the last set that is over

    @property
    def under_way(self) -> bool:
        """Whether a set is begun and not over."""
        return self._set is not None

    def take(self, message: Handles, trainer: Trainer, state: _State) -> None:
        """Writes one group; with the last one the version moves.

        Whatever goes wrong ends the set.

        Args:
            message: Describes the group.
            trainer: Who handed it over.
            state: What the engine has.

        Raises:
            RefitAborted: The set is over, another one has followed it, or the trainer's tensors
                changed since they were checked.
            RefitProtocolError: It is not the group that is due.
            RefitCorrupted: The bytes are not those that the sender packed.
        """
        over, current = self._over.get(trainer.token, 0), self._set
        same = current is not None and current.trainer.token == trainer.token
        if current is not None and same:
            over = max(over, current.serial - 1)
        if message.serial <= over:
            raise RefitAborted(
                f"{state.name}: the refit of these handles is over",
                fix="begin another with prepare_weights_for_ipc",
                phase="TRANSFER",
            )
        if current is not None and not (same and current.serial == message.serial):
            self.give_up()
        try:
            if self._set is None:
                self._set = _begin(message, trainer, state)
            current = self._set
            _load(current, message, state)
            state.check_unchanged(current.outside_changes)
            if not current.left:
                current.sink.finish(message.version)
                settle(current.sink)
                state.publish(message.version, trainer.origin)
                self._end()
        except BaseException:
            self.give_up()
            raise

    def give_up(self) -> None:
        """The set that is under way, if any, will not be complete."""
        if (ended := self._end()) is not None:
            ended.sink.fail()

    def _end(self) -> _Set | None:
        """Takes nothing of the set again."""
        current, self._set = self._set, None
        if current is not None:
            token = current.trainer.token
            self._over[token] = max(self._over.get(token, 0), current.serial)
        return current


def _begin(message: Handles, trainer: Trainer, state: _State) -> _Set:
    changes, sink = state.outside_changes, state.new_sink()
    if message.manifest != trainer.manifest.digest:
        raise RefitAborted(
            "the trainer's tensors are no longer those that were checked",
            fix="pass the policy's prepare_refit_info() to the engine again",
            phase="PREPARE",
        )
    plan = make_plan(trainer.manifest, message.bucket_bytes, DataMode.HANDLES)
    sink.begin(message.version)
    left = set(range(max(len(plan.buckets), 1)))  # without a bucket there is one empty group
    return _Set(trainer, message.serial, changes, sink, state.known, plan, 0, left)


def _load(current: _Set, message: Handles, state: _State) -> None:
    """Verifies and writes one group of a set."""
    trainer, plan, due = current.trainer, current.plan, current.groups + 1
    end = state.end("ipc", trainer)
    data = state.attach(end, DataMode.HANDLES, message.lane, CPU).data
    in_order = message.group == due and message.index in current.left
    if not in_order or plan.lane_bytes > data.numel():
        raise RefitProtocolError(
            f"handles of group {message.group} where group {due} is due, or that do not fit the "
            "trainer's tensors",
            fix="pass each result of get_weights_ipc_handles once, before the next is asked for",
            phase="TRANSFER",
        )
    if plan.buckets:
        if current.buckets is None or current.buckets.data is not data:
            expected = WeightManifest.of(current.sink.specs())
            block_hash = BlockHash.choose(CPU, private=end.private, token=trainer.token)
            current.buckets = ReceiverBuckets(
                current.sink, trainer.manifest, expected, plan, data, block_hash, message.index
            )
        tear = partial(setattr, state, "torn", True)
        loader = Loader(current.buckets, verify="wire", known=current.known, touch=tear)
        loader.load(message.index, message.digests)
    current.left.remove(message.index)
    current.groups += 1
