"""The check for right-padded rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rl_core.config import as_int
from rl_core.errors import ConfigError, DataError

__all__ = ["verify_right_padding"]

_SHOWN = 8
_FIX = "pad every row on the right, up to the width of the batch"


def verify_right_padding(
    data: Mapping[str, Any], pad_value: int = 0, raise_error: bool = True
) -> tuple[bool, str | None]:
    """Checks that nothing but padding stands past each row's length.

    Args:
        data: ``input_ids`` ``[B, S]`` with ``input_lengths`` ``[B]``, or ``output_ids`` ``[B, W]``
            with ``unpadded_sequence_lengths`` ``[B]``. Lengths are integers, in a tensor or a list.
        pad_value: The token that pads. It may also occur inside a row.
        raise_error: Raise on the first problem instead of returning it.

    Returns:
        ``(True, None)``, or ``(False, message)`` where the message names row and positions.

    Raises:
        DataError: The data is not right-padded or not of these keys and shapes, and
            ``raise_error`` is set.
        ConfigError: ``pad_value`` is no integer, or ``data`` no mapping; whatever ``raise_error``
            is.
    """
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"data is a {type(data).__name__}, not a batch",
            fix="give a mapping with input_ids and input_lengths",
            key="data",
        )
    message, row = _problem(data, as_int("pad_value", pad_value))
    if message is not None and raise_error:
        raise DataError(message, fix=_FIX, row=row)
    return message is None, message


def _problem(data: Mapping[str, Any], pad_value: int) -> tuple[str | None, int | None]:
    ids_key = "input_ids" if "input_ids" in data else "output_ids"
    lengths_key = "input_lengths" if "input_ids" in data else "unpadded_sequence_lengths"
    ids, lengths = data.get(ids_key), data.get(lengths_key)
    if ids is None:
        return "the batch has neither input_ids nor output_ids", None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return f"{ids_key} is not a tensor of shape [rows, width]", None
    if lengths is None:
        return f"the batch has no {lengths_key}", None
    if isinstance(lengths, list):
        try:
            lengths = torch.tensor([as_int(lengths_key, item) for item in lengths])
        except (ValueError, RuntimeError):  # no integers, or beyond 64 bits
            return f"{lengths_key} holds values that are not integers", None
    if not isinstance(lengths, torch.Tensor) or lengths.shape != ids.shape[:1]:
        return f"{lengths_key} does not hold one length for each of {ids.shape[0]} rows", None
    if lengths.dtype == torch.bool or lengths.is_floating_point() or lengths.is_complex():
        return f"{lengths_key} is {lengths.dtype}, not integers", None
    width = ids.shape[1]
    lengths = lengths.to(ids.device)
    outside = (lengths < 0) | (lengths > width)
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        return f"row {row}: length {int(lengths[row])} is not between 0 and the width {width}", row
    past = torch.arange(width, device=ids.device) >= lengths[:, None]
    wrong = past & (ids != pad_value)
    bad_rows = wrong.any(dim=1).nonzero().flatten()
    if not len(bad_rows):
        return None, None
    row = int(bad_rows[0])
    positions = wrong[row].nonzero().flatten().tolist()
    shown = ", ".join(map(str, positions[:_SHOWN])) + (", ..." if len(positions) > _SHOWN else "")
    others = f" ({len(bad_rows)} such rows)" if len(bad_rows) > 1 else ""
    message = (
        f"row {row}: {ids_key} has values other than the padding id {pad_value} after the length "
        f"{int(lengths[row])}, at positions {shown}{others}"
    )
    return message, row
