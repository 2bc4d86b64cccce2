"""Which elements of a checkpoint's tensor an engine's own loader puts where.

Engines fuse tensors (query, key and value into one), shard them over workers and pad them; their
loaders know how. So the model's ``load_weights`` runs once over tensors without contents, under a
dispatch mode that writes nothing and records every copy into a parameter. The records serve both
ways: to write, and to read back.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from rl_core.interfaces import TensorSpec

__all__ = ["Region", "regions_of"]

_FEW = 5
_COPY = torch.ops.aten.copy_.default
#: What makes a tensor with other storage but the same contents; the first also of another dtype.
_CAST = torch.ops.aten._to_copy.default
_SAME = {torch.ops.aten.clone.default, torch.ops.aten.contiguous.default}
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class Region(NamedTuple):
    """A rectangle of a tensor, seen as rows of a width, and where the engine keeps it.

    Attributes:
        target: The engine's elements, ``[rows, columns]``: a view of its parameter.
        width: Elements of a row of the whole tensor.
        row: The first row.
        column: The first column.
    """

    target: torch.Tensor
    width: int
    row: int
    column: int

    def write(self, offset: int, data: torch.Tensor) -> None:
        """Takes what it needs of a run of the whole tensor's elements.

        Args:
            offset: Index of the first element in the flattened tensor.
            data: 1-D.
        """
        rows, columns = self.target.shape
        while data.numel():
            row, column = divmod(offset, self.width)
            whole = 0 if column else data.numel() // self.width
            count = whole * self.width if whole else min(self.width - column, data.numel())
            block = data[:count].view(max(whole, 1), -1)
            # Of this block of rows, what lies in the region.
            top, bottom = max(row, self.row), min(row + block.shape[0], self.row + rows)
            left = max(column, self.column)
            right = min(column + block.shape[1], self.column + columns)
            if top < bottom and left < right:
                part = block[top - row : bottom - row, left - column : right - column]
                self.target[
                    top - self.row : bottom - self.row, left - self.column : right - self.column
                ].copy_(part)
            offset, data = offset + count, data[count:]

    def read(self, whole: torch.Tensor) -> None:
        """Puts the engine's elements where they belong in the whole tensor, 1-D."""
        rows, columns = self.target.shape
        place = whole.view(-1, self.width)
        place[self.row : self.row + rows, self.column : self.column + columns] = self.target


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies of marked tensors into others, and writes nothing.

    Attributes:
        found: For each copy the marked tensor's name, the target, and the offset, shape and
            strides of the part of the marked tensor that was copied.
        changed: Names of tensors that the loader changed, or overwrote a copy of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[str, torch.Tensor, int, tuple[int, ...], tuple[int, ...]]] = []
        self.changed: list[str] = []
        self._copied: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._offsets: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []

    def mark(self, name: str, tensor: torch.Tensor, offset: int = 0) -> None:
        """Has copies of a tensor recorded; it is kept, so that no other gets its address.

        Args:
            name: Of the whole tensor.
            tensor: That, or a copy of a part of it without gaps.
            offset: The part's first element.
        """
        storage = tensor.untyped_storage().data_ptr()
        self._names[storage], self._offsets[storage] = name, offset
        self._alive.append(tensor)

    def _note_change(self, target: torch.Tensor) -> None:
        """Something is written, perhaps over a copy, or into a tensor that is yet to be copied.

        Nobody could follow either.
        """
        storage = target.untyped_storage().data_ptr()
        if name := self._copied.get(storage) or self._names.get(storage):
            self.changed.append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is _COPY:
            target, source = args[:2]
            storage = source.untyped_storage().data_ptr()
            name = self._names.get(storage)
            if name is not None and target.untyped_storage().data_ptr() not in self._names:
                target = target.detach()
                self._copied[target.untyped_storage().data_ptr()] = name
                source = source.broadcast_to(target.shape)
                offset = self._offsets[storage] + source.storage_offset()
                self.found.append((name, target, offset, source.shape, source.stride()))
            else:
                self._note_change(args[0])
            return args[0]
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            given = args[0].untyped_storage().data_ptr() in self._names
            if given or func not in _FILLS:  # a parameter's padding is filled
                self._note_change(args[0])
            return args[0]
        if func is _CAST or func in _SAME:
            storage = args[0].untyped_storage().data_ptr()
            if storage in self._names and func in _SAME:  # nobody writes to either
                return torch.ops.aten.alias.default(args[0])
            if storage in self._names and args[0].is_contiguous():
                dtype = (kwargs or {}).get("dtype") or args[0].dtype
                result = torch.empty(args[0].shape, dtype=dtype, device="cpu")  # as the whole one
                offset = self._offsets[storage] + args[0].storage_offset()
                self.mark(self._names[storage], result, offset)
                return result
        return func(*args, **(kwargs or {}))


