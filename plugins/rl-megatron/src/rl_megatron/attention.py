"""Attention by torch's fused kernel, for megatron-core's layers.

megatron-core's takes neither rows laid end to end nor a cache with rows of different lengths;
transformer-engine's needs a GPU. What attention has to know of the rows comes with them, as
the ``attention_bias`` that megatron hands on to every layer untouched, also when it recomputes one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention

from rl_megatron.engine import MegatronModule, RotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_megatron.engine import TransformerConfig

__all__ = ["AttentionRows", "Cache", "Rotary", "TorchAttention"]


class Cache(Protocol):
    """Keys and values of the tokens before."""

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes ``[b, heads, tokens, head]`` of this pass; returns those to attend to."""


@dataclass(frozen=True, slots=True)
class AttentionRows:
    """What attention knows of the rows of one pass.

    Attributes:
        positions: ``[s, b]`` int64 place of each token in its sequence.
        lengths: Of sequences laid end to end in one row; None: one sequence for each row.
        mask: ``[b, 1, 1, columns]`` bool, cached tokens that the rows' one token attends to.
        cache: Keeps keys and values.
        observer: Shown the number of each layer from 0, and ``[b, heads, tokens, head]`` queries,
            keys and values.
        dropout: Seed of what is dropped; each layer and each of all heads has its own.
    """

    positions: torch.Tensor
    lengths: Sequence[int] | None = None
    mask: torch.Tensor | None = None
    cache: Cache | None = None
    observer: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None] | None = None
    dropout: int | None = None


class Rotary(RotaryEmbedding):  # type: ignore[misc]
    """Rotary embeddings at the positions of each token, with frequencies that are given.

    Args:
        config: Of the model.
        frequencies: ``[head / 2]`` float32.

    Attributes:
        positions: ``[s, b]`` int64, of the next pass.
    """

    def __init__(self, config: TransformerConfig, frequencies: torch.Tensor) -> None:
        super().__init__(config.kv_channels, 1.0, use_cpu_initialization=True)
        self.inv_freq = frequencies
        self.positions = torch.zeros(0, 0, dtype=torch.int64)

    def get_rotary_seq_len(self, *_: Any, **__: Any) -> int:
        """Not needed: positions are given."""
        return len(self.positions)

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """``[s, b, 1, head]`` float32 angles."""
        self.inv_freq = self.inv_freq.to(self.positions.device)
        angles = self.positions[..., None].float() * self.inv_freq
        return torch.cat([angles, angles], dim=-1)[:, :, None]


class TorchAttention(MegatronModule):  # type: ignore[misc]
    """A core attention; heads are this rank's.

    Args:
        config: Of the model; its ``rotary_factor`` multiplies queries and keys.
        layer_number: From 1.
        **_: What megatron's builder gives besides.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, **_: Any) -> None:
        super().__init__(config=config)
        self.layer = layer_number - 1

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attention_bias: Any,
        **_: Any,
    ) -> torch.Tensor:
        """Attends.

        Args:
            query: ``[s, b, heads, head]``, rotated; so is ``key``.
            key: ``[s, b, groups, head]``.
            value: Likewise.
            attention_mask: Not used.
            attention_bias: An :class:`AttentionRows`.

        Returns:
            ``[s, b, heads * head]``.
        """
        rows: AttentionRows = attention_bias
        factor = getattr(self.config, "rotary_factor", 1.0)
        if factor != 1.0:
            query, key = query * factor, key * factor
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if rows.observer is not None:
            rows.observer(self.layer, q, k, v)
        if rows.cache is not None:
            k, v = rows.cache.update(k, v, self.layer)
        if rows.mask is not None:
            # Heads that share a key stand in as its queries, so that the cache is not repeated.
            queries = q.reshape(len(q), k.shape[1], q.shape[1] // k.shape[1], -1)
            output = scaled_dot_product_attention(queries, k, v, attn_mask=rows.mask)
            output = output.reshape(q.shape)
        elif rows.lengths is not None:
            parts = (torch.split(tensor, list(rows.lengths), dim=2) for tensor in (q, k, v))
            output = torch.cat(
                [
                    self._causal(*part, rows=rows, sequence=number)
                    for number, part in enumerate(zip(*parts, strict=True))
                ],
                dim=2,
            )
        else:
            output = self._causal(q, k, v, rows=rows)
        return output.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _causal(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        rows: AttentionRows,
        sequence: int = 0,
    ) -> torch.Tensor:
        """Drops the weights that one rank with all heads would drop, however heads are spread."""
        rate: float = self.config.attention_dropout
        if not (self.training and rate and rows.dropout is not None):
            grouped = q.shape[1] != k.shape[1]
            return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        batch, heads, tokens, size = q.shape
        all_heads = self.config.num_attention_heads
        # Numbers below the diagonal are drawn row by row: padding behind changes none of them.
        place = torch.tril_indices(tokens, tokens).unbind()
        drawn = torch.zeros(batch, tokens, tokens, all_heads)
        for row, numbers in enumerate(drawn):
            seed = hash((rows.dropout, self.layer, sequence + row)) & (1 << 63) - 1
            generator = torch.Generator().manual_seed(seed)
            numbers[place] = torch.rand(len(place[0]), all_heads, generator=generator)
        first = heads * self.config.tensor_rank
        kept = (drawn.permute(0, 3, 1, 2)[:, first : first + heads] >= rate).to(q.device)
        k, v = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (k, v))
        scores = q @ k.transpose(2, 3) * size**-0.5
        later = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        weights = scores.float().masked_fill(later, -torch.inf).softmax(-1).to(q.dtype)
        output: torch.Tensor = weights * kept / (1 - rate) @ v
        return output
