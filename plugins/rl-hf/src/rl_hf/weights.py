"""A transformers model as the two ends of a refit: a source and a sink of named tensors.

Names are those of the model's state dict, which for dense models are the names in its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import LifecycleError, RefitProtocolError
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

__all__ = [
    "ModelWeightSink",
    "ModelWeightSource",
    "SteadyWeightSource",
    "device_of",
    "model_tensors",
    "tensor_specs",
    "write_run",
]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers under their names; tied names share one object."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def tensor_specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    """Describes named tensors; the later names of a tied tensor are aliases of the first.

    Two names are tied when they name the same object or the same view of the same memory.
    """
    first: dict[object, str] = {}
    specs = []
    for name, tensor in tensors.items():
        owner = first.setdefault(_identity(tensor), name)
        specs.append(
            TensorSpec(
                name=name,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                role="parameter" if isinstance(tensor, torch.nn.Parameter) else "buffer",
                alias_of=None if owner == name else owner,
                trainable=tensor.requires_grad,
            )
        )
    return specs


def device_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """Where a model is; of one that is spread over devices, where it begins."""
    return str(next((tensor.device for tensor in tensors.values()), "cpu"))


def _identity(tensor: torch.Tensor) -> object:
    if tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class ModelWeightSource(WeightSource):
    """The tensors of a model as they are now, without copies.

    Args:
        model: Any module; its parameters and persistent buffers are offered.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = model_tensors(model)
        self.device = device_of(self._tensors)

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return tensor_specs(self._tensors)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name in names:
            yield name, self._tensors[name].detach()

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        return _if_contiguous(self._tensors)

    def confirm(self) -> None:
        """A module does not know of its changes; :class:`SteadyWeightSource` does."""


class SteadyWeightSource(WeightSource):
    """Another source, as long as the weights behind it stay the same.

    Args:
        source: Gives the tensors.
        changes: Counts how often a change of the weights began or ended; odd during one.
    """

    def __init__(self, source: WeightSource, changes: Callable[[], int]) -> None:
        self.device = source.device
        self._source = source
        self._changes = changes
        self._before = changes()

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._source.specs()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`.

        Raises:
            LifecycleError: The weights changed since this source was made.
        """
        for name, tensor in self._source.tensors(names):
            self._check(f", at {name}")
            yield name, tensor
            self._check(f", at {name}")

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        return self._source.persistent()

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._check()
        self._source.confirm()

    def _check(self, place: str = "") -> None:
        if self._changes() != self._before or self._before % 2:
            raise LifecycleError(
                f"the policy's weights changed during a refit{place}",
                fix="wait for the refit's futures before training, scoring the reference or "
                "loading a checkpoint",
            )


class ModelWeightSink(WeightSink):
    """Writes a refit into a model's parameters and persistent buffers, in place.

    Storage, strides and ties stay as they are, so whoever holds a parameter sees its new values.
    A float tensor of another float dtype is cast to the model's; nothing else is converted.

    Args:
        model: Any module.
    """

    casts = True

    def __init__(self, model: nn.Module) -> None:
        self._tensors = model_tensors(model)
        self.device = device_of(self._tensors)

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return tensor_specs(self._tensors)

    @torch.no_grad()
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`.

        Raises:
            RefitProtocolError: The run does not fit the tensor, or its dtype cannot be cast.
        """
        target = self._tensors[name].detach()
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

    def targets(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSink.targets`."""
        return _if_contiguous(self._tensors)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        for name in names:
            yield name, self._tensors[name].detach()


def _if_contiguous(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
    return tensors if all(tensor.is_contiguous() for tensor in tensors.values()) else None


def write_run(target: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """Copies 1-D ``data`` over elements ``offset...`` of ``target`` in its logical order.

    ``target`` may have any strides; no temporary of its size is made.
    """
    count = data.numel()
    if count == 0:
        return
    if target.is_contiguous():
        target.view(-1)[offset : offset + count].copy_(data)
    elif target.dim() == 1:
        target[offset : offset + count].copy_(data)
    else:
        _write_rows(target, offset, data)


def _write_rows(target: torch.Tensor, offset: int, data: torch.Tensor) -> None:
    """A run is the end of one row, some whole rows, and the start of another."""
    width = target[0].numel()
    row, within = divmod(offset, width)
    if within:
        head = min(width - within, data.numel())
        write_run(target[row], within, data[:head])
        data, row = data[head:], row + 1
    whole = data.numel() // width
    if whole:
        rows = target[row : row + whole]
        rows.copy_(data[: whole * width].view(rows.shape))
    write_run(target[min(row + whole, len(target) - 1)], 0, data[whole * width :])
