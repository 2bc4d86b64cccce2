"""Mutants that take or give weights."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_backends import modules
from rl_backends.tensors import NamedTensorSink, NamedTensorSource, whole_pieces
from rl_conformance.reference.generation import ReferenceGeneration, ScaledSink
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.interfaces import Piece, TensorSpec, WeightSink, WeightSource
from rl_core.weights.data.digests import DIGEST_BYTES
from rl_core.weights.receiving.loading import Loader
from rl_core.weights.receiving.receiver import ReceiveJob
from rl_core.weights.transports.memory import SharedRegion


@breaks("R10", "R9", "R11", "R15")
class VersionMovesAlthoughTheRefitFailed(ReferenceGeneration):
    """A refit that fails moves the version, too."""

    failed = False

    @property
    def weights_version(self) -> int:
        return self._receiver.version + self.failed

    def receive_weights(self, *args: Any, **kwargs: Any) -> Any:
        [future] = super().receive_weights(*args, **kwargs)
        future.add_done_callback(self._note)
        return [future]

    def _note(self, future: Any) -> None:
        self.failed = future.exception() is not None


@breaks("R10")
class TheFirstTrainerIsTheOrigin(ReferenceGeneration):
    """Whose versions an engine has is asked once."""

    first = 0

    @property
    def weights_origin(self) -> int:
        self.first = self.first or self._receiver.origin
        return self.first


@breaks("G15", "R10", checks="G15 or R10")
class AnOriginIsForgottenWithEachRow(ReferenceGeneration):
    """Rows say a version, and not whose it is."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        output["weights_origin"].zero_()
        return output


@breaks("R8", "R15")
class TornWeightsAreServed(ReferenceGeneration):
    """Nobody asks whether the weights are whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver.check = lambda: None  # type: ignore[method-assign]


@breaks("R10", "R1", checks="R10 or R1 and trained_policy")
class PrefixCacheOutlivesTheRefit(ReferenceGeneration):
    """Logits of known prefixes are kept over refits."""

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        cache = self.__dict__.setdefault("prefixes", {})
        cache |= super().next_logits(prefixes - cache.keys())
        return {ids: cache[ids] for ids in prefixes}


@breaks("R4")
class InfoOfTheOlderSpellingIsLost(ReferenceGeneration):
    """update_weights_from_collective takes the trainer's description and does not look at it."""

    def update_weights_from_collective(self, info: Any = None, **options: Any) -> Any:
        return super().update_weights_from_collective(**options)


class _OneWay(ScaledSink):
    """Once told of a failure it takes nothing more."""

    failed = False

    def fail(self) -> None:
        self.failed = True

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        if not self.failed:
            super().write(name, offset, data, of=of)

    def pieces(self) -> None:
        return None


@breaks("R11")
class OldWeightsAreNotGivenBack(ReferenceGeneration):
    """After a staged refit that failed late, the engine keeps what it has of the new weights."""

    def weight_sink(self) -> WeightSink:
        scales = {} if self.kv_scales is None else self.kv_scales
        return _OneWay(self.model.state_dict(keep_vars=True), scales)


class _Unscaled(ScaledSink):
    def scale_kv(self, scales: Mapping[str, float]) -> None:
        pass


@breaks("R14")
class ScalesAreDropped(ReferenceGeneration):
    """Scales are accepted and never applied."""

    def weight_sink(self) -> WeightSink:
        sink = super().weight_sink()
        if isinstance(sink, ScaledSink):
            return _Unscaled(sink.tensors_by_name, sink.scales)
        return sink


