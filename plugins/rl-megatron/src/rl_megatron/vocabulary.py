"""Log-probs and largest logits of a vocabulary that lies in columns over tensor-parallel ranks.

No rank computes all logits, nor a float32 copy of its part. Columns of padding never count.

Shapes: ``M`` tokens, ``V`` the rank's columns, padding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_megatron.engine import parallel_state, tensor_parallel
from rl_megatron.table import padded_vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rl_megatron.architectures import Architecture
    from rl_megatron.sizes import Coordinates

__all__ = ["Vocabulary"]

#: Logits held in float32 at a time.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A rank's columns.

    Attributes:
        size: Tokens of the whole vocabulary.
        padded: Columns of all ranks.
        rank: Of this one among those that share it.
        ranks: How many share it.
        group: They.
    """

    size: int
    padded: int
    rank: int
    ranks: int
    group: Any

    @classmethod
    def of(cls, architecture: Architecture, at: Coordinates) -> Vocabulary:
        """A rank's."""
        padded = padded_vocabulary(architecture.vocabulary, at.sizes.tensor)
        group = parallel_state.get_tensor_model_parallel_group()
        return cls(architecture.vocabulary, padded, at.tensor, at.sizes.tensor, group)

    @property
    def first(self) -> int:
        """Token of the first column."""
        return self.padded // self.ranks * self.rank

    @property
    def columns(self) -> int:
        """Columns that are tokens."""
        return max(0, min(self.size - self.first, self.padded // self.ranks))

    def logprobs(
        self,
        logits: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """``log softmax(logits / temperature)[target]``, differentiable in ``logits``.

        Args:
            logits: ``[M, V]`` of any float dtype.
            positions: ``[N]`` int64 rows of ``logits``; none twice.
            targets: ``[N]`` int64 tokens.
            temperature: Greater than 0.

        Returns:
            ``[N]`` float32, on every rank.
        """
        result: torch.Tensor = _Logprobs.apply(  # type: ignore[no-untyped-call]
            logits, positions, targets, temperature, self
        )
        return result

    def topk(self, logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest of every row and their tokens, ``[M, k]``, descending."""
        top = logits[:, : self.columns].topk(min(k, self.columns), dim=-1)
        values = logits.new_full((len(logits), k), -torch.inf)
        tokens = torch.zeros(len(logits), k, dtype=torch.int64, device=logits.device)
        values[:, : top.values.shape[1]] = top.values
        tokens[:, : top.values.shape[1]] = top.indices + self.first
        if self.ranks > 1:
            all_values = [torch.empty_like(values) for _ in range(self.ranks)]
            all_tokens = [torch.empty_like(tokens) for _ in range(self.ranks)]
            dist.all_gather(all_values, values, group=self.group)
            dist.all_gather(all_tokens, tokens, group=self.group)
            best = torch.cat(all_values, 1).topk(k, dim=-1)
            values, tokens = best.values, torch.cat(all_tokens, 1).gather(1, best.indices)
        return values, tokens

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """``[..., size]`` logits of all ranks, differentiable."""
        gathered: torch.Tensor = tensor_parallel.gather_from_tensor_model_parallel_region(
            logits, group=self.group
        )
        return gathered[..., : self.size]

    def sum_(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """Over the ranks, in place."""
        if self.ranks > 1:
            dist.all_reduce(tensor, op=op, group=self.group)
        return tensor


class _Logprobs(torch.autograd.Function):
    """Keeps the logits and one normaliser for each position; the softmax is made again."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        positions: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocabulary: Vocabulary,
    ) -> torch.Tensor:
        columns = vocabulary.columns
        largest = logits.new_full((len(positions),), -torch.inf, dtype=torch.float32)
        total, chosen = torch.zeros_like(largest), torch.zeros_like(largest)
        for part in _chunks(logits, positions):
            if columns:
                scaled = logits[positions[part], :columns].float().div_(temperature)
                largest[part] = scaled.amax(-1)
        vocabulary.sum_(largest, dist.ReduceOp.MAX)
        own = (targets >= vocabulary.first) & (targets < vocabulary.first + columns)
        place = torch.where(own, targets - vocabulary.first, 0)
        for part in _chunks(logits, positions):
            if columns:
                scaled = logits[positions[part], :columns].float().div_(temperature)
                scaled.sub_(largest[part, None])
                picked = scaled.gather(-1, place[part, None])[:, 0]
                chosen[part] = torch.where(own[part], picked, 0.0)
                total[part] = scaled.exp_().sum(-1)
        vocabulary.sum_(chosen)
        normaliser = vocabulary.sum_(total).log_()
        ctx.save_for_backward(logits, positions, place, own, largest + normaliser)
        ctx.temperature, ctx.columns = temperature, columns
        return chosen.sub_(normaliser)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, positions, place, own, normaliser = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        result = torch.zeros_like(logits)
        for part in _chunks(logits, positions):
            rows = positions[part]
            softmax = logits[rows, : ctx.columns].float().div_(ctx.temperature)
            softmax.sub_(normaliser[part, None]).exp_().mul_(-scale[part, None])
            if ctx.columns:
                picked = torch.where(own[part], scale[part], 0.0)
                softmax.scatter_add_(-1, place[part, None], picked[:, None])
            result[rows, : ctx.columns] = softmax.to(logits.dtype)
        return result, None, None, None, None


def _chunks(logits: torch.Tensor, positions: torch.Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
    return (slice(start, start + size) for start in range(0, len(positions), size))
