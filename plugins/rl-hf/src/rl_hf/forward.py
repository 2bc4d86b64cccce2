"""Microbatches through the model: padded or packed in, per-token results out.

Attention is causal, so padding on the right never reaches a real token and needs no mask. Rows that
would change each other, see :mod:`rl_hf.positions`, go through the model in several passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.torch.slots import segment_mask
from rl_core.errors import CapabilityError
from rl_hf.attention import observed, unlike_masks, uses_segments
from rl_hf.hidden import HiddenStates, Logits
from rl_hf.logprobs import CHUNK_ELEMENTS, chunks
from rl_hf.modeling import model_device

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from rl_hf.attention import Observer
    from rl_hf.hidden import Body

__all__ = ["Forward", "Sequences", "base_model", "packed_row_cost", "packing_fault"]

#: Weights that a token is multiplied with in the time that attention takes to be called for a row
#: by itself. Measured: 0.3 to 4 million in models 64 to 1024 wide, on a CPU.
ROW_CALL_WEIGHTS = 1 << 20


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

    def apart(self, limit: int | None) -> list[tuple[list[int], Sequences]]:
        """The rows up to a length, cut to the longest of them, and each longer one by itself."""
        if limit is None or len(self.sizes) == 1 or max(self.sizes) <= limit:
            return [([*range(len(self.sizes))], self)]
        groups = [[row for row, size in enumerate(self.sizes) if size <= limit]]
        groups += [[row] for row, size in enumerate(self.sizes) if size > limit]
        parts = []
        for group in filter(None, groups):
            sizes = tuple(self.sizes[row] for row in group)
            part = Sequences(self.ids[group, : max(sizes)], self.lengths[group], sizes)
            parts.append((group, part))
        return parts


class Forward:
    """Runs sequences through a causal language model.

    Args:
        model: The model; used in whatever mode and with whatever gradients the caller set.
        temperature: Divides the logits.
        packed: Lay the rows of a microbatch end to end instead of padding them.
        row_cost: Padding of this many tokens a row is cheaper than packing; see
            :func:`packed_row_cost`.
        body: Of the model; logits of it are made some tokens at a time. None makes them at once.
        sharing: See :func:`~rl_hf.positions.sharing_limit`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        temperature: float = 1.0,
        packed: bool = False,
        row_cost: float = 0.0,
        body: Body | None = None,
        sharing: int | None = None,
    ) -> None:
        self.model = model
        self.temperature = temperature
        self.packed = packed
        self.row_cost = row_cost
        self.body = body
        self.sharing = sharing
        self.segments = packed and uses_segments(base_model(model))

    def observed(self, rows: Sequences, observer: Observer) -> None:
        """Runs sequences end to end, showing an observer the attention of every real token.

        Raises:
            CapabilityError: The model's attention is not torch's fused one.
        """
        if not uses_segments(base_model(self.model)):
            raise CapabilityError(
                f"the attention of {type(base_model(self.model)).__name__} cannot be observed",
                fix="calibrate a model with causal layers and no custom attention",
            )
        for _, part in rows.apart(self.sharing):
            index, positions = part.tokens()
            with observed(observer):
                self.model(
                    input_ids=part.ids[index, positions][None],
                    position_ids=positions[None],
                    attention_mask=segment_mask(part.sizes),
                    use_cache=False,
                )

    def over(self, model: nn.Module) -> Forward:
        """The same way through another model of the same architecture."""
        if model is self.model:
            return self
        return Forward(
            model,
            temperature=self.temperature,
            packed=self.packed,
            row_cost=self.row_cost,
            body=self.body,
            sharing=self.sharing,
        )

    def logprobs(self, rows: Sequences, counts: torch.Tensor | None = None) -> torch.Tensor:
        """Log-probs of the tokens that count.

        Args:
            rows: The sequences.
            counts: ``[b, s]`` bool; None is all of them.

        Returns:
            ``[b, s]`` float32; entry t scores token t. Entry 0, padding and what does not count
            are 0.
        """
        if len(parts := rows.apart(self.sharing)) > 1:
            each = [
                self.logprobs(part, counts if counts is None else counts[group])
                for group, part in parts
            ]
            return _joined(parts, each, rows.ids.shape[1])
        index, positions = _scored(rows, counts)
        result = torch.zeros(rows.ids.shape, dtype=torch.float32, device=rows.ids.device)
        if not len(index):
            return result
        outputs, starts = self._run(rows)
        values = outputs.logprobs(
            starts[index] + positions - 1, rows.ids[index, positions], self.temperature
        )
        return result.index_put((index, positions), values)

    def passes(self, rows: Sequences, counts: torch.Tensor | None = None) -> int:
        """How often :meth:`logprobs` runs the model for the same arguments."""
        if len(parts := rows.apart(self.sharing)) > 1:
            return sum(
                self.passes(part, counts if counts is None else counts[group])
                for group, part in parts
            )
        return int(len(_scored(rows, counts)[0]) > 0)

    def logits(self, rows: Sequences) -> torch.Tensor:
        """``[b, s, V]`` float32 with the temperature; padding is 0."""
        if len(parts := rows.apart(self.sharing)) > 1:
            return _joined(parts, [self.logits(part) for _, part in parts], rows.ids.shape[1])
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
        if len(parts := rows.apart(self.sharing)) > 1:
            every = zip(*(self.topk(part, k) for _, part in parts), strict=True)
            tops, places = (_joined(parts, each, rows.ids.shape[1] - 1) for each in every)
            return tops, places
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
        padding = rows.ids.numel() - sum(rows.sizes)
        if self.packed and padding > self.row_cost * len(rows.sizes):
            index, positions = rows.tokens()
            inputs["input_ids"] = rows.ids[index, positions][None]
            inputs["position_ids"] = positions[None]
            inputs["attention_mask"] = segment_mask(rows.sizes) if self.segments else None
            starts = rows.lengths.cumsum(0) - rows.lengths
        if self.body is None:
            return Logits(self.model(**inputs).logits.flatten(0, 1)), starts
        return self.body(self.model, **inputs), starts


