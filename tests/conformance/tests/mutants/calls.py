"""Mutants that remember: what a call, a row or another engine had is still there for the next."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from msgspec import structs

from mutants.mutant import breaks
from rl_conformance.reference.generation import ReferenceGeneration

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from rl_backends import Completion, PromptBatch, SamplingParams

#: Checks in which calls of all kinds follow each other.
_LEFT = "earlier_calls_leave_no_trace"


@breaks("G7", checks="G7 and (earlier_calls_leave_no_trace or change_the_configuration)")
class StopStringsOutliveTheirCall(ReferenceGeneration):
    """A row's stop strings are added to the configured ones."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        own = {string for strings in prompts.stop_strings for string in strings}
        self.config["stop_strings"] = [*own, *(self.config.get("stop_strings") or ())]
        return super().complete(prompts, sampling)


@breaks("G8", "G9", checks=f"{_LEFT} and (greedy_call or seeded_call)")
class GreedySticks(ReferenceGeneration):
    """After a greedy call every call is greedy."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        self.sampling = structs.replace(self.sampling, greedy=self.sampling.greedy or greedy)
        return super().generate(data, greedy)


@breaks("G9", checks=f"{_LEFT} and G9 or with_a_seed_does")
class SeedsOutliveTheirCall(ReferenceGeneration):
    """A call without seeds draws from those of the call before."""

    seeds: torch.Tensor | None = None

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if prompts.seeded:
            self.seeds = prompts.seeds
        elif self.seeds is not None:
            prompts = replace(
                prompts, seeds=self.seeds[torch.arange(len(prompts)) % len(self.seeds)]
            )
        return super().complete(prompts, sampling)


@breaks("G8", checks="G8 and (earlier_calls_leave_no_trace or deterministic)")
class ColumnsOfALongerCallShow(ReferenceGeneration):
    """The cache of a longer call before is not cleared behind the shorter rows of this one."""

    width = 0

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        found, width = super().next_logits(prefixes), max(map(len, prefixes))
        stale, self.width = width < self.width - 8, max(width, self.width)
        return {ids: logits.roll(1) if stale else logits for ids, logits in found.items()}


@breaks("G6", checks=f"{_LEFT} and G6 or all_of_max")
class ShortBudgetsStick(ReferenceGeneration):
    """Rows without much room lower max_new_tokens for good."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        least = int(prompts.budgets.min())
        self.sampling = structs.replace(self.sampling, max_new_tokens=least)
        return super().complete(prompts, sampling)


@breaks("G12", checks="G12 and not many_rows")
class OutputsShareABuffer(ReferenceGeneration):
    """What is returned are views of memory that the next call writes to."""

    buffer = torch.zeros(512, 512, dtype=torch.int64)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        rows, width = output["output_ids"].shape
        view = self.buffer[:rows, :width]
        output["output_ids"] = view.copy_(output["output_ids"])
        return output


@breaks("G12", checks="G12 and not many_rows")
class MasksAreMadeInPlace(ReferenceGeneration):
    """The input gets a column that it lacked, and its mask another dtype."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        if "attention_mask" in data:
            data["attention_mask"] = data["attention_mask"].bool()
        return super().generate(data, greedy)


@breaks("G12", checks="G12 and not many_rows")
class TheInputIsSharedWithTheOutput(ReferenceGeneration):
    """Lengths are counted up in the tensor that was given."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        if "input_lengths" in data and len(data["input_lengths"]) == 3:
            output["generation_lengths"] = data["input_lengths"].copy_(output["generation_lengths"])
        return output


@breaks("G12", checks="G12 and not many_rows")
class LogprobsOfAnEarlierTurnAreKept(ReferenceGeneration):
    """Columns that come with the batch win over those of the call."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        output.update({key: data[key] for key in ("logprobs", "truncated") if key in data})
        return output


@breaks("G1", checks="G1")
class RefusedRowsAreQueued(ReferenceGeneration):
    """Seeds of a refused batch are taken for those of the next."""

    waiting: torch.Tensor | None = None

    def generate(self, data: Any, greedy: bool = False) -> Any:
        before = self.waiting
        self.waiting = data.get("input_lengths")
        if before is not None and "seed" in data:
            data = type(data)({**data, "seed": data["seed"] + 1})
        output = super().generate(data, greedy)
        self.waiting = None
        return output


@breaks("G1", checks="G1")
class ARefusedBatchIsGreedy(ReferenceGeneration):
    """The flag of a refused call stays up."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        kept, flag = self.sampling, self.sampling.greedy or greedy
        self.sampling = structs.replace(self.sampling, greedy=flag)
        output = super().generate(data, greedy)
        self.sampling = kept
        return output


@breaks("G14", checks="G14 and not leaves_nothing")
class ARefusedCallWakes(ReferenceGeneration):
    """Who asks twice is served, asleep or not."""

    def _check_awake(self, method: str) -> None:
        awake, self._awake = self._awake, frozenset({"weights", "kv_cache"})
        if awake != self._awake and not getattr(self, "asked", False):
            self.asked, self._awake = True, awake
        super()._check_awake(method)


