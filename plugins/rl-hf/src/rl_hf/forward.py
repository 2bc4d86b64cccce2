"""Microbatches through the model: padded or packed in, per-token results out.

Attention is causal, so padding on the right never reaches a real token and needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError
from rl_hf.attention import observed, uses_segments
from rl_hf.logprobs import token_logprobs
from rl_torch.slots import segment_mask

if TYPE_CHECKING:
    from torch import nn

    from rl_hf.attention import Observer

__all__ = ["Forward", "Sequences", "base_model", "check_packing"]


@dataclass(frozen=True, slots=True)
class Sequences:
    """Some rows of a batch on the model's device.

    Attributes:
        ids: ``[b, s]`` int64, right-padded with any id of the vocabulary.
        lengths: ``[b]`` int64, at least 1, on the same device.
        sizes: The same lengths as numbers.
    """

    ids: torch.Tensor
    lengths: torch.Tensor
    sizes: tuple[int, ...]

    @classmethod
    def of(
        cls, ids: torch.Tensor, lengths: torch.Tensor, device: torch.device, width: int = 0
    ) -> Sequences:
        """Cuts CPU rows to the longest, or to ``width`` if that is more, and moves them."""
        sizes = tuple(lengths.tolist())
        width = min(ids.shape[1], max(width, *sizes))
        real = torch.arange(width) < lengths[:, None]
        ids = torch.where(real, ids[:, :width], 0).to(torch.int64)
        return cls(ids.to(device), lengths.to(device), sizes)

    def tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and position of every real token, row after row, ``[sum of lengths]`` each."""
        real = torch.arange(self.ids.shape[1], device=self.ids.device) < self.lengths[:, None]
        rows, positions = real.nonzero(as_tuple=True)
        return rows, positions


class Forward:
    """Runs sequences through a causal language model.

    Args:
        model: The model; :meth:`__call__` uses it in whatever mode and with whatever gradients
            the caller set.
        temperature: Divides the logits.
        packed: Lay the rows of a microbatch end to end instead of padding them.
    """

    def __init__(self, model: nn.Module, *, temperature: float = 1.0, packed: bool = False) -> None:
        self.model = model
        self.temperature = temperature
        self.packed = packed
        self._segments = packed and uses_segments(base_model(model))

    def observed(self, rows: Sequences, observer: Observer) -> None:
        """Runs sequences end to end, showing an observer the attention of every real token.

        Raises:
            CapabilityError: The model's attention is not torch's fused one.
        """
        if not uses_segments(base_model(self.model)):
            raise CapabilityError(
                f"the attention of {type(base_model(self.model)).__name__} cannot be observed",
                fix="set attn_implementation to 'sdpa'; other kinds of layers have no such cache",
            )
        index, positions = rows.tokens()
        with observed(observer):
            self.model(
                input_ids=rows.ids[index, positions][None],
                position_ids=positions[None],
                attention_mask=segment_mask(rows.sizes),
                use_cache=False,
            )

    def over(self, model: nn.Module) -> Forward:
        """The same way through another model of the same architecture."""
        if model is self.model:
            return self
        return Forward(model, temperature=self.temperature, packed=self.packed)

    def __call__(self, rows: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits of all tokens.

        Returns:
            ``[M, V]`` logits in the model's dtype, without the temperature, and ``[b]`` int64:
            token t of row i is at ``starts[i] + t``.
        """
        if not self.packed:
            logits = self.model(input_ids=rows.ids, use_cache=False).logits
            starts = torch.arange(len(rows.sizes), device=rows.ids.device) * rows.ids.shape[1]
            return logits.flatten(0, 1), starts
        index, positions = rows.tokens()
        logits = self.model(
            input_ids=rows.ids[index, positions][None],
            position_ids=positions[None],
            attention_mask=segment_mask(rows.sizes) if self._segments else None,
            use_cache=False,
        ).logits
        return logits[0], rows.lengths.cumsum(0) - rows.lengths

    def logprobs(self, rows: Sequences) -> torch.Tensor:
        """``[b, s]`` float32; entry t scores token t, entry 0 and padding are 0."""
        logits, starts = self(rows)
        index, positions = rows.tokens()
        scored = positions > 0
        index, positions = index[scored], positions[scored]
        values = token_logprobs(
            logits, starts[index] + positions - 1, rows.ids[index, positions], self.temperature
        )
        result = torch.zeros(rows.ids.shape, dtype=torch.float32, device=rows.ids.device)
        return result.index_put((index, positions), values)

    def logits(self, rows: Sequences) -> torch.Tensor:
        """``[b, s, V]`` float32 with the temperature; padding is 0."""
        logits, starts = self(rows)
        index, positions = rows.tokens()
        values = logits[starts[index] + positions].float() / self.temperature
        result = values.new_zeros(*rows.ids.shape, logits.shape[-1])
        return result.index_put((index, positions), values)

    def topk(self, rows: Sequences, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits, with the temperature, of every position that predicts a token.

        Returns:
            ``[b, s-1, k]`` float32 values, descending, and int64 indices; 0 where nothing is
            predicted.
        """
        logits, starts = self(rows)
        index, positions = rows.tokens()
        predicts = positions < rows.lengths[index] - 1
        index, positions = index[predicts], positions[predicts]
        top = logits[starts[index] + positions].topk(k, dim=-1)
        shape = (len(rows.sizes), max(rows.ids.shape[1] - 1, 0), k)
        values = torch.zeros(shape, dtype=torch.float32, device=logits.device)
        indices = torch.zeros(shape, dtype=torch.int64, device=logits.device)
        values[index, positions] = top.values.float() / self.temperature
        indices[index, positions] = top.indices
        return values, indices


def base_model(model: Any) -> Any:
    """The transformers model itself, also inside an adapter's wrapper."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


@torch.no_grad()
def check_packing(model: nn.Module, vocab_size: int) -> None:
    """Scores two short sequences packed and alone, in the model as it is.

    Raises:
        CapabilityError: They differ: the model lets sequences that share a row see one another.
    """
    device = next(model.parameters()).device
    ids = torch.arange(1, 25).remainder(vocab_size).view(2, 12)
    rows = Sequences.of(ids, torch.tensor([12, 7]), device)
    packed = Forward(model, packed=True).logprobs(rows)
    alone = Forward(model).logprobs(rows)
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    off = float((packed - alone).abs().max())
    if off > (1e-3 if exact else 0.1):
        raise CapabilityError(
            f"{type(base_model(model)).__name__} cannot pack: sequences that share a row change "
            f"each other's log-probs by {off:.3g}",
            fix="leave sequence_packing out; dynamic_batching works with every model",
        )
