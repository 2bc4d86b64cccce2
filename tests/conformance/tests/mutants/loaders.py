"""Mutants whose weights are not what arrived, or not what was trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mutants.mutant import breaks
from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_conformance.faults import rounded
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource

#: Where an engine does not have what arrived, no clause after these can hold.
_FIRST = "(R1 or R2 and not (its_description or change_nothing)) and not (enough or every_part)"


class _OneByOne(NamedTensorSink):
    """Everything is written through :meth:`write`."""

    def pieces(self) -> None:
        return None


@breaks("R1", checks=_FIRST)
class WeightsAreCastDown(_OneByOne):
    """What a refit brings goes through a narrower type."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        data = rounded(data) if data.is_floating_point() else data
        super().write(name, offset, data, of=of)


@breaks("R7", checks="R7 or R1 and not pattern_of_bits")
class PiecesAreSwapped(_OneByOne):
    """Of a tensor that is split over buckets, the last piece comes first."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        mirrored = self.tensors_by_name[name].numel() - offset - data.numel()
        super().write(name, mirrored, data, of=of)


@breaks("R1", checks=_FIRST)
class ABufferIsReadBeforeItIsFilled(_OneByOne):
    """Of two pieces of one size the second gets the bytes of the first again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._before: dict[tuple[str, int], torch.Tensor] = {}

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        kind = (of.dtype, data.numel())
        stale, self._before[kind] = self._before.get(kind, data), data.clone()
        super().write(name, offset, stale, of=of)


@breaks("R1", checks=_FIRST)
class WeightsLieInABufferThatIsUsedAgain(_OneByOne):
    """The engine keeps a view of what arrived and no copy."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        whole: Any = self.tensors_by_name[name]
        if data.numel() == whole.numel() and data.dtype == whole.dtype:
            whole.data = data.view(whole.shape)
        else:
            super().write(name, offset, data, of=of)


@breaks("R1", checks=_FIRST)
class TheTiedTensorIsForgotten(ReferenceGeneration):
    """The engine says that its output head is tied, and has it twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tied = NamedTensorSink(self.model.state_dict(keep_vars=True)).specs()
        head: Any = self.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.detach().clone())

    def weight_sink(self) -> WeightSink:
        sink = NamedTensorSink(self.model.state_dict(keep_vars=True))
        sink.specs = lambda: self.tied  # type: ignore[method-assign]
        return sink


@breaks("R7", checks="R7 or R1 and not pattern_of_bits")
class OnlyTheFirstPieceIsWritten(_OneByOne):
    """Of a tensor that is split over buckets, the rest is dropped."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        if offset == 0:
            super().write(name, offset, data, of=of)


_ADAPTED = "model.layers.0.mlp.down_proj.weight"


class _WithoutAdapter(NamedTensorSource):
    """Gives the weights that the adapter stands beside."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], adapter: torch.Tensor) -> None:
        super().__init__(tensors)
        self._adapter = adapter

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors(names):
            own = name == _ADAPTED
            yield name, tensor - self._adapter if own else tensor

    def pieces(self) -> None:
        return None


@breaks("R1", checks="R1 and trained")
class TheAdapterStaysAtHome(ReferencePolicy):
    """What training adds beside the base weights is not sent along."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter = torch.zeros_like(self._adapted)

    @property
    def _adapted(self) -> torch.Tensor:
        return self.model.get_parameter(_ADAPTED).detach()  # type: ignore[no-any-return]

    def take_step(self, lr: float, scale: float) -> None:
        before = self._adapted.clone()
        super().take_step(lr, scale)
        self.adapter += self._adapted - before

    def weight_source(self) -> WeightSource:
        return _WithoutAdapter(self.model.state_dict(keep_vars=True), self.adapter)