# -- engines of one process ------------------------------------------------------------------------


@breaks("G8", checks="G8 and (two_engines or deterministic or batch_order)")
class TheLastStopStringsAreEverybodys(ReferenceGeneration):
    """Stop strings are kept in the class."""

    stops: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        type(self).stops = list(config.get("stop_strings") or ())

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        self.config["stop_strings"] = self.stops
        own = [tuple(self.stops)] * len(prompts)
        return super().complete(replace(prompts, stop_strings=own), sampling)


@breaks("G8", checks="G8 and (two_engines or deterministic or batch_order)")
class TheFirstModelIsEverybodys(ReferenceGeneration):
    """A cache of models looks at their size only."""

    models: ClassVar[dict[str, Any]] = {}

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.model = self.models.setdefault(str(self.model.config.hidden_size), self.model)


@breaks("G9", checks="G9 and (engines or sampling_reproducible)")
class TheLastSeedIsEverybodys(ReferenceGeneration):
    """The seed is kept in the module."""

    seed: ClassVar[int | None] = None

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        type(self).seed = config.get("seed")

    def generate(self, data: Any, greedy: bool = False) -> Any:
        self.sampling = structs.replace(self.sampling, seed=self.seed)
        return super().generate(data, greedy)


@breaks("G13", checks="G13")
class SleepIsShared(ReferenceGeneration):
    """One that sleeps puts all to sleep."""

    awake: ClassVar[set[int]] = set()

    def on_wake(self, tags: frozenset[str]) -> None:
        self.awake.add(0)

    def on_sleep(self, tags: frozenset[str]) -> None:
        self.awake.clear()

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if not self.awake:
            raise RuntimeError("asleep")
        return super().complete(prompts, sampling)


@breaks("G14", checks="G14 and not leaves_nothing")
class ShutdownEndsThemAll(ReferenceGeneration):
    """What one engine ends was used by all."""

    ended: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.ended.clear()

    def on_shutdown(self) -> None:
        self.ended.append(1)

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if self.ended:
            raise RuntimeError("the pool has ended")
        return super().complete(prompts, sampling)


@breaks("G15", checks="G15")
class VersionsAreCountedInTheClass(ReferenceGeneration):
    """A refit of one engine is a new version of all."""

    commits: ClassVar[list[int]] = []

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.commits.clear()

    def _on_commit(self, version: int) -> None:
        self.commits.append(version)
        super()._on_commit(version)

    @property
    def weights_version(self) -> int:
        return len(self.commits)


@breaks("G15", checks="G15")
class TheFirstRowAloneIsNew(ReferenceGeneration):
    """All rows but the first say the version of the start."""

    def generate(self, data: Any, greedy: bool = False) -> Any:
        output = super().generate(data, greedy)
        output["weights_version"][1:] = 0
        return output


# -- streams ---------------------------------------------------------------------------------------


@breaks("G16", checks="G16")
class UnreadRowsKeepTheirSlots(ReferenceGeneration):
    """Rows of a stream that was broken off are never freed."""

    free = 256

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if len(prompts) > self.free:
            raise RuntimeError("no slot is free")
        self.free -= len(prompts)
        for done in super().complete(prompts, sampling):
            self.free += 1
            yield done


@breaks("G16", checks="G16")
class UnreadRowsAreFinishedLater(ReferenceGeneration):
    """The next call begins with what a broken-off stream had begun."""

    begun: PromptBatch | None = None

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        late, self.begun = self.begun, prompts
        if late is not None and len(late) >= len(prompts):
            prompts = replace(prompts, seeds=late.seeds[: len(prompts)])
            sampling = structs.replace(sampling, greedy=False)
        yield from super().complete(prompts, sampling)
        self.begun = None


@breaks("G16", checks="G16")
class StreamedRowsShareABuffer(ReferenceGeneration):
    """Each row that is yielded is written over the one before."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        buffer = torch.zeros(1, 512)
        async for index, row in super().generate_async(data, greedy):
            view = buffer[:, : row["logprobs"].shape[1]]
            row["logprobs"] = view.copy_(row["logprobs"])
            yield index, row


@breaks("G16", checks="G16")
class StreamedRowsAreNeverTruncated(ReferenceGeneration):
    """What generate says of a row's end the stream does not."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        async for index, row in super().generate_async(data, greedy):
            row["truncated"] = torch.zeros(1, dtype=torch.bool)
            yield index, row


@breaks("G16", checks="G16")
class StreamsIgnoreTheirSeeds(ReferenceGeneration):
    """A streamed row draws from a seed of its place."""

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        if "seed" in data:
            data = type(data)({**data, "seed": torch.arange(len(data["seed"]))})
        async for item in super().generate_async(data, greedy):
            yield item
