"""A plan in the memory of a lane, and how the last ones are kept from refit to refit."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rl_core.refit._digests import run_hasher

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane

__all__ = ["Layout", "keep_two"]

K = TypeVar("K")
V = TypeVar("V")


def keep_two(kept: dict[K, V], key: K, value: V) -> V:
    """Puts ``value`` last, and drops all but the last two: refits mostly repeat one of these."""
    kept.pop(key, None)
    kept[key] = value
    for oldest in list(kept)[:-2]:
        del kept[oldest]
    return value


class Layout:
    """Where the bytes of a refit lie in the sender's lane.

    Views and hashers are made once for each bucket, and used by all refits with this layout.

    Args:
        plan: Which bytes lie where.
        lane: Memory for them.
        block_hash: The trainer's.
    """

    def __init__(self, plan: TransferPlan, lane: Lane, block_hash: BlockHash) -> None:
        self.plan = plan
        self.lane = lane
        self.block_hash = block_hash
        self._views: dict[int, list[torch.Tensor]] = {}
        self._hashers: dict[int, Callable[[], list[bytes]]] = {}

    def views(self, index: int) -> list[torch.Tensor]:
        """The segments of a bucket, of the dtypes that travel: whole tensors, or 1-D parts."""
        if index not in self._views:
            segments = self.plan.buckets[index].segments
            self._views[index] = [
                segment.of(self.lane.data).view(segment.spec.shape if segment.whole else -1)
                for segment in segments
            ]
        return self._views[index]

    def digests(self, index: int) -> list[bytes]:
        """The digests of a bucket's blocks, as they are now."""
        if index not in self._hashers:
            segments, size = self.plan.buckets[index].segments, self.plan.block_bytes
            runs = [self.lane.data[s.start : s.stop] for s in segments]
            self._hashers[index] = run_hasher(runs, size, self.block_hash)
        return self._hashers[index]()
