"""Mutants at an edge, and mutants that take a key and do not do what it says."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs

from mutants.mutant import breaks
from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.batch import BatchedDataDict

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_backends import Completion, PromptBatch, SamplingParams

_CHOICES = "(G4 or G10 and not first_tokens) and not (every_pair or thousands or rows_own)"


@breaks("G6", checks="G6")
class TheContextIsShortByOne(ReferenceGeneration):
    """The last position is never used."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        room = self.facts.max_model_len - prompts.lengths - 1
        return super().complete(
            replace(prompts, budgets=prompts.budgets.minimum(room.clamp(min=1))), sampling
        )


@breaks("G6", checks="G6")
class RowsAreNumberedWithoutTheFullOnes(ReferenceGeneration):
    """Results of a batch in which some rows have no room land one row too early."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        if output.size > 1 and int(output["generation_lengths"][0]) == 0:
            output["truncated"] = output["truncated"].roll(-1)
        return output


@breaks("G6", "G7", checks="G6 and all_of_max or G7 and first_of_its")
class StopStringsAreNumberedWithTheFullRows(ReferenceGeneration):
    """Stop strings are looked up one row further on."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        moved = [*prompts.stop_strings[1:], prompts.stop_strings[0]]
        return super().complete(replace(prompts, stop_strings=moved), sampling)


@breaks("G5", "G6", checks="G5 or G6")
class TheLastTokenIsNeverAStop(ReferenceGeneration):
    """Who reaches the limit is truncated, stop or no stop."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            full = len(done.token_ids) == int(prompts.budgets[done.row])
            yield structs.replace(done, truncated=full or done.truncated)


@breaks("G7", "G5", checks="G5 or G7")
class OnlyTheFirstStopTokenStops(ReferenceGeneration):
    """The rest of the list is not read."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        sampling = structs.replace(sampling, stop_token_ids=sampling.stop_token_ids[:1])
        return super().complete(prompts, sampling)


@breaks("G7", checks="G7")
class OnlyOneTokenEndsASequence(ReferenceGeneration):
    """A model with several end-of-sequence tokens ends with the first alone."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        own = self.facts.eos_token_ids[1:]
        stops = tuple(one for one in self.sampling.stop_token_ids if one not in own)
        self.sampling = structs.replace(self.sampling, stop_token_ids=stops)


@breaks("G7", checks="G7")
class EndOfSequenceAlwaysEnds(ReferenceGeneration):
    """The model's own token stops rows also where another was configured, or none."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        stops = (*self.sampling.stop_token_ids, *self.facts.eos_token_ids)
        self.sampling = structs.replace(self.sampling, stop_token_ids=stops)


class _Matching(ReferenceGeneration):
    """Text that is looked at otherwise."""

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(ids))


@breaks("G7", checks="G7")
class ThePromptMayBeginAMatch(_Matching):
    """Stop strings are looked for in the whole text from the prompt's last token on."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        self.last = row.ids[row.prompt_length - 1]
        super().step(row, logits, sampling)

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        return super().matches([self.last, *ids], stop_strings)


@breaks("G7", checks="G7")
class MatchesMustEndTheText(_Matching):
    """A string that stands within a token is not seen."""

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        return bool(stop_strings) and self.text(ids).endswith(tuple(stop_strings))


@breaks("G7", "G5", "G6", checks="G5 or G7 or G6 and all_of_max")
class MatchesSpanTwoTokens(_Matching):
    """Only the text of the last two tokens is looked at, and single ones are not."""

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        last = self.text(ids[-2:])
        return any(one in last and len(one) > 1 for one in stop_strings)


@breaks("G7", checks="G7")
class TokensAreDecodedOneByOne(_Matching):
    """The text is put together of what each token is alone."""

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        text = "".join(self.text([token]) for token in ids)
        return any(string in text for string in stop_strings)


@breaks("G7", checks="G7")
class APromptThatEndsWithinACharacterIsText(_Matching):
    """Its last tokens are decoded with what is generated."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        prompt = row.ids[: row.prompt_length]
        self.begun = prompt[-6:] if self.text(prompt).endswith("\ufffd") else []
        super().step(row, logits, sampling)

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        return super().matches([*self.begun, *ids], stop_strings)


@breaks("G7", checks="G7")
class NothingIsReadAfterAStrayByte(_Matching):
    """What follows a byte that is no character is not looked at."""

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        text = self.text(ids).partition("\ufffd")[0]
        return any(string in text for string in stop_strings)


@breaks("G7", checks="G7")
class OnlyTheFirstStringOfARowStops(ReferenceGeneration):
    """Of a row's list one string is taken."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        first = [strings[:1] for strings in prompts.stop_strings]
        return super().complete(replace(prompts, stop_strings=first), sampling)


@breaks("G7", "G2", checks="G2 or G7")
class PaddingEndsAPrompt(ReferenceGeneration):
    """Lengths are counted by what is not the pad token."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        real = prompts.input_ids != self.facts.pad_token_id
        counted = prompts.lengths.minimum(real.sum(1)).clamp(min=1)
        return super().complete(replace(prompts, lengths=counted), sampling)


@breaks("G2", checks="G2")
class OutputsAreAsWideAsInputs(ReferenceGeneration):
    """Columns of padding that came along go back."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output, width = super().generate(data, greedy), data["input_ids"].shape[1]
        if (missing := width - output["output_ids"].shape[1]) > 0:
            for key, value in (("output_ids", self.facts.pad_token_id), ("logprobs", 0.0)):
                output[key] = torch.nn.functional.pad(output[key], (0, missing), value=value)
        return output


@breaks("G2", checks="G2")
class TheTokenizersPaddingIsUsed(ReferenceGeneration):
    """pad_token_id is accepted for prompts, and the output has 0."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
        ids[torch.arange(ids.shape[1]) >= ends[:, None]] = 0
        return output


