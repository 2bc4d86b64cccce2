"""Mutants whose random numbers are not their own, not random, or the same twice."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from msgspec import structs

from mutants.mutant import breaks
from rl_backends.generation import base as frontend
from rl_backends.generation.prompts import RowStreams, repeat_for_samples, row_seeds
from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

    from rl_backends import Completion, PromptBatch, SamplingParams

_OWN = "G9 and (with_a_seed_does or if_and_only_if or engines_without)"
_ALL_DRAWS = "every_draw and not unseeded and not truncated or with_a_seed_does"


class _Seeding(ReferenceGeneration):
    """Draws from other seeds than it was given."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        raise NotImplementedError

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        return super().complete(replace(prompts, seeds=self.other(prompts)), sampling)


@breaks("G9", checks=_OWN)
class SeedsAreOfThePlace(_Seeding):
    """Row i draws from the first row's seed plus i."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        return prompts.seeds[0] + torch.arange(len(prompts))


@breaks("G9", checks=_OWN)
class SeedsAreMixedWithThePlace(_Seeding):
    """A row's seed and its place in the batch both count."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        return prompts.seeds * 1000 + torch.arange(len(prompts))


@breaks("G9", checks=_OWN)
class SeedsOfNeighboursAreSwapped(_Seeding):
    """Each row draws from the seed of the next."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        return prompts.seeds.roll(1)


@breaks("G9", checks=_OWN)
class SeedZeroIsNone(_Seeding):
    """The truth value of a seed says whether there is one."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        fresh = row_seeds(None, len(prompts))
        return fresh if self.sampling.seed == 0 else prompts.seeds.where(prompts.seeds != 0, fresh)


@breaks("G9", checks=_OWN)
class SeedsAreCutShort(_Seeding):
    """Bits of a seed above the thirtieth are lost."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        return prompts.seeds & (2**30 - 1)


@breaks("G9", checks=_OWN)
class WithoutASeedItIsFortyTwo(_Seeding):
    """An unseeded engine counts its calls from a constant."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.calls = itertools.count(42)

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        return prompts.seeds if prompts.seeded else row_seeds(next(self.calls), len(prompts))


_STREAMS = "G9 and (stream or restart) or G17 and samples_draw"


class _Counting(ReferenceGeneration):
    """Counts rows in its own way."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.take = self._streams.take
        self._streams.take = self.first  # type: ignore[method-assign]

    def first(self, rows: int) -> int:
        return self.take(rows)


@breaks("G9", "G17", checks=_STREAMS)
class StreamsAreOfTheCall(_Counting):
    """The n-th call draws from streams that its number is mixed into."""

    def first(self, rows: int) -> int:
        return self.take(1) * 1000


@breaks("G9", "G17", checks=_STREAMS)
class CallsOverlapByARow(_Counting):
    """The first row of a call draws from the stream of the last one before it."""

    def first(self, rows: int) -> int:
        return max(0, self.take(rows) - 1)


@breaks("G9", checks=_STREAMS)
class SleepStartsStreamsOver(_Counting):
    """Who sleeps forgets which streams were drawn from."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        super().on_sleep(tags)
        self._streams = RowStreams()


@breaks("G9", checks=_STREAMS)
class RefitsStartStreamsOver(_Counting):
    """With new weights the streams begin anew."""

    def invalidate_kv_cache(self) -> bool:
        self._streams = RowStreams()
        return super().invalidate_kv_cache()


@breaks("G9", checks=_STREAMS)
class RefusedRowsDoNotCount(_Counting):
    """A batch that is refused gives its streams back."""

    def _accept(self, *args: Any) -> Any:
        before = self._streams._asked
        try:
            return super()._accept(*args)
        except DataError:
            self._streams._asked = before
            raise


@breaks("G9", checks=_STREAMS)
class GreedyRowsCount(_Counting):
    """Rows that draw nothing use up streams."""

    def _accept(self, data: Any, greedy: bool, method: str) -> Any:
        if greedy:
            self.take(data.size)
        return super()._accept(data, greedy, method)


@breaks("G9", checks=_STREAMS)
class RowsWithSeedsCount(_Counting):
    """Rows that bring a seed use up streams, too."""

    def _accept(self, data: Any, greedy: bool, method: str) -> Any:
        if "seed" in data:
            self.take(data.size)
        return super()._accept(data, greedy, method)


