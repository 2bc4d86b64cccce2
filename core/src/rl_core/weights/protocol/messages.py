"""The messages of a refit; :mod:`rl_core.weights.protocol.frames` encodes them."""

from __future__ import annotations

from typing import Any

import msgspec

from rl_core.interfaces.weights import Box  # noqa: TC001 - msgspec resolves it
from rl_core.weights.data.parts import LanePlaces

PROTOCOL = 11
"""Version of all that crosses between the two sides, which refuse each other if it differs."""


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Base of all messages: the class name is the tag."""


class _InSession(_Message, frozen=True):
    session: str


class Hello(_Message, frozen=True):
    """Receiver, or another rank of the trainer: here I am. Repeated until an offer comes.

    ``nonce`` has 16 bytes that this connection alone uses. ``number`` is that of the refit that
    this side is to take. ``rank`` is 0 for a receiver.
    """

    receiver: str
    name: str
    pid: int
    nonce: bytes
    number: int
    rank: int = 0


class Offer(_InSession, frozen=True):
    """Sender: this refit is on offer. With ``delta``, only what a receiver lacks will be sent.

    ``session`` is drawn at random for this refit alone. ``nonce`` has 16 bytes that this connection
    alone uses: a Hello that is replayed on another one gets another nonce.
    """

    sender: str
    version: int
    manifest: str
    verify: str
    isolation: str
    delta: bool
    kv_scales: dict[str, float]
    nonce: bytes = b""


class Ready(_InSession, frozen=True):
    """Receiver: the offered manifest is the one I checked; send these tensors in these dtypes.

    ``keeps`` has the boxes that I keep, by the tensor's index, of tensors that I do not keep whole.
    ``holds`` has the digest of every part that I know to have, 16 bytes each, in the order of the
    parts with the digest ``parts``, zeros for the others; it is empty without ``delta``. ``gpus``
    are the UUIDs of the GPUs that I can reach, that of my tensors first; it is empty if my tensors
    are on the CPU. ``host`` is the same for all processes of my host; empty if that is not known.
    """

    dtypes: dict[str, str]
    holds: bytes
    gpus: tuple[str, ...]
    keeps: dict[int, tuple[Box, ...]] = {}
    parts: str = ""
    host: str = ""


class LaneInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lane and the plan of what comes through it, as one receiver reads it.

    Attributes:
        plan: Digest of the plan.
        skip: A byte for each part, 1 for those that are not in the lane; empty if all are.
        ref: How to reach it.
        reads: A byte for each part: 1 if the receiver takes it from here, 2 if all receivers of the
            lane do; empty if each of them takes all that is in the lane.
        places: Where the parts are in a direct lane.
    """

    plan: str
    skip: bytes
    ref: dict[str, Any]
    reads: bytes = b""
    places: LanePlaces = LanePlaces()


class Prepare(_InSession, frozen=True):
    """Sender: the plan and how to reach its lanes.

    ``cuts`` makes the parts of the tensors, as of ``parts.Partition``. ``lanes`` are by the rank
    of the trainer that fills them. ``hash`` is the kind of all digests, as of
    ``digests.BlockHash``.
    """

    bucket_bytes: int
    direct: bool
    cuts: dict[int, tuple[tuple[int, ...], ...]]
    lanes: dict[int, LaneInfo]
    deadline_s: float
    hash: str = "xxh3"


class Prepared(_InSession, frozen=True):
    """Receiver: my plan is the same; unless the refit is staged, nothing generates any more."""


class BucketReady(_InSession, frozen=True):
    """Sender: a bucket lies in a lane; the digest of each block, empty without verification."""

    index: int
    digests: bytes
    lane: int = 0


class Loaded(_InSession, frozen=True):
    """Receiver: the bucket was verified and written (staged: put beside them); its slot is free."""

    index: int
    lane: int = 0


class Seal(_InSession, frozen=True):
    """Sender: that was all; ``digest`` covers every part that the receiver keeps, sent or held."""

    digest: str


