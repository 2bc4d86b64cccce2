"""Mutants that are right the first time, or in one state, and wrong afterwards."""

from __future__ import annotations

import concurrent.futures
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from unittest import mock

import torch

from mutants.mutant import breaks
from rl_backends.tensors import NamedTensorSink
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.errors import RLError
from rl_core.interfaces import TensorSpec, WeightSink, WeightSource
from rl_core.weights.data.digests import DigestTable

_SEQUENCES = "an_engine_accepts"


class _Remembering(NamedTensorSink):
    def __init__(self, tensors: Any, seen: set[tuple[str, int]]) -> None:
        super().__init__(tensors)
        self.seen = seen

    def pieces(self) -> None:
        return None

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        if (name, offset) not in self.seen:
            super().write(name, offset, data, of=of)
            self.seen.add((name, offset))

    def finish(self, version: int) -> None:
        if version == 1:
            self.seen.clear()


@breaks("R6", checks=_SEQUENCES)
class TheThirdRefitIsTakenForTheSecond(ReferenceGeneration):
    """Pieces that came once are not written again, and the first refit alone forgets them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seen: set[tuple[str, int]] = set()

    def weight_sink(self) -> WeightSink:
        return _Remembering(self.model.state_dict(keep_vars=True), self.seen)


@breaks("R5", "R6", checks="R5 or an_engine_accepts")
class TicketsAreTakenOnce(ReferenceGeneration):
    """The second ticket brings weights into tensors that nobody computes with."""

    tickets = 0
    by_ticket = False

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        self.by_ticket, before = True, self.weights_version
        try:
            return super().update_weights(ipc_handles)
        finally:
            self.by_ticket = False
            self.tickets += self.weights_version != before

    def weight_sink(self) -> WeightSink:
        tensors = self.model.state_dict(keep_vars=True)
        if self.by_ticket and self.tickets:
            tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        return NamedTensorSink(tensors)


@breaks("G13", "R6", checks="G13 or an_engine_accepts")
class WakingLoadsTheCheckpoint(ReferenceGeneration):
    """What comes back from a sleep is what the engine began with."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.first = {n: t.clone() for n, t in self.model.state_dict().items()}

    def on_wake(self, tags: frozenset[str]) -> None:
        if "weights" in tags:
            self.model.load_state_dict(self.first)


@breaks("G13", "R6", checks="G13 or an_engine_accepts")
class TheFirstSleepIsRemembered(ReferenceGeneration):
    """The copy that weights sleep in is made once."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        if "weights" in tags and "asleep" not in self.__dict__:
            self.__dict__["asleep"] = {n: t.clone() for n, t in self.model.state_dict().items()}

    def on_wake(self, tags: frozenset[str]) -> None:
        if "weights" in tags and "asleep" in self.__dict__:
            self.model.load_state_dict(self.__dict__["asleep"])


@breaks("G13", checks="G13")
class AsleepTheVersionIsForgotten(ReferenceGeneration):
    """Whoever asks a sleeping engine for its version hears 0."""

    @property
    def weights_version(self) -> int:
        return self._receiver.version if self._awake else 0


class _Cached(ReferenceGeneration):
    """Logits of known prefixes are kept."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cache: dict[tuple[int, ...], torch.Tensor] = {}
        self.commits = 0

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        self.cache |= super().next_logits(prefixes - self.cache.keys())
        return {ids: self.cache[ids] for ids in prefixes}

    def invalidate_kv_cache(self) -> bool:
        self.cache.clear()
        return True


@breaks("R10", "R6", "R1", checks="R10 or an_engine_accepts or R1 and enough")
class TheCacheIsDroppedOnce(_Cached):
    """The first refit drops the cache of prefixes, the second does not."""

    def invalidate_kv_cache(self) -> bool:
        self.commits += 1
        return super().invalidate_kv_cache() if self.commits == 1 else True


@breaks("R11", checks="R11")
class TheCacheIsDroppedBeforehand(_Cached):
    """The cache goes when a refit begins; what is served meanwhile fills it again."""

    def invalidate_kv_cache(self) -> bool:
        return True

    def receive_weights(self, *args: Any, **kwargs: Any) -> Any:
        self.cache.clear()
        return super().receive_weights(*args, **kwargs)


@breaks("R6", "R5", checks="R5 or an_engine_accepts")
class TicketsKeepTheCache(_Cached):
    """The older methods do not know of the cache."""

    older = False

    def invalidate_kv_cache(self) -> bool:
        return self.older or super().invalidate_kv_cache()

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        self.older = True
        try:
            return super().update_weights(ipc_handles)
        finally:
            self.older = False


