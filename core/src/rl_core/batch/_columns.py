"""What can be done with one column of a batch: a tensor with the batch in dim 0, or a list."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from itertools import chain
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence


def leading_size(key: str, value: Any) -> int:
    """Rows of a column.

    Raises:
        DataError: The value is neither a list nor a tensor with a dim 0.
    """
    if isinstance(value, list):
        return len(value)
    if isinstance(value, torch.Tensor) and value.dim():
        return value.shape[0]
    what = "a 0-d tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
    fix = "use a tensor with the batch in dim 0, or a list with an item per row"
    if isinstance(value, Mapping):
        fix = f"take one of its columns: batch[{key!r}] = value[{next(iter(value), '...')!r}]"
    elif hasattr(value, "__array__"):
        fix = f"make a tensor of it: batch[{key!r}] = torch.as_tensor(batch[{key!r}])"
    raise DataError(f"{key!r} holds {what}, which has no rows", fix=fix, key=key)


def common_size(columns: Mapping[str, Any]) -> int:
    """Rows of a batch; 0 without columns. Columns that are None do not count.

    Raises:
        DataError: Columns disagree (names keys and sizes), or the batch is no mapping.
    """
    given: Any = columns
    if not isinstance(given, Mapping):
        raise DataError(
            f"a batch is a {type(given).__name__}, not a mapping from keys to columns",
            fix="give every batch as a dict of tensors and lists",
        )
    sizes = {key: leading_size(key, value) for key, value in columns.items() if value is not None}
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"{key}: {size}" for key, size in sizes.items())
        raise DataError(
            f"the columns have different numbers of rows ({listed})",
            fix="give every column one entry for each row",
            keys=list(sizes),
            sizes=list(sizes.values()),
        )
    return next(iter(sizes.values()), 0)


def described(columns: Mapping[str, Any]) -> str:
    """What columns there are, with dtypes and shapes: no values."""

    def one(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            where = "" if value.device.type == "cpu" else f" on {value.device}"
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{where}"
        return f"list[{len(value)}]" if isinstance(value, list) else reprlib.repr(value)

    known = [v for v in columns.values() if isinstance(v, list) or (torch.is_tensor(v) and v.dim())]
    rows = " or ".join(map(str, sorted({*map(len, known)}))) or "0"
    listed = ", ".join(f"{key}: {one(value)}" for key, value in columns.items())
    return f"rows {rows}, columns {len(columns)}: {listed}"


def take_rows(value: Any, rows: torch.Tensor) -> Any:
    """The given rows, copied; ``rows`` is int64 and in range."""
    if isinstance(value, torch.Tensor):
        if len(rows) and torch.equal(rows, torch.arange(int(rows[0]), int(rows[0]) + len(rows))):
            return value[int(rows[0]) : int(rows[0]) + len(rows)].clone()
        return value.index_select(0, rows.to(value.device))
    return list(map(value.__getitem__, rows.tolist()))


def own_memory(value: Any) -> Any:
    """A tensor that is a part of a larger storage is copied out of it."""
    if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > value.nbytes:
        return value.clone()
    return value


def index_of(indices: Sequence[int] | torch.Tensor, size: int) -> torch.Tensor:
    """``[n]`` int64 row indices on the CPU.

    Raises:
        DataError: An index is none or outside ``[0, size)``, or a mask has another length.
    """
    try:
        rows = torch.as_tensor(indices).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"row indices must be integers, got {reprlib.repr(indices)}",
            fix="give a flat list or tensor of integers, or a bool mask",
        ) from None
    if rows.dtype == torch.bool:
        if rows.shape != (size,):
            raise DataError(
                f"the mask of rows has shape {list(rows.shape)}, expected [{size}]",
                fix="give one True or False for each row",
            )
        return rows.nonzero().flatten()
    if rows.numel() and (rows.dim() != 1 or rows.is_floating_point() or rows.is_complex()):
        raise DataError(
            f"row indices must be integers of shape [n], got {rows.dtype} {list(rows.shape)}",
            fix="give a flat list or tensor of integers, or a bool mask",
        )
    rows = rows.flatten().to(torch.int64)
    outside = (rows < 0) | (rows >= size)
    if bool(outside.any()):
        raise DataError(
            f"there is no row {int(rows[outside][0])}: the number of rows is {size}",
            fix=f"use row indices i with 0 <= i < {size}",
            row=int(rows[outside][0]),
        )
    return rows


def permutation_inverse(indices: Sequence[int] | torch.Tensor, size: int) -> torch.Tensor:
    """``[size]`` int64: which row comes to each place when row i goes to ``indices[i]``.

    Raises:
        DataError: The indices are not a permutation of ``range(size)``.
    """
    places = index_of(indices, size)
    if sorted(places.tolist()) != list(range(size)):
        raise DataError(
            f"{len(places)} indices were given, which are not a permutation of 0 to {size - 1}",
            fix="give the index of every row exactly once",
        )
    return places.argsort()


def concatenate(key: str, parts: Sequence[Any], pad_value: float) -> Any:
    """One column from those of several batches; wider tensors are right-padded on dim 1.

    Raises:
        DataError: The parts differ in kind, dtype or shape, or cannot be padded with that value.
    """
    if all(part is None for part in parts):
        return None
    sizes = [leading_size(key, part) for part in parts]
    if all(isinstance(part, list) for part in parts):
        return list(chain.from_iterable(parts))
    # A batch without rows does not decide dtype and shape, unless none has rows.
    tensors = [part for part, size in zip(parts, sizes, strict=True) if size] or parts[:1]
    first = tensors[0]
    for part in tensors:
        if not isinstance(part, torch.Tensor) or not isinstance(first, torch.Tensor):
            raise DataError(
                f"{key!r} is a list in one batch and a tensor in another",
                fix="make it a list in every batch, or a tensor in every batch",
                key=key,
            )
        alike = part.dtype == first.dtype and part.dim() == first.dim()
        if not alike or part.shape[2:] != first.shape[2:]:
            raise DataError(
                f"{key!r} is {first.dtype} {list(first.shape)} in one batch and "
                f"{part.dtype} {list(part.shape)} in another",
                fix="use one dtype, and shapes that differ in no dim but 0 and 1",
                key=key,
            )
    if first.dim() > 1 and not _can_hold(first.dtype, pad_value):
        raise DataError(
            f"{key!r} is {first.dtype}, which cannot be padded with {pad_value!r}",
            fix=f"give pad_value_dict a value of that dtype for {key!r}",
            key=key,
        )
    if first.dim() == 1 or len({part.shape[1] for part in tensors}) == 1:
        return torch.cat(list(tensors))
    rows = sum(part.shape[0] for part in tensors)
    width = max(part.shape[1] for part in tensors)
    merged = first.new_full((rows, width, *first.shape[2:]), pad_value)
    start = 0
    for part in tensors:
        merged[start : start + part.shape[0], : part.shape[1]] = part
        start += part.shape[0]
    return merged


def _can_hold(dtype: torch.dtype, value: Any) -> bool:
    is_number = isinstance(value, Real)
    if not is_number or (isinstance(value, bool) and dtype != torch.bool):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    if dtype.is_floating_point or dtype.is_complex:
        return bool(not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max)
    limits = torch.iinfo(dtype)
    return bool(limits.min <= value <= limits.max and value == int(value))
