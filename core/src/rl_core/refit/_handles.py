"""Refits by handles, the older interface: one group of tensors at a time."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import TYPE_CHECKING

import torch

from rl_core.errors import ConfigError, LifecycleError, RefitAborted, RefitProtocolError
from rl_core.refit._digests import DigestTable, Window
from rl_core.refit._loading import Loader, Route
from rl_core.refit._packing import SlotPacker
from rl_core.refit.frames import write_handles
from rl_core.refit.hashing import BlockHash
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.messages import Handles
from rl_core.refit.options import DEFAULT_DEADLINE_S
from rl_core.refit.plan import ALIGN, TransferPlan, make_plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from rl_core.interfaces.weights import WeightSink, WeightSource
    from rl_core.refit._introduction import Trainer
    from rl_core.refit.transports.base import Lane, SenderEnd

__all__ = ["HandleSets", "Handing", "Taking"]


def _group_plan(manifest: WeightManifest, names: Iterable[str]) -> TransferPlan:
    """All of the named tensors in one bucket, in the manifest's order."""
    wanted = set(names)
    sizes = [spec for spec in manifest.owned if spec.name in wanted]
    room = WeightManifest(tuple(sizes)).nbytes + ALIGN * (len(sizes) + 1)
    return make_plan(manifest, room, wanted=lambda index: manifest.owned[index].name in wanted)


class Handing:
    """The trainer's side of a refit by handles: of one state of the weights, or not complete.

    Args:
        end: Makes the memory that is handed over.
        source: The trainer's tensors, as they are now; asked for all groups.
        manifest: The source's.
        version: Of these weights.
        serial: Number of this refit by handles among the sender's.
        bucket_bytes: Size of a group at most, unless it is one larger tensor.
        name: Of the sender.
        call: What every rank of the trainer calls this refit.

    Attributes:
        groups: Names, grouped.
        left: Names that were not handed over yet.
        version: Of these weights.
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
    ) -> None:
        self.version = version
        self.left = {spec.name for spec in manifest.owned}
        self.groups: list[list[str]] = []
        self._source = source
        self._manifest = manifest
        self._serial = serial
        self._handed = 0
        self._name = name
        self._call = call
        self._open = True
        self._session = secrets.token_hex(16)
        self._changed: LifecycleError | None = None
        for bucket in make_plan(manifest, bucket_bytes).buckets:
            before = self.groups[-1][-1:] if self.groups else []
            # Pieces of a split tensor come together.
            names = [s.spec.name for s in bucket.segments if [s.spec.name] != before]
            if names:
                self.groups.append(names)
        sizes = [_group_plan(manifest, group).lane_bytes for group in self.groups]
        self._private = end.private
        self._lane = end.lane(max(sizes, default=ALIGN), torch.device("cpu"), [])

    def hand_over(self, keys: list[str], token: str) -> bytes:
        """Packs some tensors into the memory; the frame that tells of it.

        Raises:
            ConfigError: A key is not a tensor that is left, or they are too many.
            LifecycleError: The weights changed since this refit began.
        """
        if self._changed is not None:
            raise self._changed
        if unknown := sorted(set(keys) - self.left):
            raise ConfigError(
                f"{self._name}: {unknown[0]!r} is not a tensor that is left to hand over",
                fix="pass each group of prepare_weights_for_ipc once",
                key=unknown[0],
            )
        plan = _group_plan(self._manifest, keys)
        if plan.lane_bytes > self._lane.data.numel():
            raise ConfigError(
                f"{len(keys)} tensors of {plan.lane_bytes} bytes are more than a group holds",
                fix="pass one group of prepare_weights_for_ipc at a time",
                key="keys",
            )
        table = DigestTable(self._manifest)
        device = self._lane.data.device
        block_hash = BlockHash.choose(device, private=self._private, token=token)
        window = Window(plan, self._lane.data, block_hash)
        self._source.open(self._call, DEFAULT_DEADLINE_S)
        packer = SlotPacker(window, self._lane, table, self._source, self._manifest)
        try:
            with closing(packer):
                digests = b"".join(packer.put(index) for index in range(len(plan.buckets)))
            self._source.confirm()  # before anything goes out, so that no engine has a mixture
        except LifecycleError as error:
            self._changed = error
            raise
        self.left -= set(keys)
        if not self.left:
            self._close_source()
        self._handed += 1
        message = Handles(
            self._session,
            self._serial,
            self._handed,
            self._manifest.digest,
            self.version,
            tuple(self._manifest.owned[index].name for index in plan.sent),
            dict(self._lane.ref),
            digests,
        )
        return write_handles(message, token)

    def close(self) -> None:
        """Lets go of the memory and of the source. Idempotent."""
        self._lane.close()
        self._close_source()

    def _close_source(self) -> None:
        if self._open:
            self._open = False
            self._source.close()


class Taking:
    """The engine's side of a refit by handles.

    Args:
        sink: Where to write.
        trainer: Whose tensors they are, as they were checked.
        message: The first group.
        epoch: The receiver's, now.
        known: Digests, by name, of what the engine has; kept up to date.
        touch: Called before anything is written.

    Attributes:
        session: Which refit it is.
        serial: Its number among the sender's.
        trainer: Whose it is.
        epoch: In which it may end.
        sink: Where it is written.
    """

    def __init__(
        self,
        sink: WeightSink,
        trainer: Trainer,
        message: Handles,
        epoch: int,
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
        self.epoch = epoch
        self.sink = sink
        self._expected = WeightManifest.of(sink.specs())
        self._groups = 0
        self._manifest = manifest
        self._known = known
        self._touch = touch
        self._left = {spec.name for spec in manifest.owned}
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
        plan = _group_plan(self._manifest, message.keys)
        in_order = message.group == self._groups + 1 and self._left.issuperset(message.keys)
        if not in_order or plan.lane_bytes > lane.data.numel():
            raise RefitProtocolError(
                f"handles of group {message.group} where group {self._groups + 1} is due, or that "
                "do not fit the trainer's tensors",
                fix="pass each result of get_weights_ipc_handles once, before the next is asked "
                "for",
                phase="TRANSFER",
            )
        route = Route(self.sink, self._manifest, self._expected, plan, lane.data, block_hash)
        loader = Loader(route, verify="wire", known=self._known, touch=self._touch)
        for index in range(len(plan.buckets)):
            loader.load(index, message.digests)
        self._left -= set(message.keys)
        self._groups = message.group
        return not self._left


class HandleSets:
    """Which sets of handles an engine takes: one at a time, each once, none that was followed.

    Attributes:
        current: The set that is under way.
    """

    def __init__(self) -> None:
        self.current: Taking | None = None
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
        taking, self.current = self.current, None
        if taking is not None:
            token = taking.trainer.token
            self._over[token] = max(self._over.get(token, 0), taking.serial)

    def give_up(self) -> None:
        """The set is not complete, and will not be."""
        taking = self.current
        self.end()
        if taking is not None:
            taking.sink.fail()
