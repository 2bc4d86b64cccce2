"""Which elements of a checkpoint's tensor an engine's own loader puts where.

Engines fuse tensors (query, key and value into one), shard them over workers and pad them; their
loaders know how. So the model's ``load_weights`` runs once over tensors without contents, under a
dispatch mode that writes nothing and records every copy into a parameter. The records serve both
ways: to write, and to read back.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rl_backends.engine.regions import Region, Step
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import nn

    from rl_core.interfaces import TensorSpec

__all__ = ["regions_of"]

_FEW = 5
_COPY = torch.ops.aten.copy_.default
#: What makes a tensor with other storage but the same contents; the first also of another dtype.
_SAME = {
    torch.ops.aten._to_copy.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.contiguous.default,
}
_JOIN = torch.ops.aten.cat.default
_EACH, _DRAWN = torch.Tag.pointwise, torch.Tag.nondeterministic_seeded
#: Of a part of a whole tensor, the first element's index, and for each dimension sizes and strides
#: of what it is split into.
_Part = tuple[int, list[list[tuple[int, int]]]]
#: Address, shape and strides of a tensor.
_View = tuple[int, tuple[int, ...], tuple[int, ...]]
#: What loaders fill padding with.
_FILLS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


class _Origin(NamedTuple):
    """Which elements of a whole tensor another one without gaps has, or what is computed of them.

    Attributes:
        name: Of the whole tensor.
        first: The index of the first element in the flattened whole tensor.
        sizes: The other tensor's shape, perhaps with dimensions split, in the order of its memory.
        strides: By how much the index in the whole tensor grows along each of them.
        steps: What was done to each element.
        copy: Which copy it was computed of, if it was one.
    """

    name: str
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    steps: tuple[Step, ...] = ()
    copy: _View | None = None

    def part(self, view: torch.Tensor) -> _Part | None:
        """Finds the elements of a view of the other tensor in the whole one.

        Returns:
            The index of the view's first element, and for each dimension of the view sizes and
            strides of what it is split into; None if the view is not of that form.
        """
        first, room, places = self.first, [], []
        offset, place = view.storage_offset(), 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            index = offset // place % size
            first += index * stride
            places.append((place, size, stride))
            room.append(size - 1 - index)
            place *= size
        dims: list[list[tuple[int, int]]] = []
        for size, step in zip(view.shape, view.stride(), strict=True):
            parts: list[tuple[int, int]] = []
            left = size if step else 1
            for number, (place, most, stride) in enumerate(places):
                times, rest = divmod(step * (size // left), place)
                if left == 1 or rest or times >= most:
                    continue
                count = min(left, (most - 1) // times + 1)
                if left % count or (count < left and most % times):
                    return None
                room[number] -= (count - 1) * times
                parts.insert(0, (count, times * stride))
                left //= count
            if left > 1 or (size > 1 and not parts):
                return None
            dims.append(parts or [(1, 1)])
        return (first, dims) if min(room, default=0) >= 0 else None


class _Copy(NamedTuple):
    """A copy of a marked tensor.

    Attributes:
        name: Of the whole tensor.
        target: Into what.
        part: Which of its elements; None if that was not followed.
        steps: What was done to each of them.
    """

    name: str
    target: torch.Tensor
    part: _Part | None
    steps: tuple[Step, ...]

    def region(self) -> Region | None:
        """Where the engine keeps these elements."""
        if self.part is None:
            return None
        shape, places, strides = [], [], []
        for splits, place in zip(self.part[1], self.target.stride(), strict=True):
            inner = 1
            for size, stride in reversed(splits):
                shape.append(size)
                places.append(place * inner)
                strides.append(stride)
                inner *= size
        target = self.target.as_strided(shape, places, self.target.storage_offset())
        return Region.of(target, self.part[0], strides)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records copies of marked tensors into others, and writes nothing.

    Attributes:
        found: Each copy, by its target.
        changed: Names of tensors that the loader changed, or overwrote a copy of.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[_View, _Copy] = {}
        self.changed: list[str] = []
        self._copied: dict[int, str] = {}
        self._origins: dict[int, _Origin] = {}
        self._joined: dict[int, tuple[Sequence[torch.Tensor], int]] = {}
        self._alive: list[torch.Tensor] = []

    def mark(self, tensor: torch.Tensor, origin: _Origin) -> None:
        """Has copies of a tensor recorded; it is kept, so that no other gets its address."""
        self._origins[tensor.untyped_storage().data_ptr()] = origin
        self._alive.append(tensor)

    def origin(self, tensor: torch.Tensor) -> _Origin | None:
        """Where the elements of a tensor come from, if it is marked."""
        return self._origins.get(tensor.untyped_storage().data_ptr())

    def _is_read(self, tensor: torch.Tensor) -> bool:
        """Whether its elements come from the checkpoint."""
        storage = tensor.untyped_storage().data_ptr()
        return storage in self._origins or storage in self._joined

    def _note_change(self, target: torch.Tensor) -> None:
        """Something is written, perhaps over a copy, or into a tensor that is yet to be copied.

        Nobody could follow either.
        """
        storage = target.untyped_storage().data_ptr()
        parts, _ = self._joined.get(storage, ((), 0))
        for origin in map(self.origin, (target, *parts)):
            if name := self._copied.get(storage) or (origin and origin.name):
                self.changed.append(name)

    def _join(self, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        """A tensor of marked ones, one behind the other."""
        shape = list(parts[0].shape)
        dim %= len(shape)
        shape[dim] = sum(part.shape[dim] for part in parts)
        whole = torch.empty(shape, dtype=parts[0].dtype, device="cpu")
        self._joined[whole.untyped_storage().data_ptr()] = parts, dim
        self._alive += [whole, *parts]
        return whole

    def _note_joined(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether a copy is of tensors that were joined, or of some of their rows and columns."""
        parts, dim = self._joined.get(source.untyped_storage().data_ptr(), ((), 0))
        if not parts:
            return False
        origins = [self._origins[part.untyped_storage().data_ptr()] for part in parts]
        box = _box_of(source, parts, dim) if source.shape == target.shape else None
        if box is None:
            self.changed += [origin.name for origin in origins]
            return True
        begin, start = 0, box[dim][0]
        end = start + box[dim][1]
        for part, origin in zip(parts, origins, strict=True):
            size = part.shape[dim]
            first, last = max(start, begin), min(end, begin + size)
            if first < last:
                piece = part.narrow(dim, first - begin, last - first)
                for other, (at, count) in enumerate(box):
                    piece = piece if other == dim else piece.narrow(other, at, count)
                self._note_copy(target.narrow(dim, first - start, last - first), piece, origin)
            begin += size
        return True

    def _note_copy(self, target: torch.Tensor, source: torch.Tensor, origin: _Origin) -> None:
        view = _view(target)
        if view == origin.copy:  # written over by what was computed of it
            part = self.found[view].part
        else:
            part = origin.part(source.broadcast_to(target.shape))
        self._copied[target.untyped_storage().data_ptr()] = origin.name
        self.found[view] = _Copy(origin.name, target.detach(), part, origin.steps)

    def _computed(
        self, tensor: torch.Tensor, step: Step, made: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """A tensor of what is computed of each element of a marked one, or of a copy."""
        origin, copy = self.origin(tensor), self.found.get(_view(tensor))
        if origin is not None:
            name, part, steps, view = origin.name, origin.part(tensor), origin.steps, origin.copy
        elif copy is not None:
            name, part, steps, view = copy.name, copy.part, copy.steps, _view(tensor)
        else:
            return None
        if part is None:
            self.changed.append(name)
            return None
        result = torch.empty_like(tensor, device="cpu", **made)  # as the whole one
        order = sorted(range(result.dim()), key=result.stride, reverse=True)
        splits = [split for dim in order for split in part[1][dim]]
        sizes, strides = zip(*splits, strict=True) if splits else ((), ())
        self.mark(result, _Origin(name, part[0], sizes, strides, (*steps, step), view))
        return result

    def _compute_in_place(self, tensor: torch.Tensor, step: Step) -> None:
        """Something is done to each element of a marked tensor, or of a copy."""
        origin, view = self.origin(tensor), _view(tensor)
        if origin is not None and tensor.numel() == math.prod(origin.sizes):
            self.mark(tensor, origin._replace(steps=(*origin.steps, step)))
        elif copy := self.found.get(view):
            self.found[view] = copy._replace(steps=(*copy.steps, step))
        else:
            self._note_change(tensor)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func is _COPY:
            origin = self.origin(args[1])
            if origin is not None and self.origin(args[0]) is None:
                self._note_copy(args[0], args[1], origin)
            elif not self._note_joined(args[0], args[1]):
                self._note_change(args[0])
            return args[0]
        alone = sum(isinstance(one, torch.Tensor) for one in (*args, *given.values())) == 1
        each = alone and _EACH in func.tags and _DRAWN not in func.tags
        if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
            if each and func not in _FILLS:
                self._compute_in_place(args[0], partial(_apply, func, args[1:], given))
            elif func not in _FILLS or self._is_read(args[0]):  # a parameter's padding is filled
                self._note_change(args[0])
            return args[0]
        found: torch.Tensor | None
        if func is _JOIN and all(map(self.origin, args[0])):
            found = self._join(*args)
        elif func in _SAME:
            made = {key: given[key] for key in ("dtype", "memory_format") if key in given}
            dtype = given.get("dtype") or args[0].dtype
            found = self._computed(args[0], partial(_cast, dtype), made)
        elif each and isinstance(args[0], torch.Tensor):
            step = partial(_apply, func, args[1:], given)
            meta = torch.empty(0, dtype=args[0].dtype, device="meta")
            found = self._computed(args[0], step, {"dtype": step(meta).dtype})
        else:
            found = None
        return func(*args, **given) if found is None else found


@contextmanager
def _in_this_thread() -> Iterator[None]:
    """Work that a loader hands to threads is done here: a mode sees its own thread alone.

    Other threads would write what the tensors without contents have.
    """

    def submit(pool: Any, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if threading.get_ident() != here:
            return before(pool, work, *args, **kwargs)
        done: Future[Any] = Future()
        done.set_result(work(*args, **kwargs))
        return done

    before, here = ThreadPoolExecutor.submit, threading.get_ident()
    ThreadPoolExecutor.submit = submit  # type: ignore[method-assign]
    try:
        yield
    finally:
        ThreadPoolExecutor.submit = before  # type: ignore[method-assign]


def _apply(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], x: torch.Tensor) -> Any:
    return func(x, *args, **kwargs)


def _cast(dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    return x.to(dtype)


def _box_of(
    view: torch.Tensor, parts: Sequence[torch.Tensor], dim: int
) -> list[tuple[int, int]] | None:
    """Which rows and columns of joined tensors a view has.

    Args:
        view: Of a tensor without gaps.
        parts: What was joined to it.
        dim: The dimension along which they follow each other.

    Returns:
        The first index and the size in each dimension; None if it is no such view.
    """
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    box, step = [], math.prod(shape)
    if view.dim() != len(shape) or not view.numel():
        return None
    for size, count, stride in zip(shape, view.shape, view.stride(), strict=True):
        step //= size
        first = view.storage_offset() // step % size
        if (count > 1 and stride != step) or first + count > size:
            return None
        box.append((first, count))
    return box


def _view(tensor: torch.Tensor) -> _View:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


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
        whole[spec.name] = torch.empty(spec.shape, dtype=dtype, device="cpu")
        recorder.mark(whole[spec.name], _Origin(spec.name, 0, (spec.numel,), (1,)))
    try:
        with torch.no_grad(), _in_this_thread(), recorder:
            given = published(whole)
            if recorder.changed or not all(map(recorder.origin, given.values())):
                given = whole
                recorder.changed.clear()
            model.load_weights(iter(given.items()))  # type: ignore[operator]
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
    regions: dict[str, list[Region]] = {spec.name: [] for spec in specs}
    for copy in recorder.found.values():
        name, region = copy.name, copy.region()
        if region is None:
            raise CapabilityError(
                f"{name}: the engine stores this tensor in an order that refits do not support",
                fix="report it, with the name of the model; to generate without refits, "
                f"{without_refits}",
                tensor=name,
            )
        target = region.target
        if (own := new.get(target.untyped_storage().data_ptr())) is not None:
            target = own.as_strided(target.shape, target.stride(), target.storage_offset())
        if torch.promote_types(target.dtype, dtype) != target.dtype:
            raise CapabilityError(
                f"{name}: the engine keeps this tensor in {target.dtype}, which would round the "
                f"values of a model in {dtype}",
                fix=f"set torch_dtype to {str(target.dtype).removeprefix('torch.')!r}; to generate "
                f"without refits, {without_refits}",
                tensor=name,
            )
        region = region._replace(target=target)
        if any(step.func is not _cast for step in copy.steps):
            plain = torch.zeros(target.shape, dtype=dtype, device=target.device)
            region = region._replace(steps=copy.steps, plain=plain)
        regions[name].append(region)
    return regions