@breaks("G6", "G11", checks="G6 or G11")
class PositionsEndAt128(ReferenceGeneration):
    """The table of positions is shorter than the context."""

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        found = super().next_logits({ids for ids in prefixes if len(ids) <= 128})
        for ids in (ids for ids in prefixes if len(ids) > 128):
            places = torch.arange(len(ids)).clamp(max=127)[None]
            with torch.no_grad():
                logits = self.model(torch.tensor([ids]), position_ids=places, use_cache=False)
            found[ids] = logits.logits[0, -1].double()
        return found


@breaks("G4", checks="G4")
class LogprobsHaveAFloor(ReferenceGeneration):
    """Nothing is less likely than e to the power of -20."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, logprobs=[max(one, -20.0) for one in done.logprobs])


class _Choosing(ReferenceGeneration):
    """Samples with other parameters than it was given."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        raise NotImplementedError

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        return super().choose(logits, self.other(sampling), generator, seen)


@breaks("G10", checks=_CHOICES)
class TinyMassesAreOff(_Choosing):
    """A top_p next to 0 is taken for none."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, top_p=1.0) if sampling.top_p < 1e-3 else sampling


@breaks("G10", checks=_CHOICES)
class OneCandidateIsTwo(_Choosing):
    """top_k has a least value."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return (
            structs.replace(sampling, top_k=max(2, sampling.top_k)) if sampling.top_k else sampling
        )


@breaks("G4", checks=_CHOICES)
class HeatIsCapped(_Choosing):
    """Temperatures above 2 are 2."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, temperature=min(2.0, sampling.temperature))


@breaks("G10", checks=_CHOICES)
class ColdIsCapped(_Choosing):
    """Temperatures below 0.3 are 0.3."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, temperature=max(0.3, sampling.temperature))


@breaks("G4", checks="G4")
class RawIsAlwaysProcessed(_Choosing):
    """logprobs_mode is accepted."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, logprobs_mode="processed")


@breaks("G4", checks="G4")
class TopPComesBeforeTopK(_Choosing):
    """The nucleus is that of the whole distribution."""

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        if sampling.top_k and sampling.top_p < 1 and not sampling.greedy:
            scores = logits / sampling.temperature
            likely = scores.softmax(-1).sort(descending=True).values
            count = int((likely.cumsum(0) - likely < sampling.top_p).sum())
            sampling = structs.replace(sampling, top_k=min(count, sampling.top_k), top_p=1.0)
        return ReferenceGeneration.choose(self, logits, sampling, generator, seen)


@breaks("G4", "G10", checks=_CHOICES)
class RepetitionPenaltyIsAccepted(_Choosing):
    """And that is all."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, repetition_penalty=1.0)


@breaks("G4", "G10", checks=_CHOICES)
class PenaltiesForgetThePrompt(ReferenceGeneration):
    """Only what was generated is penalised."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        self.start = row.prompt_length
        super().step(row, logits, sampling)

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        return super().choose(logits, sampling, generator, seen[self.start :])


@breaks("G4", checks=_CHOICES)
class PenaltiesAreOnlyForTheArgmax(_Choosing):
    """Sampling goes without."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return sampling if sampling.greedy else structs.replace(sampling, repetition_penalty=1.0)


@breaks("G8", checks="G8 and (do_sample or deterministic)")
class DoSampleIsAccepted(ReferenceGeneration):
    """And every call samples that does not ask for greedy."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.sampling = structs.replace(self.sampling, greedy=False)


@breaks("G10", checks="G10 and wide")
class OnlyTheLikeliest512AreSorted(_Choosing):
    """Truncation looks at no other token."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, top_k=min(512, sampling.top_k or 512))


@breaks("G4", checks="G4 and every_pair")
class ThePenaltyIsForgottenBesideTopK(_Choosing):
    """The two are never configured together."""

    def other(self, sampling: SamplingParams) -> SamplingParams:
        return structs.replace(sampling, repetition_penalty=1.0) if sampling.top_k else sampling


@breaks("G4", checks="G4 and every_pair")
class SamplesHaveNoStopStrings(ReferenceGeneration):
    """Several completions of a prompt end at tokens alone."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if sampling.num_generations > 1:
            prompts = replace(prompts, stop_strings=[()] * len(prompts))
        return super().complete(prompts, sampling)


@breaks("G10", checks="G10 and rows_own")
class PenaltiesStayInTheirSlot(ReferenceGeneration):
    """A row is penalised for the tokens of the row that had its slot before."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        slots = self.__dict__.setdefault("slots", {})
        self.left = slots.get(row.index % 256, [])
        super().step(row, logits, sampling)
        if row.done is not None:
            slots[row.index % 256] = row.ids

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        return super().choose(logits, sampling, generator, [*self.left, *seen])


@breaks("G7", checks="G7 and long_string")
class TheShortestStringSetsTheWindow(_Matching):
    """The text is cut to what the shortest of a row's strings needs."""

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        text = self.text(ids)[-8 - min(map(len, stop_strings), default=0) :]
        return any(string in text for string in stop_strings)


@breaks("G9", checks="G9 and agree_if")
class SeedsLoseTheirSign(ReferenceGeneration):
    """A negative seed of a row draws what the positive one draws."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        if "seed" in data:
            data = BatchedDataDict({**data, "seed": data["seed"].abs()})
        return super().generate(data, greedy)


@breaks("G3", checks="G3 and finite_logprobs")
class NanIsZero(ReferenceGeneration):
    """A log-prob that is not a number is the largest that there is."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, logprobs=[min(0.0, value) for value in done.logprobs])