class _ModelState:
    """What a model's modules hold before its loader runs, and must hold again after it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [
            (name, module, dict(vars(module)), dict(module._parameters), dict(module._buffers))
            for name, module in model.named_modules()
        ]
        self._data = [(parameter, parameter.data) for parameter in model.parameters()]

    def restore(self) -> tuple[dict[int, torch.Tensor], list[str]]:
        """Puts everything back.

        Returns:
            The parameters that were exchanged for new ones of the same shape, by the storage of
            the new one; and names of whatever else the loader kept.
        """
        new, kept = {}, []
        for name, module, attributes, parameters, buffers in self._modules:
            for which, old in (("_parameters", parameters), ("_buffers", buffers)):
                now = vars(module)[which]
                for key in {*now, *old}:
                    one, other = old.get(key), now.get(key)
                    if one is other:
                        continue
                    ours, theirs = (
                        None if t is None else (t.shape, t.dtype, t.stride(), type(t))
                        for t in (one, other)
                    )
                    if ours == theirs and isinstance(one, torch.nn.Parameter):
                        new[other.untyped_storage().data_ptr()] = one.detach()
                    else:
                        kept.append(f"{name}.{key}")
                now.clear()
                now.update(old)
            held = vars(module)
            kept += [
                f"{name}.{key}"
                for key, one in held.items()
                if isinstance(one, torch.Tensor) and one is not attributes.get(key)
            ]
            held.clear()
            held.update(attributes)
        for parameter, data in self._data:
            if parameter.data_ptr() != data.data_ptr():
                kept.append("the storage of a parameter")
                parameter.data = data
        return new, kept


def regions_of(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    dtype: torch.dtype,
    *,
    without_refits: str,
    published: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict,
) -> dict[str, list[Region]]:
    """Finds where a model's own loader puts tensors.

    Args:
        model: The engine's, on one worker; its ``load_weights`` takes names and tensors.
        specs: Of a checkpoint; only those that own their elements.
        dtype: Of the model.
        without_refits: How to build an engine that takes no refits, for errors.
        published: Gives such tensors the names of a checkpoint's files, perhaps part by part.

    Returns:
        Regions by name; none for what the loader ignores or another worker has.

    Raises:
        CapabilityError: The loader computes something of a tensor, or keeps something of it, so
            that it cannot be followed; or it does not take these tensors.
    """
    recorder, before = _Recorder(), _ModelState(model)

    whole = {}
    for spec in specs:
        # The kernel gives no memory to pages that are never touched.
        whole[spec.name] = torch.empty(spec.shape or (1,), dtype=dtype, device="cpu")
        recorder.mark(spec.name, whole[spec.name])
        whole[spec.name] = whole[spec.name].view(spec.shape)
    try:
        with torch.no_grad(), recorder:
            model.load_weights(iter(published(whole).items()))  # type: ignore[operator]
    except Exception as error:  # whatever loaders raise for names and shapes that they do not know
        raise CapabilityError(
            f"the engine's {type(model).__name__} takes no refit: its loader fails on the tensors "
            f"of transformers: {type(error).__name__}: {error}",
            fix=f"use another model; to generate without refits, {without_refits}",
            capability="refit",
        ) from error
    finally:
        new, kept = before.restore()
    if recorder.changed or kept:
        raise CapabilityError(
            f"the engine's {type(model).__name__} takes no refit: its loader "
            + (
                f"changes the values of {', '.join(recorder.changed[:_FEW])}"
                if recorder.changed
                else f"keeps copies of what it loads in {', '.join(kept[:_FEW])}"
            ),
            fix=f"use another model; to generate without refits, {without_refits}",
            capability="refit",
        )
    shapes = {spec.name: spec.shape for spec in specs}
    regions: dict[str, list[Region]] = {spec.name: [] for spec in specs}
    for name, found, offset, shape, stride in recorder.found:
        target, own = found, new.get(found.untyped_storage().data_ptr())
        if own is not None:
            target = own.as_strided(found.shape, found.stride(), found.storage_offset())
        if torch.promote_types(target.dtype, dtype) != target.dtype:
            raise CapabilityError(
                f"{name}: the engine keeps this tensor in {target.dtype}, which would round the "
                f"values of a model in {dtype}",
                fix=f"set torch_dtype to {str(target.dtype).removeprefix('torch.')!r}; to generate "
                f"without refits, {without_refits}",
                tensor=name,
            )
        rows, columns, width = _rectangle(shape, stride, math.prod(shapes[name][1:]))
        flat = None
        with suppress(RuntimeError):  # the target is no rectangle
            flat = target.view(rows, columns) if rows else None
        if flat is None:
            raise CapabilityError(
                f"{name}: the engine stores the part {list(shape)} of {list(shapes[name])} in an "
                "order that refits do not support",
                fix="report it, with the name of the model; to generate without refits, "
                f"{without_refits}",
                tensor=name,
            )
        regions[name].append(Region(flat, width, *divmod(offset, width)))
    return regions


def _rectangle(shape: tuple[int, ...], stride: tuple[int, ...], width: int) -> tuple[int, int, int]:
    """Rows, columns and width of a view, or zeros if it is no rectangle."""
    dims = [(n, s) for n, s in zip(shape, stride, strict=True) if n != 1]
    merged: list[tuple[int, int]] = []
    for n, s in dims:
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    if not merged:
        return 1, 1, width
    if merged[-1][1] != 1 or len(merged) > 2:
        return 0, 0, 0
    if len(merged) == 1:
        count = merged[0][0]
        return (count // width, width, width) if count % width == 0 else (1, count, width)
    return merged[0][0], merged[1][0], merged[0][1]