def _scored(rows: Sequences, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and position of every token that counts, ``[N]`` each: none of a row's first ones."""
    index, positions = rows.tokens()
    scored = positions > 0
    if counts is not None:
        scored &= counts[index, positions]
    return index[scored], positions[scored]


def _joined(
    parts: list[tuple[list[int], Sequences]], values: Iterable[torch.Tensor], width: int
) -> torch.Tensor:
    """What was made of groups of rows, as of all rows: ``[b, width, ...]``, padded with 0."""
    rows = [row for group, _ in parts for row in group]
    padded = [
        torch.nn.functional.pad(v, (0, 0) * (v.dim() - 2) + (0, width - v.shape[1])) for v in values
    ]
    return torch.cat(padded)[torch.tensor(rows, device=padded[0].device).argsort()]


def base_model(model: Any) -> Any:
    """The transformers model itself, also inside an adapter's wrapper."""
    inner = getattr(model, "get_base_model", None)
    return model if inner is None else inner()


def packed_row_cost(model: nn.Module) -> float:
    """Tokens that a model computes in the time of the calls that a packed row needs for itself.

    Attention is called once for all padded rows, and for each packed row by itself.
    """
    base = base_model(model)
    layers: int = getattr(base.config.get_text_config(), "num_hidden_layers", 1)
    weights: int = (
        sum(p.numel() for p in base.parameters()) - base.get_input_embeddings().weight.numel()
    )
    return ROW_CALL_WEIGHTS * layers / max(weights, 1)


def packing_fault(model: nn.Module, vocab_size: int) -> str:
    """Why the rows of a microbatch cannot lie end to end in a model; nothing if they can.

    Tried on two short rows, in the model as it is. Their log-probs must be those of each row alone,
    and nothing of one row may reach the other, however little: its gradient there is exactly 0.
    Where transformers makes the masks, every layer must be causal, with a window or without: chunks
    would be counted from the first of the rows on.
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
        return f"it does not take packed rows ({type(error).__name__}: {error})"
    if not forward.segments and unlike_masks(base_model(model)):
        return "its layers attend in chunks or windows, which packing would ignore"
    if reached[0, : rows.sizes[0]].any():
        return "rows that share a sequence attend to each other"
    off = float((packed.detach() - alone).abs().max())
    exact = next(model.parameters()).dtype in (torch.float32, torch.float64)
    limit = 1e-3 if exact else 0.1
    return "" if off <= limit else f"rows that share a sequence change log-probs by {off:.3g}"
