"""Refits by handles, the older interface: one group of tensors at a time.

The groups are the buckets of a plan that splits no tensor, and whose pace the caller sets.
"""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ConfigError, LifecycleError, RefitAborted, RefitProtocolError
from rl_core.refit._loading import Loader, ReceiverBuckets
from rl_core.refit._packing import Packer, SenderBuckets, checked_tensors
from rl_core.refit.frames import write_handles
from rl_core.refit.hashing import BlockHash, DigestTable
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.messages import Handles
from rl_core.refit.options import DEFAULT_DEADLINE_S
from rl_core.refit.plan import ALIGN, DataMode, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSink, WeightSource
    from rl_core.refit._introduction import Trainer
    from rl_core.refit.transports.base import Lane, SenderEnd

__all__ = ["HandleReceiver", "HandleSender", "HandleSets"]


class HandleSender:
    """The trainer's side of a refit by handles: of one state of the weights, or not complete.

    Args:
        end: Makes the memory that is handed over.
        source: The trainer's tensors, as they are now; asked for all groups.
        manifest: The source's.
        version: The version that these weights become.
        serial: Number of this refit by handles among the sender's.
        bucket_bytes: Size of a group at most, unless it is one larger tensor.
        name: How errors call the sender.
        call: What every rank of the trainer calls this refit.
        token: The trainer's secret.

    Attributes:
        groups: Names, grouped.
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
        call: str,
        token: str,
    ) -> None:
        plan = make_plan(manifest, bucket_bytes, DataMode.HANDLES)
        self.version = version
        self.groups = [[s.spec.name for s in bucket.segments] for bucket in plan.buckets]
        self.left = set(range(len(self.groups)))
        self._source = source
        self._manifest = manifest
        self._serial = serial
        self._bucket_bytes = bucket_bytes
        self._name = name
        self._call = call
        self._token = token
        self._open = True
        self._session = secrets.token_hex(16)
        self._changed: LifecycleError | None = None
        lane = end.lane(max(plan.lane_bytes, ALIGN), torch.device("cpu"), [])
        block_hash = BlockHash.choose(lane.data.device, private=end.private, token=token)
        self._buckets = SenderBuckets(plan, lane, block_hash)

    def hand_over(self, keys: list[str]) -> bytes:
        """Packs a group into the memory; the frame that tells of it.

        Raises:
            ConfigError: The keys are not a group that is left.
            LifecycleError: The weights changed since this refit began.
        """
        if self._changed is not None:
            raise self._changed
        index = next((i for i in self.left if set(self.groups[i]) == set(keys)), None)
        if index is None:
            left = {name for i in self.left for name in self.groups[i]}
            wrong = next((key for key in keys if key not in left), "")
            raise ConfigError(
                f"{self._name}: {wrong!r} is not a tensor that is left to hand over"
                if wrong
                else f"{self._name}: these {len(keys)} tensors are not a group",
                fix="pass each group of prepare_weights_for_ipc once, as it is",
                key=wrong or "keys",
            )
        bucket = self._buckets.plan.buckets[index]
        self._source.open(self._call, DEFAULT_DEADLINE_S)
        try:
            with closing(
                checked_tensors(self._source, [s.spec for s in bucket.segments])
            ) as tensors:
                packer = Packer(self._buckets, tensors, DigestTable(self._manifest))
                digests = packer.put(index)
            self._source.confirm()  # before anything goes out, so that no engine has a mixture
        except LifecycleError as error:
            self._changed = error
            raise
        self.left.remove(index)
        if not self.left:
            self._close_source()
        message = Handles(
            self._session,
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

    def _close_source(self) -> None:
        if self._open:
            self._open = False
            self._source.close()


class HandleReceiver:
    """The engine's side of a refit by handles.

    Args:
        sink: Where to write.
        trainer: Whose tensors they are, as they were checked.
        message: The first group.
        outside_changes: The receiver's, now.
        known: Digests, by name, of what the engine has; kept up to date.
        touch: Called before anything is written.

    Attributes:
        session: Which refit it is.
        serial: Its number among the sender's.
        trainer: Whose it is.
        outside_changes: As long as there are no more, it may end.
        sink: Where it is written.

    Raises:
        RefitAborted: The trainer's tensors changed since they were checked.
    """

    def __init__(
        self,
        sink: WeightSink,
        trainer: Trainer,
        message: Handles,
        outside_changes: int,
        *,
        known: dict[str, bytes],
        touch: Callable[[], None],
    ) -> None:
        manifest = trainer.manifest
        if message.manifest != manifest.digest:
            raise RefitAborted(
                "the trainer's tensors are no longer those that were checked",
                fix="pass the policy's prepare_refit_info() to the engine again",
                phase="PREPARE",
            )
        self.session = message.session
        self.serial = message.serial
        self.trainer = trainer
        self.outside_changes = outside_changes
        self.sink = sink
        self._expected = WeightManifest.of(sink.specs())
        self._groups = 0
        self._known = known
        self._touch = touch
        self._plan = make_plan(manifest, message.bucket_bytes, DataMode.HANDLES)
        self._left = set(range(len(self._plan.buckets)))
        self._buckets: ReceiverBuckets | None = None
        sink.begin(message.version)

    def load(self, message: Handles, lane: Lane, block_hash: BlockHash) -> bool:
        """Writes one group.

        Args:
            message: That describes it.
            lane: Where it lies.
            block_hash: That the trainer used.

        Returns:
            True if it was the last.

        Raises:
            RefitProtocolError: A tensor of it came before.
            RefitCorrupted: The bytes are not those that the sender packed.
        """
        plan, data = self._plan, lane.data
        in_order = message.group == self._groups + 1 and message.index in self._left
        if not in_order or plan.lane_bytes > data.numel():
            raise RefitProtocolError(
                f"handles of group {message.group} where group {self._groups + 1} is due, or that "
                "do not fit the trainer's tensors",
                fix="pass each result of get_weights_ipc_handles once, before the next is asked "
                "for",
                phase="TRANSFER",
            )
        if self._buckets is None or self._buckets.data is not data:
            manifest, expected = self.trainer.manifest, self._expected
            first = message.index
            self._buckets = ReceiverBuckets(
                self.sink, manifest, expected, plan, data, block_hash, first
            )
        loader = Loader(self._buckets, verify="wire", known=self._known, touch=self._touch)
        loader.load(message.index, message.digests)
        self._left.remove(message.index)
        self._groups = message.group
        return not self._left


class HandleSets:
    """Which sets of handles an engine takes: one at a time, each once, none that was followed.

    Attributes:
        current: The set that is under way.
    """

    def __init__(self) -> None:
        self.current: HandleReceiver | None = None
        self._over: dict[str, int] = {}  # by token, the last serial that is over

    def admit(self, message: Handles, token: str, name: str) -> None:
        """Gives up the set before, if handles are of the next one; ``name`` is the engine's.

        Raises:
            RefitAborted: They are of a set that is over, or that another one has followed.
        """
        current, over = self.current, self._over.get(token, 0)
        if current is not None and current.trainer.token == token:
            over = max(over, current.serial - 1)
        if message.serial <= over:
            raise RefitAborted(
                f"{name}: the refit of these handles is over",
                fix="begin another with prepare_weights_for_ipc",
                phase="TRANSFER",
            )
        if current is not None and current.session != message.session:
            self.give_up()

    def end(self) -> None:
        """The set is complete: nothing of it is taken again."""
        current, self.current = self.current, None
        if current is not None:
            token = current.trainer.token
            self._over[token] = max(self._over.get(token, 0), current.serial)

    def give_up(self) -> None:
        """The set is not complete, and will not be."""
        current = self.current
        self.end()
        if current is not None:
            current.sink.fail()
