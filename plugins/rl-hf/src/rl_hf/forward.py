"""Microbatches through the model: padded or packed in, per-token results out.

Attention is causal, so padding on the right never reaches a real token and needs no mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import CapabilityError
from rl_hf.attention import observed, uses_segments
from rl_hf.hidden import HiddenStates, Logits
from rl_hf.logprobs import CHUNK_ELEMENTS, chunks
from rl_hf.modeling import model_device
from rl_torch.slots import segment_mask

if TYPE_CHECKING:
    from torch import nn

    from rl_hf.attention import Observer
    from rl_hf.hidden import Body

__all__ = ["Forward", "Sequences", "base_model", "packing_fault"]


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
        model: The model; used in whatever mode and with whatever gradients the caller set.
        temperature: Divides the logits.
        packed: Lay the rows of a microbatch end to end instead of padding them.
        body: Of the model; logits of it are made some tokens at a time. None makes them at once.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        packed: bool = False,
        body: Body | None = None,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.packed = packed
        self.body = body
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
        return Forward(model, temperature=self.temperature, packed=self.packed, body=self.body)

    def logprobs(self, rows: Sequences, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probs of the tokens that count.

        Args:
            rows: The sequences.
            counts: ``[b, s]`` bool; None is all of them.

        Returns:
            ``[b, s]`` float32; entry t scores token t. Entry 0, padding and what does not count
            are 0.
        """
        index, positions = rows.tokens()
        scored = positions > 0
        if counts is not None:
            scored &= counts[index, positions]
        index, positions = index[scored], positions[scored]
        result = torch.zeros(rows.ids.shape, dtype=torch.float32, device=rows.ids.device)
        if not len(index):
            return result
        outputs, starts = self._run(rows)
        values = outputs.logprobs(
            starts[index] + positions - 1, rows.ids[index, positions], self.temperature
        )
        return result.index_put((index, positions), values)

    def logits(self, rows: Sequences) -> torch.Tensor:
        """``[b, s, V]`` float32 with the temperature; padding is 0."""
        outputs, starts = self._run(rows)
        index, positions = rows.tokens()
        values = outputs.at(starts[index] + positions).float() / self.temperature
        result = values.new_zeros(*rows.ids.shape, values.shape[-1])
        return result.index_put((index, positions), values)

    def topk(self, rows: Sequences, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits, with the temperature, of every position that predicts a token.

        Returns:
            ``[b, s-1, k]`` float32 values, descending, and int64 indices; 0 where nothing is
            predicted.
        """
        outputs, starts = self._run(rows)
        index, positions = rows.tokens()
        predicts = positions < rows.lengths[index] - 1
        index, positions = index[predicts], positions[predicts]
        shape = (len(rows.sizes), max(rows.ids.shape[1] - 1, 0), k)
        values = torch.zeros(shape, dtype=torch.float32, device=rows.ids.device)
        indices = torch.zeros(shape, dtype=torch.int64, device=rows.ids.device)
        for part in chunks(len(index), outputs.vocabulary, CHUNK_ELEMENTS):
            where = index[part], positions[part]
            top = outputs.at(starts[where[0]] + where[1]).topk(k, dim=-1)
            values[where] = top.values.float().to(values.device) / self.temperature
            indices[where] = top.indices.to(indices.device)
        return values, indices

    def _run(self, rows: Sequences) -> tuple[HiddenStates | Logits, torch.Tensor]:
        """What the model makes of all tokens, and ``[b]`` int64 places of the rows' first ones."""
        inputs: dict[str, Any] = {"input_ids": rows.ids, "use_cache": False}
        starts = torch.arange(len(rows.sizes), device=rows.ids.device) * rows.ids.shape[1]
        if self.packed:
            index, positions = rows.tokens()
            inputs["input_ids"] = rows.ids[index, positions][None]
            inputs["position_ids"] = positions[None]
            inputs["attention_mask"] = segment_mask(rows.sizes) if self._segments else None
            starts = rows.lengths.cumsum(0) - rows.lengths
        if self.body is None:
            return Logits(self.model(**inputs).logits.flatten(0, 1)), starts
        return self.body(self.model, **inputs), starts


def base_model(model: Any) -> Any:
    """The transformers model itself, also inside an adapter's wrapper."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def packing_fault(model: nn.Module, vocab_size: int) -> str:
    """Why the rows of a microbatch cannot lie end to end in a model; nothing if they can.

    Tried on two short rows, in the model as it is. Their log-probs must be those of each row alone,
    and nothing of one row may reach the other, however little: its gradient there is exactly 0.
    """
    device = model_device(base_model(model))
    ids = torch.arange(1, 25).remainder(vocab_size).view(2, 12)
    rows = Sequences.of(ids, torch.tensor([12, 7]), device)
    embedded: list[torch.Tensor] = []

    def cut_off(_module: nn.Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        embedded.append(output.detach().requires_grad_())
        return embedded[-1]

    try:
        with torch.no_grad():
            alone = Forward(model).logprobs(rows)
        forward = Forward(model, packed=True)
        handle = base_model(model).get_input_embeddings().register_forward_hook(cut_off)
        try:
            with torch.enable_grad():
                packed = forward.logprobs(rows)
        finally:
            handle.remove()
        (reached,) = torch.autograd.grad(packed[1].sum(), embedded[:1])
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        return f"it takes no packed rows ({type(error).__name__}: {error})"
    if reached[0, : rows.sizes[0]].any():
        return "rows that share a sequence see one another"
    off = float((packed.detach() - alone).abs().max())
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    limit = 1e-3 if exact else 0.1
    return "" if off <= limit else f"rows that share a sequence change log-probs by {off:.3g}"
