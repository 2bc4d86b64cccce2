"""Mutants: the reference with one thing broken, named after the bug they carry."""

from __future__ import annotations

import copy
import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.reference import reference_target
from rl_conformance.reference.generation import ReferenceGeneration, ScaledSink
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.reference.weights import DictSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_conformance.target import Target
    from rl_core.backends import Completion, PromptBatch, SamplingParams
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import TensorSpec, WeightSink, WeightSource


def target(
    generation: Any = ReferenceGeneration, policy: Any = ReferencePolicy, name: str = "reference"
) -> Target:
    """The mutant as a backend under test."""
    return reference_target(
        name=name,
        make_generation=generation.from_config,
        make_policy=policy.from_config,
    )


class LogprobsOffByOne(ReferenceGeneration):
    """Each token carries the log-prob of the one before it."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield replace(done, logprobs=[done.logprobs[-1], *done.logprobs[:-1]])


class LogprobsOfAnotherTemperature(ReferenceGeneration):
    """Processed log-probs forget the temperature."""

    def choose(
        self, logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
    ) -> tuple[int, float]:
        token, logprob = super().choose(logits, sampling, generator)
        if sampling.greedy or sampling.logprobs_mode == "raw" or sampling.temperature == 1.0:
            return token, logprob
        plain = replace(sampling, temperature=1.0, top_k=0, top_p=1.0)
        return token, float((logits / plain.temperature).log_softmax(-1)[token])


class LostLogprobsAreZero(ReferenceGeneration):
    """An extraction error is swallowed and turned into 0.0."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield replace(done, logprobs=[0.0] * len(done.logprobs))


class SeedIsIgnored(ReferenceGeneration):
    """Every call draws afresh."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        seeds = torch.tensor([secrets.randbits(60) for _ in range(len(prompts))])
        return super().complete(replace(prompts, seeds=seeds), sampling)


class PaddingShows(ReferenceGeneration):
    """Log-probs of a row depend on how much padding its neighbours bring it."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        padding = int(prompts.lengths.max()) - prompts.lengths
        for done in super().complete(prompts, sampling):
            shift = 0.01 * int(padding[done.row])
            yield replace(done, logprobs=[value - shift for value in done.logprobs])


class StopStringsAreMerged(ReferenceGeneration):
    """Stop strings of one row end every row."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        merged = tuple({string for strings in prompts.stop_strings for string in strings})
        return super().complete(replace(prompts, stop_strings=[merged] * len(prompts)), sampling)


class TopKIsOffByOne(ReferenceGeneration):
    """One candidate too many."""

    def choose(
        self, logits: torch.Tensor, sampling: SamplingParams, generator: torch.Generator
    ) -> tuple[int, float]:
        if sampling.top_k:
            sampling = replace(sampling, top_k=sampling.top_k + 1)
        return super().choose(logits, sampling, generator)


class StopTokenIsDropped(ReferenceGeneration):
    """The stop token is cut off, as a text interface would."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            keep = len(done.token_ids) - (done.token_ids[-1] in sampling.stop_token_ids)
            yield replace(done, token_ids=done.token_ids[:keep], logprobs=done.logprobs[:keep])


class VersionMovesAlthoughTheRefitFailed(ReferenceGeneration):
    """The version counts attempts, not commits."""

    attempts = 0

    @property
    def weights_version(self) -> int:
        return max(self.attempts, self._receiver.version)

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> Any:
        self.attempts += 1
        return super().update_weights_via_ipc_zmq(*args, **kwargs)


class TornWeightsAreServed(ReferenceGeneration):
    """Nobody asks whether the weights are whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._receiver.check = lambda: None  # type: ignore[method-assign]


class PrefixCacheOutlivesTheRefit(ReferenceGeneration):
    """Logits of known prefixes are kept over refits."""

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        cache = self.__dict__.setdefault("prefixes", {})
        cache |= super().next_logits(prefixes - cache.keys())
        return {ids: cache[ids] for ids in prefixes}


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

    def targets(self) -> None:
        return None


class OldWeightsAreNotGivenBack(ReferenceGeneration):
    """After a staged refit that failed late, the engine keeps what it has of the new weights."""

    def weight_sink(self) -> WeightSink:
        scales = {} if self.kv_scales is None else self.kv_scales
        return _OneWay(self.model.state_dict(keep_vars=True), scales)


class _Unscaled(ScaledSink):
    def scale_kv(self, scales: Mapping[str, float]) -> None:
        pass


class ScalesAreDropped(ReferenceGeneration):
    """Scales are accepted and never applied."""

    def weight_sink(self) -> WeightSink:
        sink = super().weight_sink()
        if isinstance(sink, ScaledSink):
            return _Unscaled(sink.tensors_by_name, sink.scales)
        return sink


class _Snapshot(DictSource):
    def __init__(self, tensors: Mapping[str, torch.Tensor], kept: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._kept = kept

    def persistent(self) -> Mapping[str, torch.Tensor]:
        if not self._kept:
            self._kept |= copy.deepcopy(dict(self.tensors_by_name))
        return self._kept


class EnginesReadACopy(ReferencePolicy):
    """What engines read in place is a copy that training does not reach."""

    def weight_source(self) -> WeightSource:
        kept = self.__dict__.setdefault("snapshot", {})
        return _Snapshot(self.model.state_dict(keep_vars=True), kept)


class TwoStatesAreOneVersion(ReferencePolicy):
    """Nobody asks whether the weights stayed the same while they were sent."""

    def weight_source(self) -> WeightSource:
        return DictSource(self.model.state_dict(keep_vars=True))


class ReferenceTrainsAlong(ReferencePolicy):
    """The reference is the policy itself."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference_model = self.model


class ScoresTheNextToken(ReferencePolicy):
    """Entry t scores token t+1."""

    def _score(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        return super()._score(model, data).roll(-1, 1)


class EvalModeTrains(ReferencePolicy):
    """eval_mode is not looked at."""

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, **sizes: Any
    ) -> dict[str, Any]:
        return super().train(data, loss_fn, False, **sizes)


class MicrobatchesAreAveraged(ReferencePolicy):
    """Each microbatch is normalised by its own tokens."""

    def _parts(self, batch: Any, size: int) -> Any:
        parts = list(super()._parts(batch, size))
        total = batch["token_mask"][:, 1:].sum()
        for part in parts:
            own = part["token_mask"][:, 1:].sum().clamp(min=1)
            part["token_mask"] = part["token_mask"] * total / own / len(parts)
            yield part


class NanReachesTheWeights(ReferencePolicy):
    """A gradient that is not finite is stepped with."""

    def _update(self) -> float:
        self.optimizer.step()
        return 1.0