@breaks("R1", "R10", "R6", checks="R10 or an_engine_accepts or R1 and enough")
class SmallRefitsKeepTheCache(_Cached):
    """The cache is dropped where the embeddings changed."""

    known = 0.0

    def invalidate_kv_cache(self) -> bool:
        now = float(self.model.get_input_embeddings().weight[7].detach().double().sum())
        changed, self.known = now != self.known, now
        return super().invalidate_kv_cache() if changed else True


@breaks("R8", checks="R8 and torn")
class ASleepMendsTornWeights(ReferenceGeneration):
    """Waking up, the engine calls its weights whole."""

    def on_wake(self, tags: frozenset[str]) -> None:
        self._receiver.torn = False  # type: ignore[attr-defined]


@breaks("R8", checks="R8 and torn")
class PreparingMendsTornWeights(ReferenceGeneration):
    """A refit that is announced counts as done."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        super().prepare_refit_info(state_dict_info)
        self._receiver.torn = False  # type: ignore[attr-defined]


@breaks("R8", checks="R8 and torn_state")
def what_was_overwritten_is_still_held() -> AbstractContextManager[Any]:
    """After a failure an engine says that it holds what the refit had begun to write over."""
    return mock.patch.object(DigestTable, "forget", return_value=None)


@breaks("R10", checks="R10")
class TheVersionNeverGoesBack(ReferenceGeneration):
    """A smaller number than the last is not taken."""

    largest = 0

    @property
    def weights_version(self) -> int:
        self.largest = max(self.largest, self._receiver.version)
        return self.largest


@breaks("G15", checks="G15 or G16")
class StreamedRowsSayTheVersionOfNow(ReferenceGeneration):
    """A row carries the version that the engine has when somebody takes it."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        rows = [row async for row in super().generate_async(data, greedy)]
        first = True
        for index, row in rows:
            if not first:
                await _until_it_moves(self)
            first = False
            row["weights_version"] = torch.tensor([self.weights_version])
            yield index, row


@breaks("G15", checks="G15 or G16")
class StreamedRowsSayTheOriginOfNow(ReferenceGeneration):
    """A row says whose version it is when somebody takes it."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        rows = [row async for row in super().generate_async(data, greedy)]
        for number, (index, row) in enumerate(rows):
            if number:
                await _until_it_moves(self)
            row["weights_origin"] = torch.tensor([self.weights_origin])
            yield index, row


async def _until_it_moves(engine: ReferenceGeneration) -> None:
    import asyncio

    before = engine.weights_version
    for _ in range(20):
        if engine.weights_version != before:
            return
        await asyncio.sleep(0.01)


@breaks("G14", checks="G14 and (ends_a_refit or shutting_down_is or generating)")
class ShutdownLetsARefitGoOn(ReferenceGeneration):
    """A refit that is under way is not told, and commits into an engine that is gone."""

    def shutdown(self) -> bool:
        if not self._ended:
            self._closed = self._ended = True
            pool = concurrent.futures.ThreadPoolExecutor(1)
            pool.submit(self._receiver.close) if not self._receiver.jobs else None  # type: ignore[attr-defined]
            pool.shutdown(wait=True)
        return True


@breaks("R2", checks="R2")
class ARefusedDescriptionCostsADelta(ReferenceGeneration):
    """What the engine holds is forgotten before the manifest is compared."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        try:
            super().prepare_refit_info(state_dict_info)
        except RLError:
            self._receiver.forget()  # type: ignore[attr-defined]
            raise


@breaks("R5", checks="R5")
class ARefusedTicketTears(ReferenceGeneration):
    """The weights count as torn before anybody has looked at the ticket."""

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        self._receiver.torn = True  # type: ignore[attr-defined]
        return super().update_weights(ipc_handles)


@breaks("R10", checks="R10 and (refused or use_no_version or given)")
class RefusedRefitsAreCounted(ReferencePolicy):
    """A version is used up by a call whose options are wrong."""

    def send_weights(self, *args: Any, **kwargs: Any) -> list[Any]:
        try:
            return super().send_weights(*args, **kwargs)
        except RLError:
            self._sender.version += 1
            raise


@breaks("R13", "R1", checks="R13 or R1 and committed")
class EnginesShareASink(ReferenceGeneration):
    """Where to write is kept with the class."""

    sinks: ClassVar[dict[int, WeightSink]] = {}

    def weight_sink(self) -> WeightSink:
        count = len(list(self.model.parameters()))
        return self.sinks.setdefault(count, super().weight_sink())


@breaks("R13", checks="R13")
class TrainersShareASource(ReferencePolicy):
    """Which tensors to send is kept with the class, as long as nobody trains."""

    last: ClassVar[dict[int, ReferencePolicy]] = {}

    def weight_source(self) -> WeightSource:
        other = self.last.setdefault(self.steps, self)
        return super().weight_source() if other is self else other.weight_source()