class Sealed(_InSession, frozen=True):
    """Receiver: everything is installed and verified; I await your decision."""


class Commit(_InSession, frozen=True):
    """Sender: every receiver is sealed; the version of the offer counts."""


class Done(_InSession, frozen=True):
    """Receiver: the version of the offer serves."""


class Abort(_InSession, frozen=True):
    """Sender: given up. ``kind`` is the name of the error class behind it.

    ``number`` is that of the refit that the sender is at, for a rank that is at another one.
    """

    kind: str
    message: str
    number: int = 0


class Failed(_InSession, frozen=True):
    """Receiver: given up; ``torn`` if the engine's own weights were touched, and not taken back."""

    kind: str
    message: str
    torn: bool


# -- between rank 0, which decides, and the other ranks of the trainer -----------------------------


class RankReady(_InSession, frozen=True):
    """Rank: I have the offered tensors.

    ``state`` is the :attr:`WeightSource.state` of my weights, ``keeps`` has the boxes of my pieces,
    by the tensor's index, of tensors that I do not have whole; ``pid`` and ``host`` are those of my
    process, as of ``Ranks``.
    """

    state: int
    keeps: dict[int, tuple[Box, ...]]
    pid: int
    host: str


class HashParts(_InSession, frozen=True):
    """Rank 0: send me the digests of the parts with a 1 in ``mask``, in the dtypes that travel."""

    dtypes: dict[str, str]
    cuts: dict[int, tuple[tuple[int, ...], ...]]
    mask: bytes
    bucket_bytes: int
    hash: str
    private: bool
    token: str


class PartsHashed(_InSession, frozen=True):
    """Rank: these are they, 16 bytes each, in the order of the parts."""

    digests: bytes


class PrepareRank(_InSession, frozen=True):
    """Rank 0: make your lane.

    ``skip`` has a byte for each part, 1 for those that do not come from you, ``copies`` 1 for those
    of which you only make digests, because another rank has them, too. ``address`` is that of
    rank 0's end of the transport, ``readers`` are the receivers that attach to the lane, with the
    ``reads`` of their ``LaneInfo``, and ``gpus`` are the GPUs that each receiver reaches. All else
    is as in a receiver's ``Prepare``.
    """

    dtypes: dict[str, str]
    cuts: dict[int, tuple[tuple[int, ...], ...]]
    skip: bytes
    copies: bytes
    bucket_bytes: int
    direct: bool
    hash: str
    token: str
    transport: str
    address: dict[str, Any]
    readers: dict[str, bytes]
    gpus: tuple[tuple[str, ...], ...]


class RankPrepared(_InSession, frozen=True):
    """Rank: it is made, as ``LaneInfo`` has it; or, with a ``reason``, it cannot be direct here."""

    plan: str = ""
    ref: dict[str, Any] = {}
    places: LanePlaces = LanePlaces()
    reason: str = ""
    extra_bytes: int = 0


class PackBucket(_InSession, frozen=True):
    """Rank 0: put a bucket into your lane."""

    index: int


class BucketPacked(_InSession, frozen=True):
    """Rank: it is there; ``digests`` as in ``BucketReady``."""

    index: int
    digests: bytes


class ConfirmRank(_InSession, frozen=True):
    """Rank 0: make sure that all that you gave is of one state."""


class RankConfirmed(_InSession, frozen=True):
    """Rank: it is, and ``state`` is still that of my weights.

    ``copies`` has the digests of the parts that ``PrepareRank`` names, 16 bytes each.
    """

    state: int
    copies: bytes = b""


class Over(_InSession, frozen=True):
    """Rank 0: the version was committed; this is the report."""

    report: dict[str, Any]


FromSender = Offer | Prepare | BucketReady | Seal | Commit | Abort
FromReceiver = Ready | Prepared | Loaded | Sealed | Done | Failed
ToRank = HashParts | PrepareRank | PackBucket | ConfirmRank | Over
FromRank = RankReady | PartsHashed | RankPrepared | BucketPacked | RankConfirmed
