"""Named tensors as the two ends of a refit, and how tensors are described.

For trainers and engines with their weights in torch tensors of this process. Others (weights in
parts, in other processes, in other formats) implement :class:`~rl_core.interfaces.WeightSource` or
:class:`~rl_core.interfaces.WeightSink` themselves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import RefitProtocolError
from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource
from rl_core.weights.data.runs import write_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from torch import nn

__all__ = [
    "NamedTensorSink",
    "NamedTensorSource",
    "dtype_name",
    "module_tensors",
    "same_bytes",
    "tensor_specs",
    "whole_pieces",
]


#: By size, dtypes as which elements are compared.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their names; tied names share one object."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same bytes.

    With ``torch.equal`` no NaN would be what it was, and 0.0 would be -0.0.
    """
    return torch.equal(*(t.view(_INTEGERS[t.element_size()]) for t in (one, other)))


def dtype_name(dtype: torch.dtype) -> str:
    """What a :class:`~rl_core.interfaces.TensorSpec` calls a dtype, such as ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Describes named tensors in their order.

    A tensor is an alias of the first one before it that is the same tensor object, or the same view
    of the same memory: equal device, address, shape, strides and dtype, and both or none of them
    conjugated or negated when they are read. Nothing else is an alias:

    - A view of the same memory with another shape, strides or dtype, or that overlaps it, is a
      separate tensor. A refit sends what it shows, too, which agrees with what it overlaps.
    - An empty tensor, a tensor on the meta device and a wrapper without an address have no memory
      to share, so that only the same object counts. For a model on the meta device, keep its
      parameters as they are (``state_dict(keep_vars=True)``): ties are lost in detached ones.
    """
    first: dict[object, str] = {}
    specs = []
    for name, tensor in tensors.items():
        address = 0 if tensor.is_meta or not tensor.numel() else tensor.data_ptr()
        bits = tensor.is_conj(), tensor.is_neg()
        view = (tensor.device, address, tensor.shape, tensor.stride(), tensor.dtype, bits)
        owner = first.setdefault(view if address else id(tensor), name)
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=dtype_name(tensor.dtype),
                role="parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer",
                alias_of=None if owner == name else owner,
                trainable=tensor.requires_grad,
            )
        )
    return specs


def whole_pieces(tensors: Mapping[str, torch.Tensor]) -> list[Piece]:
    """Whole tensors as the pieces of a source or a sink."""
    return [Piece.whole(name, tensor) for name, tensor in tensors.items()]


class _NamedTensors:
    """What both ends have in common; ``device`` is where the first tensor is."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors_by_name = tensors
        self.device = next((str(tensor.device) for tensor in tensors.values()), "cpu")

    def specs(self) -> Sequence[TensorSpec]:
        """The tensors as :func:`tensor_specs` describes them."""
        return tensor_specs(self.tensors_by_name)


class NamedTensorSource(_NamedTensors, WeightSource):
    """Tensors of this process as they are now, without copies; engines may read them in place.

    Args:
        tensors: By name, the same objects as long as the model lives; any strides; such as
            those of :func:`module_tensors`.
    """

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name in names:
            yield name, self.tensors_by_name[name].detach()

    def pieces(self) -> Sequence[Piece] | None:
        """See :meth:`WeightSource.pieces`."""
        return whole_pieces(self.tensors_by_name)

    def confirm(self) -> None:
        """Tensors do not know of their changes; :class:`PolicyBackend` counts them."""


class NamedTensorSink(_NamedTensors, WeightSink):
    """Writes a refit into tensors of this process, in place.

    Storage, strides and ties stay as they are, so code that holds a tensor sees its new values. A
    float tensor of another float dtype is cast; nothing else is converted.

    Args:
        tensors: By name, the same objects as long as the model lives; any strides; such as
            those of :func:`module_tensors`.
    """

    casts = True

    @torch.no_grad()
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`.

        Raises:
            RefitProtocolError: The run does not fit the tensor, or its dtype cannot be cast.
        """
        target = self.tensors_by_name[name].detach()
        if tuple(target.shape) != tuple(of.shape) or offset + data.numel() > target.numel():
            raise RefitProtocolError(
                f"{name}: elements {offset} to {offset + data.numel()} of shape {list(of.shape)} "
                f"do not fit the model's shape {list(target.shape)}",
                phase="TRANSFER",
            )
        castable = target.is_floating_point() and data.is_floating_point()
        if data.dtype != target.dtype and not castable:
            raise RefitProtocolError(
                f"{name}: {data.dtype} cannot become the model's {target.dtype}", phase="TRANSFER"
            )
        write_run(target, offset, data)

    def pieces(self) -> Sequence[Piece] | None:
        """See :meth:`WeightSink.pieces`."""
        tensors = self.tensors_by_name
        return whole_pieces(tensors) if all(t.is_contiguous() for t in tensors.values()) else None

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        for name in names:
            yield name, self.tensors_by_name[name].detach()
