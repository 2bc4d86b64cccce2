"""Mutants of which one copy is spread over ranks that do not do the same, or not all of it.

Workers build them, so each is installed as a plugin for as long as the suite looks at it.
"""

from __future__ import annotations

import concurrent.futures
import inspect
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

from mutants.mutant import Mutant, registered
from rl_backends.policy.randomness import RandomStream
from rl_conformance.reference import LAYOUTS, SHARDED
from rl_conformance.reference.sharded import ShardedReferencePolicy, ShardedSource
from rl_conformance.reference.vocabulary import Vocabulary
from rl_conformance.target import Target
from rl_core.errors import CheckpointError, RefitError
from rl_core.interfaces import (
    DataParallelRank,
    Future,
    Piece,
    TensorSpec,
    WeightSource,
    WorkerContext,
)
from rl_core.weights.data.parts import Partition


def spread(layout: str, checks: str, clause: str = "P14") -> Callable[[Any], Any]:
    """Registers a mutant of a clause, which is looked at in one layout."""

    def register(broken: Any) -> Any:
        registered.append(_in_workers(broken, layout, checks, clause))
        return broken

    return register


def _in_workers(policy: Any, layout: str, checks: str, clause: str) -> Mutant:
    name, module = policy.__name__, policy.__module__
    bug = (inspect.getdoc(policy) or "").partition("\n")[0]
    built_by = f"{module}:{name}"
    policy.manifest = replace(SHARDED, name=name, factories={"policy": built_by})
    policy.layouts = {"cpu": {"sharded": {layout: LAYOUTS["cpu"]["sharded"][layout]}}}
    find, install = partial(Target.find, name), partial(_installed, name, module)
    return Mutant(name, bug, (clause,), find, install, f"{clause} and {checks}", module)


@contextmanager
def _installed(name: str, module: str) -> Generator[None]:
    """A distribution that has the mutant's entry points, here and in workers."""
    with tempfile.TemporaryDirectory(prefix="rl-mutant-") as site:
        info = Path(site, "rl_mutant-1.0.dist-info")
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-mutant\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            f"[rl_core.backends]\n{name} = {module}:{name}.manifest\n"
            f"[rl_core.conformance]\n{name} = {module}:{name}.layouts\n"
        )
        here = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [site, here, os.environ.get("PYTHONPATH")]))
        with (
            mock.patch.dict(os.environ, PYTHONPATH=path),
            mock.patch.object(sys, "path", [site, *sys.path]),
        ):
            yield


class WithoutABug(ShardedReferencePolicy):
    """None: workers find it and build it as they do the others."""


#: Survives, or else the others may be killed for want of something that all of them need.
HONEST = _in_workers(WithoutABug, "parts", "scores_are", "P14")


# -- gradients ---------------------------------------------------------------------------------


@spread("copies", "steps_are")
class CopiesLearnFromTheirOwnRows(ShardedReferencePolicy):
    """Gradients are summed over the ranks of a copy, and not over the copies."""

    def summed_over(self, name: str) -> Sequence[Any]:
        return [self.copy_group]


@spread("copies", "two_ranks", "P5")
class ARankWithoutRowsLearnsNothing(ShardedReferencePolicy):
    """A rank of which no row counts steps along no gradient, so that its weights differ."""

    def gradient_norm(self) -> float:
        idle = all(parameter.grad is None for parameter in self.model.parameters())
        norm = super().gradient_norm()
        if idle:
            self.model.zero_grad(set_to_none=False)
        return norm


@spread("copies", "different_units", "P5")
class RanksDropTheSame(ShardedReferencePolicy):
    """Every rank draws from the stream of the seed itself."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        self.random = RandomStream(self.config["seed"], torch.device("cpu"))


@spread("vocabulary", "steps_are")
class NormsLearnFromTheirOwnTokens(ShardedReferencePolicy):
    """Gradients of the norms, which all ranks of a copy have, stay those of a rank's vocabulary."""

    def summed_over(self, name: str) -> Sequence[Any]:
        return [] if "norm" in name else super().summed_over(name)


@spread("vocabulary", "steps_are")
class NormsCountOnEveryRank(ShardedReferencePolicy):
    """The norm of the gradient has what all ranks of a copy have once for each of them."""

    def gradient_norm(self) -> float:
        norm = super().gradient_norm()
        vectors = [p.grad for p in self.model.parameters() if p.dim() == 1 and p.grad is not None]
        more = (self.shards - 1) * float(torch.nn.utils.get_total_norm(vectors)) ** 2
        return math.sqrt(norm**2 + more)


# -- the vocabulary ----------------------------------------------------------------------------