class _Snapshot(NamedTensorSource):
    def __init__(self, tensors: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._kept = kept

    def pieces(self) -> Sequence[Piece]:
        if not self._kept:
            self._kept |= copy.deepcopy(dict(self.tensors_by_name))
        return whole_pieces(self._kept)


@breaks("R1", "R9", "R12")
class EnginesReadACopy(ReferencePolicy):
    """What engines read in place is a copy that training does not reach."""

    def weight_source(self) -> WeightSource:
        kept = self.__dict__.setdefault("snapshot", {})
        return _Snapshot(self.model.state_dict(keep_vars=True), kept)


@breaks("R9", "R5", checks="R9 and weights_that_change or R5 and mix")
class TwoStatesAreOneVersion(ReferencePolicy):
    """Nobody asks whether the weights stayed the same while they were sent."""

    def refit_source(self) -> WeightSource:
        return self.weight_source()


@breaks("R5")
class TheOlderSpellingSaysNothing(ReferenceGeneration):
    """update_weights does not say that it worked."""

    def update_weights(self, ipc_handles: dict[str, Any]) -> Any:
        super().update_weights(ipc_handles)


@breaks("R6", checks="R6 and stays_exact")
class ARefitLeavesAFileOpen(ReferenceGeneration):
    """Each refit takes a descriptor and never gives it back."""

    def receive_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("kept", []).append(os.open(os.devnull, os.O_RDONLY))
        return super().receive_weights(*args, **kwargs)

    def on_shutdown(self) -> None:
        for descriptor in self.__dict__.pop("kept", []):
            os.close(descriptor)
        super().on_shutdown()


@breaks("R6", checks="R6 and stays_exact")
class ARefitKeepsItsBuffer(ReferenceGeneration):
    """Each refit leaves 1 MiB behind: more than what an allocator has free, which would hide it."""

    def receive_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.__dict__.setdefault("kept", []).append(os.urandom(1 << 20))
        return super().receive_weights(*args, **kwargs)


@breaks("R12", checks="R12 or R1")
class ARefitTakesASecondCopy(ReferenceGeneration):
    """All weights are there twice for a moment, as where a dict of them is loaded at once."""

    def weight_sink(self) -> WeightSink:
        copy.deepcopy(self.model)
        return super().weight_sink()


@breaks("R12", checks="R12 or R1")
class ARefitKeepsASecondCopy(ReferenceGeneration):
    """The first refit makes a copy of all weights, and those after it use that."""

    def weight_sink(self) -> WeightSink:
        if "staging" not in self.__dict__:
            self.__dict__["staging"] = copy.deepcopy(self.model)
        return super().weight_sink()


@breaks("R9", checks="R9 and damaged")
def digests_are_not_compared() -> AbstractContextManager[Any]:
    """What arrives is written, whatever its digest."""
    return mock.patch.object(Loader, "load", _load_blindly)


@torch.no_grad()
def _load_blindly(loader: Any, index: int, digests: bytes) -> None:
    loader._touch()
    for step in loader._buckets.steps(index, verified=False):
        for write in step.writes:
            write()
    plan = loader._buckets.plan
    each = [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)]
    loader.table.add(plan.buckets[index], each, plan.block_bytes)


@breaks("R15", "R11")
def nothing_is_read_back() -> AbstractContextManager[Any]:
    """verify="installed" believes the loader."""
    return mock.patch.object(Loader, "check_installed", return_value=None)


@breaks("R13", checks="R13")
def engines_publish_when_they_have_all() -> AbstractContextManager[Any]:
    """An engine serves the new weights before it is known whether the others can."""
    honest = ReceiveJob._install

    def early(receiving: Any, offer: Any, digest: str) -> None:
        honest(receiving, offer, digest)
        receiving.endpoint.publish(offer.version, receiving.trainer.origin)

    return mock.patch.object(ReceiveJob, "_install", early)


@breaks("R3", checks="R3 or (R1 and not trained)")
def memory_is_called_as_its_owner_calls_it() -> AbstractContextManager[Any]:
    """The reference to shared memory means something in the trainer's process only."""
    honest = SharedRegion.create.__func__  # type: ignore[attr-defined]

    def create(cls: Any, *args: Any, **options: Any) -> Any:
        region = honest(cls, *args, **options)
        region.ref["path"] = region.ref["path"].replace(f"/proc/{os.getpid()}/", "/proc/self/")
        return region

    return mock.patch.object(SharedRegion, "create", classmethod(create))


class _Skipping(NamedTensorSink):
    """Takes no tensor in place, so that every one is written."""

    def pieces(self) -> None:
        return None


@breaks("R7", checks="R7 and serves and wide")
class TensorsEndAfter65536Elements(_Skipping):
    """The rest of a larger tensor stays as it was."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        super().write(name, offset, data[: max(0, 65536 - offset)], of=of)


@breaks("R1", checks="R1 and frozen")
def frozen_tensors_are_read_once() -> AbstractContextManager[Any]:
    """What is not trained is sent as the first refit found it."""
    read, kept = modules.whole_tensors, dict[str, torch.Tensor]()

    def read_once(model: Any, **options: Any) -> dict[str, torch.Tensor]:
        tensors = read(model, **options)
        for name, tensor in tensors.items():
            if "norm" in name and not tensor.requires_grad:
                tensors[name] = kept.setdefault(name, tensor.clone())
        return tensors

    return mock.patch.object(modules, "whole_tensors", read_once)


@breaks("R7", checks="R7 and serves and deepseek_v3")
class BuffersAreNotWritten(_Skipping):
    """A refit is of parameters."""

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        if of.role != "buffer":
            super().write(name, offset, data, of=of)
