"""A plain module as source and sink of a refit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import LifecycleError
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["DictSink", "DictSource"]


def _specs(tensors: Mapping[str, torch.Tensor]) -> list[TensorSpec]:
    owners: dict[tuple[int, tuple[int, ...]], str] = {}
    specs = []
    for name, tensor in tensors.items():
        # Empty tensors all live at address 0 and are nobody's alias.
        key = (tensor.data_ptr(), tuple(tensor.shape))
        owner = owners.setdefault(key, name) if tensor.numel() else name
        dtype = str(tensor.dtype).removeprefix("torch.")
        alias = None if owner == name else owner
        specs.append(TensorSpec(name, tuple(tensor.shape), dtype, alias_of=alias))
    return specs


def _device_of(tensors: Mapping[str, torch.Tensor]) -> str:
    return next((str(tensor.device) for tensor in tensors.values()), "cpu")


def _if_contiguous(tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor] | None:
    return tensors if all(tensor.is_contiguous() for tensor in tensors.values()) else None


class DictSource(WeightSource):
    """Offers named tensors as they are; engines may read them in place.

    Args:
        tensors: By name, the same objects as long as they live.
        changes: Counts their changes; a refit in which it moves is not confirmed.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], changes: Callable[[], int] = lambda: 0
    ) -> None:
        self.tensors_by_name = tensors
        self.device = _device_of(tensors)
        self._changes, self._before = changes, changes()

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return _specs(self.tensors_by_name)

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name in names:
            yield name, self.tensors_by_name[name].detach()

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        return _if_contiguous(self.tensors_by_name)

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        if self._changes() != self._before:
            raise LifecycleError("the weights changed during a refit", fix="wait for its futures")


class DictSink(WeightSink):
    """Writes into named tensors in place, casting floats to their dtype."""

    casts = True

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors_by_name = tensors
        self.device = _device_of(tensors)

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return _specs(self.tensors_by_name)

    @torch.no_grad()
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        target = self.tensors_by_name[name].detach()
        whole = target.reshape(-1)
        whole[offset : offset + data.numel()] = data
        if not target.is_contiguous():
            target.copy_(whole.view(target.shape))

    def targets(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSink.targets`."""
        return _if_contiguous(self.tensors_by_name)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        for name in names:
            yield name, self.tensors_by_name[name].detach()
