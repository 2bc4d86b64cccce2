"""Mutants that generate."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from mutants.mutant import breaks
from rl_conformance.faults import rounded
from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rl_backends import Completion, PromptBatch, SamplingParams


@breaks("G1")
class TheMaskIsIgnoredBesideLengths(ReferenceGeneration):
    """Where lengths are given nobody looks at the mask."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        if "input_lengths" in data:
            data = {name: value for name, value in data.items() if name != "attention_mask"}
        return super().generate(BatchedDataDict(data), greedy)


@breaks("G2")
class RowsArePaddedWithWhatStoodThere(ReferenceGeneration):
    """The right of short rows is not padding."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        ids[torch.arange(ids.shape[1]) >= ends[:, None]] = self.facts.vocab_size - 1
        return output


@breaks("G5")
class TruncatedIsNeverSaid(ReferenceGeneration):
    """Rows that ran out of room look as if they had stopped."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, truncated=False)


@breaks("G6")
class LongPromptsAreCut(ReferenceGeneration):
    """A prompt that does not fit the context loses its end in silence."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        limit = self.facts.max_model_len
        if "input_lengths" in data and data["input_ids"].shape[1] > limit:
            cut = {
                "input_ids": data["input_ids"][:, :limit],
                "input_lengths": data["input_lengths"].clamp(max=limit),
            }
            data = BatchedDataDict({**data, **cut})
        return super().generate(data, greedy)


@breaks("G4", "G11")
class LogprobsOffByOne(ReferenceGeneration):
    """Each token carries the log-prob of the one before it."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, logprobs=[done.logprobs[-1], *done.logprobs[:-1]])


@breaks("G4")
class LogprobsOfAnotherTemperature(ReferenceGeneration):
    """Processed log-probs forget the temperature."""

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        token, logprob = super().choose(logits, sampling, generator, seen)
        if sampling.greedy or sampling.logprobs_mode == "raw" or sampling.temperature == 1.0:
            return token, logprob
        plain = structs.replace(sampling, temperature=1.0, top_k=0, top_p=1.0)
        return token, float((logits / plain.temperature).log_softmax(-1)[token])


@breaks("G3", "G4", "G11")
class LostLogprobsAreZero(ReferenceGeneration):
    """An extraction error is swallowed and turned into 0.0."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, logprobs=[0.0] * len(done.logprobs))


@breaks("G9", "G17")
class SeedIsIgnored(ReferenceGeneration):
    """Every call draws afresh."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        seeds = torch.tensor([secrets.randbits(60) for _ in range(len(prompts))])
        return super().complete(replace(prompts, seeds=seeds), sampling)


@breaks("G9")
class EveryCallDrawsTheSame(ReferenceGeneration):
    """Rows that come one call at a time all draw from the stream of the first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._streams.take = lambda rows: 0  # type: ignore[method-assign]


@breaks("G8", "G11")
class PaddingShows(ReferenceGeneration):
    """Log-probs of a row depend on how much padding its neighbours bring it."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        padding = int(prompts.lengths.max()) - prompts.lengths
        for done in super().complete(prompts, sampling):
            shift = 0.01 * int(padding[done.row])
            yield structs.replace(done, logprobs=[value - shift for value in done.logprobs])


@breaks("G7")
class StopStringsAreMerged(ReferenceGeneration):
    """Stop strings of one row end every row."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        merged = tuple({string for strings in prompts.stop_strings for string in strings})
        return super().complete(replace(prompts, stop_strings=[merged] * len(prompts)), sampling)


@breaks("G10", "G4")
class TopKIsOffByOne(ReferenceGeneration):
    """One candidate too many."""

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        if sampling.top_k:
            sampling = structs.replace(sampling, top_k=sampling.top_k + 1)
        return super().choose(logits, sampling, generator, seen)


@breaks("G7")
class StopTokenIsDropped(ReferenceGeneration):
    """The stop token is cut off, as a text interface would."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            keep = len(done.token_ids) - (done.token_ids[-1] in sampling.stop_token_ids)
            yield structs.replace(
                done, token_ids=done.token_ids[:keep], logprobs=done.logprobs[:keep]
            )


@breaks("G11", "G4")
class WeightsAreRounded(ReferenceGeneration):
    """What is loaded of a layer went through a narrower type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for parameter in self.model.model.layers[0].mlp.parameters():
            parameter.data = rounded(parameter.data)


@breaks("G12", "G17")
class OtherKeysAreDropped(ReferenceGeneration):
    """Columns that the engine does not know do not come back."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        known = ("input_ids", "input_lengths", "attention_mask", "stop_strings", "seed")
        kept = {name: value for name, value in data.items() if name in known}
        return super().generate(BatchedDataDict(kept), greedy)


@breaks("G13")
class SleepIsForgetful(ReferenceGeneration):
    """What comes back from a sleep is not quite what went."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.mul_(1.1)


@breaks("G14")
class SleepersAnswer(ReferenceGeneration):
    """Nobody asks whether the engine is awake."""

    def _check_awake(self, method: str) -> None:
        pass

    def _check_serves(self, method: str) -> None:
        pass


@breaks("G15")
class VersionsAreCountedFromOne(ReferenceGeneration):
    """Rows say a version that the weights never had."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        output["weights_version"] = output["weights_version"] + 1
        return output


@breaks("G16")
class RowsWaitForEachOther(ReferenceGeneration):
    """Nothing is streamed before everything is done."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        rows = [row async for row in super().generate_async(data, greedy)]
        for row in sorted(rows, key=lambda one: one[0]):
            yield row


@breaks("G17")
class SamplesAreDealtInRounds(ReferenceGeneration):
    """The first samples of all prompts come first."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output, count = super().generate(data, greedy), self.sampling.num_generations
        if count == 1:
            return output
        order = torch.arange(output.size).view(-1, count).t().flatten()
        return output.select_indices(order)


@breaks("G11", "A3", checks="G11 and mistral or A3 and mistral")
class WindowsAreIgnored(ReferenceGeneration):
    """Every layer attends to all tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.config.sliding_window = None


@breaks("G11", checks="G11 and gemma2")
class LogitsHaveNoCap(ReferenceGeneration):
    """The soft cap of the last layer is left out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.config.final_logit_softcapping = None


@breaks("G11", checks="G11 and phi3")
class RowsGrowBeyondTheirFirstPositions(ReferenceGeneration):
    """Tokens come of frequencies that the longer row has not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.boundary = self.facts.max_model_len


@breaks("G11", checks="G11 and gpt_oss")
class SinksAreIgnored(ReferenceGeneration):
    """Attention gives all of its weight to tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, parameter in self.model.named_parameters():
            if name.endswith("sinks"):
                parameter.data.fill_(-1e4)


@breaks("G11", checks="G11 and deepseek_v3")
class ExpertsAreChosenWithoutTheirBias(ReferenceGeneration):
    """A buffer is taken for something that training alone needs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, buffer in self.model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.zero_()
