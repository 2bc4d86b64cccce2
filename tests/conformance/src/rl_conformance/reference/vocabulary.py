"""The output of a model with a vocabulary that is split over the ranks of a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

__all__ = ["Vocabulary"]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Which tokens a rank computes the logits of.

    Attributes:
        size: Of the whole vocabulary, which the ranks need not divide evenly.
        shard: Which part this rank has.
        shards: Of how many.
        group: The ranks of the copy, in the order of their parts.
    """

    size: int
    shard: int
    shards: int
    group: Any

    @property
    def counts(self) -> list[int]:
        """How many tokens each rank has."""
        return [len(part) for part in torch.empty(self.size).tensor_split(self.shards)]

    @property
    def first(self) -> int:
        """The first of this rank's tokens."""
        return sum(self.counts[: self.shard])

    def own(self, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` logits of this rank's tokens.

        Args:
            hidden: ``[..., H]``; its gradient is this rank's share.
            head: ``[V, H]``, of which only this rank's rows are read.
        """
        rows = head[self.first : self.first + self.counts[self.shard]]
        return torch.nn.functional.linear(hidden, rows)

    def joined(self, own: torch.Tensor, *, everywhere: bool) -> torch.Tensor:
        """``[..., V]`` logits of all tokens, with the gradient of the own ones.

        Args:
            own: ``[..., n]``.
            everywhere: On all ranks; else on the first alone, and the others have only their own.
        """
        joined: torch.Tensor = _Joined.apply(own, self, everywhere)  # type: ignore[no-untyped-call]
        return joined

    def largest(self, own: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits of all tokens, and which tokens these are.

        Args:
            own: ``[..., n]``.
            k: May be more than this rank has.
        """
        missing = max(0, k - own.shape[-1])
        values, tokens = torch.nn.functional.pad(own, (0, missing), value=-torch.inf).topk(k)
        candidates = self._gather(values), self._gather(tokens + self.first)
        values, places = torch.cat(candidates[0], -1).topk(k)
        return values, torch.cat(candidates[1], -1).gather(-1, places)

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's, of one shape."""
        found = [torch.empty_like(mine) for _ in range(self.shards)]
        dist.all_gather(found, mine.contiguous(), group=self.group)
        return found

    def side_by_side(self, own: torch.Tensor, *, everywhere: bool) -> torch.Tensor:
        """See :meth:`joined`, without gradients."""
        padded = torch.nn.functional.pad(own, (0, max(self.counts) - own.shape[-1])).contiguous()
        if everywhere:
            parts = self._gather(padded)
        else:
            parts = [torch.zeros_like(padded) for _ in range(self.shards)]
            parts[self.shard] = padded
            receives = parts if self.shard == 0 else None
            dist.gather(padded, receives, group=self.group, group_dst=0)
        trimmed = [part[..., :n] for part, n in zip(parts, self.counts, strict=True)]
        return torch.cat(trimmed, -1)


class _Joined(torch.autograd.Function):
    """All ranks compute one loss of the same logits: each takes its own part of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, own: torch.Tensor, vocabulary: Vocabulary, everywhere: bool
    ) -> torch.Tensor:
        ctx.vocabulary = vocabulary
        return vocabulary.side_by_side(own, everywhere=everywhere)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vocabulary = ctx.vocabulary
        first, count = vocabulary.first, vocabulary.counts[vocabulary.shard]
        return gradients[0][..., first : first + count], None, None
