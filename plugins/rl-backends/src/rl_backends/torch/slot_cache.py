"""A key/value cache of rows of unequal length, written in place.

A row owns a slot; its keys start at column 0 of the slot whatever its length, so rows come and go
without touching their neighbours, and no step copies the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["SlotCache", "Writes"]

#: Capacity is a multiple of this many tokens, which suits the kernels' alignment.
BLOCK = 32


@dataclass(frozen=True, slots=True)
class Writes:
    """Where the next forward pass puts its keys and values, one entry for each.

    Attributes:
        slots: ``[n]`` int64.
        columns: ``[n]`` int64 positions in the row.
        source: ``[n]`` int64 token of the pass, in row-major order; None if they are in order.
        rows: Slots ``[0, rows)`` are attended to, or none but the pass's own tokens if 0.
        width: Columns attended to.
    """

    slots: torch.Tensor
    columns: torch.Tensor
    source: torch.Tensor | None = None
    rows: int = 0
    width: int = 0


@dataclass(slots=True)
class _Layer:
    """``[slots, heads, columns, head_dim]`` each."""

    keys: torch.Tensor
    values: torch.Tensor


class SlotCache:
    """Keys and values of rows; slots grow with what is expected, columns with the longest row.

    Attributes:
        writes: Where the next forward pass puts its keys and values.
    """

    def __init__(self) -> None:
        self._layers: dict[int, _Layer] = {}
        self._slots = 0
        self._limit = 0
        self._capacity = 0
        self.writes: Writes | None = None

    def columns(self, layer_idx: int) -> int:
        """Tokens that a slot of this layer has room for; 0 before its first :meth:`update`."""
        layer = self._layers.get(layer_idx)
        return 0 if layer is None else layer.keys.shape[2]

    def expect(self, slots: int, limit: int) -> None:
        """Takes more slots where these are too few.

        Args:
            slots: Rows that must fit.
            limit: Tokens that none of those that come exceeds.
        """
        self._limit = max(self._limit, _round_up(limit))
        self._grow(max(slots, self._slots), self._capacity)

    def reserve(self, columns: int) -> int:
        """Makes room for rows of that many tokens, by half as much again if it must grow.

        Returns:
            The number of columns rounded up to whole blocks, which exist.
        """
        columns = _round_up(columns)
        if columns > self._capacity:
            more = min(self._limit, _round_up(self._capacity * 3 // 2))
            self._grow(self._slots, max(columns, more))
        return columns

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Called by every attention layer in every pass.

        Args:
            key_states: ``[b, heads, tokens, head_dim]`` of the pass's own tokens, rotated.
            value_states: The same of the values.
            layer_idx: Number of the layer, in any numbering.

        Returns:
            The keys and values that are attended to: where prompts are taken in, the pass's own;
            in a step, those of all rows, ``[rows, heads, width, head_dim]``.
        """
        writes = self.writes
        assert writes is not None
        layer = self._layers.get(layer_idx)
        if layer is None:
            layer = self._layers[layer_idx] = _Layer(
                _larger(key_states[:0, :, :0], self._slots, self._capacity),
                _larger(value_states[:0, :, :0], self._slots, self._capacity),
            )
        _store(layer.keys, key_states, writes)
        _store(layer.values, value_states, writes)
        if not writes.rows:
            return key_states, value_states
        return (
            layer.keys[: writes.rows, :, : writes.width],
            layer.values[: writes.rows, :, : writes.width],
        )

    def move(self, source: torch.Tensor, target: torch.Tensor, width: int) -> None:
        """Copies the first ``width`` columns of whole slots, ``[n]`` int64 each."""
        for layer in self._layers.values():
            # With a device map, layers live on different devices.
            old, new = source.to(layer.keys.device), target.to(layer.keys.device)
            layer.keys[new, :, :width] = layer.keys[old, :, :width]
            layer.values[new, :, :width] = layer.values[old, :, :width]

    def _grow(self, slots: int, capacity: int) -> None:
        """Layer by layer; where memory is short some have grown, which does no harm."""
        for layer in self._layers.values():
            layer.keys = _larger(layer.keys, slots, capacity)
            layer.values = _larger(layer.values, slots, capacity)
        self._slots, self._capacity = slots, capacity


def _larger(old: torch.Tensor, slots: int, capacity: int) -> torch.Tensor:
    if old.shape[0] >= slots and old.shape[2] >= capacity:
        return old
    # Zeros, since masked columns are multiplied by 0 and what lies there must be finite.
    shape = max(slots, old.shape[0]), old.shape[1], max(capacity, old.shape[2]), old.shape[3]
    new = old.new_zeros(shape)
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _store(stored: torch.Tensor, states: torch.Tensor, writes: Writes) -> None:
    tokens, device = states.transpose(1, 2).flatten(0, 1), stored.device
    if writes.source is not None:
        tokens = tokens[writes.source.to(device)]
    stored[writes.slots.to(device), :, writes.columns.to(device)] = tokens


def _round_up(tokens: int) -> int:
    return -(-tokens // BLOCK) * BLOCK