class _OffByOne(Vocabulary):
    @property
    def first(self) -> int:
        return sum(self.counts[: self.shard]) - (self.shard > 0)


@spread("vocabulary", "scores_are")
class TheVocabularyIsOffByOne(ShardedReferencePolicy):
    """All ranks but the first begin their part of the vocabulary one token too early."""

    def dealt_vocabulary(self) -> Vocabulary:
        dealt = super().dealt_vocabulary()
        return _OffByOne(dealt.size, dealt.shard, dealt.shards, dealt.group)


class _EquallyMany(Vocabulary):
    def largest(self, own: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, tokens = own.topk(-(-k // self.shards))
        values = torch.cat(self._gather(values), -1)[..., :k]
        tokens = torch.cat(self._gather(tokens + self.first), -1)[..., :k]
        values, order = values.sort(descending=True)
        return values, tokens.gather(-1, order)


@spread("vocabulary", "topk")
class EveryRankHasEquallyManyOfTheTopk(ShardedReferencePolicy):
    """The largest logits of all tokens are as many of each rank's own."""

    def dealt_vocabulary(self) -> Vocabulary:
        dealt = super().dealt_vocabulary()
        return _EquallyMany(dealt.size, dealt.shard, dealt.shards, dealt.group)


@spread("vocabulary", "scores_are")
class ARankSpeaksThatKnowsItsOwnTokensAlone(ShardedReferencePolicy):
    """Log-probs are taken from the last rank of a copy; the first has put them together."""

    def join(self, worker: WorkerContext) -> DataParallelRank | None:
        joined = super().join(worker)
        assert joined is not None
        return replace(joined, reports=worker.rank % self.shards == self.shards - 1)


@spread("parts", "fails_midway")
class AStepThatFailedOnOneRankIsGoneOnWith(ShardedReferencePolicy):
    """After an error in the midst of a step of one rank all ranks train on."""

    def train(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        try:
            return super().train(*args, **kwargs)
        finally:
            self.changes.torn = ""


# -- what is drawn -----------------------------------------------------------------------------


@spread("vocabulary", "dropout")
class EveryRankDropsAnew(ShardedReferencePolicy):
    """Ranks of a copy drop other elements than each other."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        if self.worker is not None:
            seed = config.get("seed", 0) + self.worker.rank
            self.random = RandomStream(seed, torch.device("cpu"))


@spread("vocabulary", "draws_the_same")
class EveryRankSamplesAnew(ShardedReferencePolicy):
    """Without a seed every rank of a copy draws tokens of its own."""

    def generation_seed(self) -> int:
        return self.ranks.rank  # not at random: the suite is to see it in the same way each time


# -- what leaves it, and comes back ------------------------------------------------------------


@spread("parts", "another_number")
class MomentsOfTheFirstRankAloneAreResumed(ShardedReferencePolicy):
    """The other ranks' parts begin without moments."""

    def _shard(self, shard: int) -> None:
        super()._shard(shard)
        if shard:
            self.optimizer.state.clear()


@spread("parts", "another_number")
class MomentsAreSavedInAnotherOrder(ShardedReferencePolicy):
    """In a checkpoint the last rank's part of the moments is the first."""

    def gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        whole = super().gathered(name, part)
        if isinstance(part, nn.Parameter):
            return whole
        return torch.cat(whole.tensor_split(self.shards)[::-1])


@spread("parts", "another_number")
class ACheckpointIsOfItsNumberOfRanks(ShardedReferencePolicy):
    """What several ranks have saved is not read by one, nor the other way round."""

    def write_checkpoint(self, directory: Path) -> None:
        super().write_checkpoint(directory)
        if not self.ranks.rank:
            (directory / "rl_training" / "ranks.json").write_text(json.dumps(self.ranks.size))

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        saved = json.loads((directory / "rl_training" / "ranks.json").read_text())
        if saved != self.ranks.size:
            raise CheckpointError(f"{directory} is of {saved} ranks, not of {self.ranks.size}")
        return super().read_checkpoint(directory)


@spread("vocabulary", "another_number")
class DropoutResumesOnTheFirstRankAlone(ShardedReferencePolicy):
    """Where a checkpoint has no random state for a rank, the rank draws from the seed."""

    def load_checkpoint(self, path: Any) -> None:
        own = self.random
        if self.ranks.rank:
            self.random = RandomStream(0, torch.device("cpu"))
        super().load_checkpoint(path)
        self.random = own


# -- refits ------------------------------------------------------------------------------------


class _Altered(ShardedSource):
    """Gives other pieces, if it is of a rank that is not as it should be."""

    def __init__(
        self, policy: ShardedReferencePolicy, alter: Callable[[TensorSpec, Piece], Piece]
    ) -> None:
        super().__init__(policy)
        self._alter = alter

    def pieces(self) -> Sequence[Piece]:
        specs = {spec.name: spec for spec in self.specs()}
        return [self._alter(specs[piece.name], piece) for piece in super().pieces()]


@spread("parts", "every_way", "R16")
class ARankGivesThePartOfAnother(ShardedReferencePolicy):
    """Each of two ranks calls its rows those of the other one, so that all rows are there."""

    def weight_source(self) -> WeightSource:
        return super().weight_source() if self.parts is None else _Altered(self, _at_the_other_end)


def _at_the_other_end(spec: TensorSpec, piece: Piece) -> Piece:
    """The rows as far from the end of the tensor as the piece's are from its beginning."""
    (first, after), *others = piece.box
    size = spec.shape[0]
    return piece._replace(box=((size - after, size - first), *others))


class _LastCopy(ShardedReferencePolicy):
    """Of which only the last copy is broken: the others have all that it has."""

    @property
    def is_last(self) -> bool:
        return self.worker is not None and self.worker.rank // self.shards == self.copies - 1


@spread("copies", "every_way", "R16")
class ABoxIsOffByOne(_LastCopy):
    """The boxes of one copy of the model begin and end one row too late or too early."""

    def weight_source(self) -> WeightSource:
        return _Altered(self, _moved) if self.is_last else super().weight_source()


def _moved(spec: TensorSpec, piece: Piece) -> Piece:
    (first, after), *others = piece.box
    by = 1 if after < spec.shape[0] else -1
    return piece._replace(box=((first + by, after + by), *others))


@spread("copies", "every_way", "R16")
class ACopyIsAStepBehind(_LastCopy):
    """One copy of the model gives the weights before the last step, as if they were of now."""

    before: dict[str, torch.Tensor] | None = None

    def take_step(self, lr: float, scale: float) -> None:
        if self.parts is not None and self.is_last:
            own = self.parts.by_name
            self.before = {name: part.detach().clone() for name, part in own.items()}
        super().take_step(lr, scale)

    def weight_source(self) -> WeightSource:
        if (before := self.before) is None:
            return super().weight_source()
        return _Altered(self, lambda _, piece: piece._replace(tensor=before[piece.name]))


@spread("parts", "commits_alone", "R16")
class ARankCommitsAlone(ShardedReferencePolicy):
    """A rank that does not decide reports success of a refit that has failed."""

    def send_weights(self, **options: Any) -> list[Future]:
        futures = super().send_weights(**options)
        return [_succeeding(future) for future in futures] if self.ranks.rank else futures


def _succeeding(future: Any) -> Future:
    done: concurrent.futures.Future[Any] = concurrent.futures.Future()
    future.add_done_callback(lambda _: done.set_result({}))
    return done


@spread("copies", "sent_once", "R16")
class EveryCopySendsItsParts(ShardedReferencePolicy):
    """What two copies of the model have is sent twice."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        if self.worker is not None:  # in this worker's process, which is this policy's alone
            Partition.shared_out = _all_that_each_has  # type: ignore[method-assign]


def _all_that_each_has(parts: Partition, layouts: Any, engines: Any, hosts: Any, **_: Any) -> Any:
    return {
        rank: {key: bytes(map(min, parts.mask(its), keeps)) for key, (_, keeps) in engines.items()}
        for rank, its in layouts.items()
    }


@spread("parts", "for_the_model", "R16")
class ARankHasRoomForTheModel(ShardedReferencePolicy):
    """The other ranks take memory for the whole model to send their part of it."""

    def weight_source(self) -> WeightSource:
        if self.worker is not None and self.worker.rank:
            torch.ones(sum(spec.nbytes for spec in self.specs), dtype=torch.uint8)
        return super().weight_source()


@spread("parts", "leaves_nothing", "R16")
class ARankKeepsAFileOfEachRefit(ShardedReferencePolicy):
    """The other ranks leave a file open for each refit."""

    def weight_source(self) -> WeightSource:
        if self.worker is not None and self.worker.rank:
            os.open(os.devnull, os.O_RDONLY)
        return super().weight_source()


@spread("parts", "stops_or_dies", "R16")
class ALostRankIsNotNamed(ShardedReferencePolicy):
    """A rank that is lost ends the refit with an error that does not say which it is."""

    def __init__(self, *args: Any, **config: Any) -> None:
        super().__init__(*args, **config)
        if self.worker is not None:
            lost = self.refit_ranks
            assert lost is not None
            lost.lost = lambda rank: RefitError("somebody is lost")  # type: ignore[method-assign]
