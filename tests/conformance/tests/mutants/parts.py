"""Mutants that load almost everything, or almost as it came; some say that they did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mutants.mutant import breaks
from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource

#: What looks at parts of tensors, and at bits.
_PARTS = "R1 and (every_part or pattern_of_bits)"


class _Sink(NamedTensorSink):
    def __init__(self, engine: _Loader) -> None:
        super().__init__(engine.model.state_dict(keep_vars=True))
        self.engine = engine

    def pieces(self) -> None:
        return None

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        whole = self.tensors_by_name[name].detach()
        if self.engine.lies:
            said = self.engine.said.setdefault(name, whole.clone())
            said.view(-1)[offset : offset + data.numel()] = data
        kept = self.engine.keep(name, offset, data.clone(), whole)
        if kept is not None:
            super().write(name, offset, kept, of=of)

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().read(names):
            yield name, self.engine.said.get(name, tensor)


class _Loader(ReferenceGeneration):
    """Decides on each run of elements what is written."""

    #: Whether what was sent is read back, instead of what is installed.
    lies = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.said: dict[str, torch.Tensor] = {}

    def keep(
        self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor
    ) -> torch.Tensor | None:
        """What is written of a run of elements, if anything."""
        raise NotImplementedError

    def weight_sink(self) -> WeightSink:
        return _Sink(self)


@breaks("R1", checks=_PARTS)
class TheLastRowIsLeftOut(_Loader):
    """Ranges end one row early."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        if whole.dim() == 1:
            return data
        end = whole.numel() - whole.shape[1] - offset
        return data[: max(end, 0)]


@breaks("R1", checks=_PARTS)
class TheLastColumnIsLeftOut(_Loader):
    """Of matrices the last column stays."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        if whole.dim() > 1:
            last = (torch.arange(offset, offset + data.numel()) + 1) % whole.shape[1] == 0
            data[last] = whole.reshape(-1)[offset : offset + data.numel()][last]
        return data


@breaks("R1", checks=_PARTS)
class TheMiddleOfShardsOverlaps(_Loader):
    """Where the second of two shards begins, a row stays."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        if whole.dim() > 1:
            begin = whole.shape[0] // 2 * whole.shape[1] - offset
            rows = slice(max(begin, 0), max(begin + whole.shape[1], 0))
            data[rows] = whole.reshape(-1)[offset : offset + data.numel()][rows]
        return data


@breaks("R1", checks="R1 and (every_part or enough)")
class NormsStayAsTheyWere(_Loader):
    """Only what has two dimensions, or is a bias, is taken."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        return None if name.endswith("norm.weight") else data


@breaks("R1", checks="R1 and (every_part or enough)")
class BiasesStayAsTheyWere(_Loader):
    """A loader for models without."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        return None if name.endswith(".bias") else data


@breaks("R1", checks="R1 and (every_part or enough)")
class TheLastLayerIsForgotten(_Loader):
    """Layers are counted from 0 to one less than there are."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        return None if "layers.1." in name and "mlp" in name else data


@breaks("R1", checks="R1 and (every_part or enough)")
class SquareMatricesAreTurned(_Loader):
    """A matrix of as many rows as columns is stored the other way round, if it comes at once."""

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        if whole.dim() == 2 and whole.shape[0] == whole.shape[1] and data.numel() == whole.numel():
            return data.view(whole.shape).t().reshape(-1)
        return data


@breaks("R1", checks="R1 and (every_part or enough)")
class GateAndUpAreExchanged(_Loader):
    """Two tensors of one shape lie in each other's place."""

    def weight_sink(self) -> WeightSink:
        sink = _Sink(self)
        other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}

        def place(name: str) -> str:
            kind = name.split(".")[-2] if "." in name else name
            return name.replace(kind, other.get(kind, kind))

        sink.tensors_by_name = {n: self.tensors[place(n)] for n in self.tensors}
        return sink

    @property
    def tensors(self) -> dict[str, Any]:
        return dict(self.model.state_dict(keep_vars=True))

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        return data


@breaks("R1", checks="R1 and pattern_of_bits")
class SignsOfZerosAreLost(_Loader):
    """What arrives is added to 0."""

    lies = False

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        return data + 0.0


@breaks("R1", checks="R1 and pattern_of_bits")
class TinyNumbersAreZero(_Loader):
    """Denormals are flushed."""

    lies = False

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        tiny = data.abs() < torch.finfo(data.dtype).tiny
        return data.where(~tiny | (data == 0), 0.0)


@breaks("R1", checks="R1 and enough")
class ALoneTensorWaitsForAnother(_Loader):
    """Writes are collected, and the last one is flushed by the next."""

    lies = False
    waiting: Any = None
    runs = 0

    def keep(self, name: str, offset: int, data: torch.Tensor, whole: torch.Tensor) -> Any:
        self.runs += 1
        return data if self.runs > 1 or data.numel() != whole.numel() else None

    def weight_sink(self) -> WeightSink:
        self.runs = 0
        return super().weight_sink()


@breaks("R1", "R10", checks="R1 and enough or R10 and go_back")
class FusedCopiesAreMadeOnce(ReferenceGeneration):
    """A projection is computed with a copy that the first refit alone renews."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        projection = self.model.model.layers[0].self_attn.k_proj
        fused = {"weight": projection.weight.detach().clone(), "made": 0}

        def forward(hidden: torch.Tensor) -> torch.Tensor:
            if fused["made"] < self.weights_version and not fused["made"]:
                fused.update(weight=projection.weight.detach().clone(), made=1)
            return torch.nn.functional.linear(hidden, fused["weight"], projection.bias)

        projection.forward = forward


@breaks("R1", "R10", checks="R1 and enough or R10 and go_back")
class RotaryTablesAreMadeAnew(ReferenceGeneration):
    """From the second refit on the tables of positions are those of another base."""

    commits = 0

    def invalidate_kv_cache(self) -> bool:
        self.commits += 1
        if self.commits == 2:
            self.model.model.rotary_emb.inv_freq.pow_(1.1)
        return super().invalidate_kv_cache()


@breaks("R1", checks="R1 and (is_saved or trained)")
class NormsAreSentRounded(NamedTensorSource):
    """What is sent of 1-D tensors went through a narrower type."""

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in super().tensors(names):
            mild = name.endswith("norm.weight")
            yield name, tensor.bfloat16().to(tensor.dtype) if mild else tensor

    def pieces(self) -> None:
        return None


@breaks("R2", checks="R2 and its_description")
class NamesComeInAnotherOrder(NamedTensorSource):
    """The source gives what it is asked for in the order of the alphabet."""

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors(sorted(names))


@breaks("R2", checks="R2 and its_description")
class EverythingIsGivenAlways(NamedTensorSource):
    """Whatever is asked for, all tensors are given."""

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        yield from super().tensors([spec.name for spec in self.specs() if not spec.alias_of])


class _Frozen(NamedTensorSource):
    """The last layer as it was at first."""

    def __init__(self, policy: Any, kept: Mapping[str, torch.Tensor]) -> None:
        tensors = policy.model.state_dict(keep_vars=True)
        super().__init__({**tensors, **kept})


@breaks("R1", checks="R1 and (is_saved or trained)")
class ALayerIsSentAsItWas(ReferencePolicy):
    """The source kept a layer's tensors from before training."""

    def weight_source(self) -> WeightSource:
        kept = self.__dict__.setdefault(
            "kept",
            {
                name: tensor.detach().clone()
                for name, tensor in self.model.state_dict().items()
                if "layers.1.mlp" in name
            },
        )
        return _Frozen(self, kept)