@breaks("G9", checks=_STREAMS)
class StreamsAreTakenWhenRead(_Counting):
    """A stream of rows takes its streams when it is first iterated over."""

    def generate_async(self, data: Any, greedy: bool = False) -> Any:
        async def late() -> Any:
            async for item in ReferenceGeneration.generate_async(self, data, greedy):
                yield item

        return late()


@breaks("G9", "G17", checks="G9 and (differ or engines) or G17")
class UnseededRowsComeInPairs(_Seeding):
    """Every second row without a seed draws what the one before it drew."""

    def other(self, prompts: PromptBatch) -> torch.Tensor:
        pairs = torch.arange(len(prompts)) // 2 * 2
        return prompts.seeds if prompts.seeded else prompts.seeds[pairs]


@breaks("G9", checks="G9 and (another or global_random or differ)")
class TheProgramIsSeeded(ReferenceGeneration):
    """A seed is set for the whole process."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        if prompts.seeded:
            torch.manual_seed(int(prompts.seeds[0]))
        return super().complete(prompts, sampling)


class _Stepping(ReferenceGeneration):
    """Does something of its own before each token."""

    def before(self, row: Any) -> None:
        raise NotImplementedError

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        self.before(row)
        super().step(row, logits, sampling)


@breaks("G10", checks=_ALL_DRAWS)
class StepsAreSeededAnew(_Stepping):
    """Token t of a row draws from seed plus t, which is the first token of the row t places on."""

    def before(self, row: Any) -> None:
        row.generator.manual_seed(row.generator.initial_seed() + bool(row.new))


@breaks("G10", checks=_ALL_DRAWS)
class EveryStepDrawsTheSameNumber(_Stepping):
    """The generator of a row is set back before each token."""

    def before(self, row: Any) -> None:
        row.generator.manual_seed(row.generator.initial_seed())


@breaks("G10", checks=_ALL_DRAWS)
class LaterTokensAreColder(ReferenceGeneration):
    """From the second token on the temperature is lower than the log-probs say."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        if row.new and not sampling.greedy:
            token, _ = self.choose(
                logits, structs.replace(sampling, temperature=0.8), row.generator, row.ids
            )
            logits = logits.clone()
            self.forced: int | None = token
        super().step(row, logits, sampling)
        self.forced = None

    def choose(
        self, logits: Any, sampling: SamplingParams, generator: Any, seen: list[int]
    ) -> tuple[int, float]:
        token, logprob = super().choose(logits, sampling, generator, seen)
        forced = getattr(self, "forced", None)
        return (token, logprob) if forced is None else (forced, logprob)


@breaks("G10", "G9", checks=_ALL_DRAWS)
class SomeRowsAreColder(ReferenceGeneration):
    """Every fourth row forgets that the temperature is above 1."""

    def step(self, row: Any, logits: torch.Tensor, sampling: SamplingParams) -> None:
        cold = row.index % 4 == 3 and sampling.temperature > 1
        super().step(row, logits, structs.replace(sampling, temperature=1.0) if cold else sampling)


def _samples(step: Any) -> AbstractContextManager[Any]:
    """Sample k draws from ``seed + step(k)``."""

    def repeat(data: Any, count: int) -> Any:
        rows = repeat_for_samples(data, count)
        if count > 1 and "seed" in data:
            places = torch.arange(len(rows["seed"])) % count
            rows["seed"] = rows["seed"] - places + step(places)
        return rows

    return mock.patch.object(frontend, "repeat_for_samples", repeat)


@breaks("G17", checks="G17")
def all_samples_but_the_first_are_the_second() -> AbstractContextManager[Any]:
    """Sample k draws from seed plus 1, for every k above 0."""
    return _samples(lambda k: k.clamp(max=1))


@breaks("G17", checks="G17")
def samples_are_seeded_in_steps_of_two() -> AbstractContextManager[Any]:
    """From the third on, samples skip a seed."""
    return _samples(lambda k: k + (k > 1))


@breaks("G17", checks="G17")
def stop_strings_are_not_repeated() -> AbstractContextManager[Any]:
    """Only the first sample of a prompt has its stop strings."""

    def repeat(data: Any, count: int) -> Any:
        rows = repeat_for_samples(data, count)
        if count > 1 and data.get("stop_strings"):
            strings = rows["stop_strings"]
            rows["stop_strings"] = [s if n % count == 0 else None for n, s in enumerate(strings)]
        return rows

    return mock.patch.object(frontend, "repeat_for_samples", repeat)
