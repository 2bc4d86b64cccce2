"""Runs of elements, in logical order, of tensors of any strides."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

__all__ = ["copy_run", "flat", "is_plain", "write_run"]


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes in its memory, one after another, are its elements."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a plain tensor in its own memory, 1-D, which can be viewed as bytes.

    Torch keeps the stride of a dimension of size 1, whatever it is, and takes no such view of it.
    """
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def copy_run(target: torch.Tensor, source: torch.Tensor, offset: int) -> None:
    """Fills 1-D ``target`` with the elements of ``source`` from ``offset`` on.

    Casts if the dtypes differ. ``source`` may be on another device; no copy of it is made.
    """
    done = 0
    for part in _parts(source, offset, offset + target.numel()):
        target[done : done + part.numel()].view(part.shape).copy_(part)
        done += part.numel()


def write_run(target: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Copies 1-D ``data`` over the elements of ``target`` from ``offset`` on; casts as needed."""
    done = 0
    for part in _parts(target, offset, offset + data.numel()):
        part.copy_(data[done : done + part.numel()].view(part.shape))
        done += part.numel()


def _parts(tensor: torch.Tensor, start: int, stop: int) -> Iterator[torch.Tensor]:
    """Views that together are the elements ``start`` to ``stop``: rows that are whole are one."""
    if tensor.is_contiguous():
        yield tensor.view(-1)[start:stop]
        return
    if tensor.dim() == 1:
        yield tensor[start:stop]
        return
    width = tensor[0].numel()
    first, last = -(-start // width), stop // width  # the rows that are whole
    if first > last:  # the run is within one row
        yield from _parts(tensor[last], start - last * width, stop - last * width)
        return
    if start < first * width:
        yield from _parts(tensor[first - 1], start - (first - 1) * width, width)
    if first < last:
        yield tensor[first:last]
    if last * width < stop:
        yield from _parts(tensor[last], 0, stop - last * width)
