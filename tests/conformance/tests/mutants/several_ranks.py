"""Mutants of which one copy is spread over ranks that do not do the same, or not all of it.

Workers build them, so each is installed as a plugin for as long as the suite looks at it.
"""

from __future__ import annotations

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
from rl_conformance.reference.sharded import ShardedReferencePolicy
from rl_conformance.reference.vocabulary import Vocabulary
from rl_conformance.target import Target
from rl_core.errors import CheckpointError
from rl_core.interfaces import DataParallelRank, WorkerContext


def spread(layout: str, checks: str) -> Callable[[Any], Any]:
    """Registers a mutant of P14, which is looked at in one layout."""

    def register(broken: Any) -> Any:
        name, module = broken.__name__, broken.__module__
        bug = (inspect.getdoc(broken) or "").partition("\n")[0]
        built_by = f"{module}:{name}"
        broken.manifest = replace(SHARDED, name=name, factories={"policy": built_by})
        broken.layouts = {"cpu": {"sharded": {layout: LAYOUTS["cpu"]["sharded"][layout]}}}
        find, install = partial(Target.find, name), partial(_installed, name, module)
        registered.append(Mutant(name, bug, ("P14",), find, install, f"P14 and {checks}", module))
        return broken

    return register


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
        path = os.pathsep.join(filter(None, [site, os.environ.get("PYTHONPATH")]))
        with (
            mock.patch.dict(os.environ, PYTHONPATH=path),
            mock.patch.object(sys, "path", [site, *sys.path]),
        ):
            yield


# -- gradients ---------------------------------------------------------------------------------


@spread("copies", "steps_are")
class CopiesLearnFromTheirOwnRows(ShardedReferencePolicy):
    """Gradients are summed over the ranks of a copy, and not over the copies."""

    def summed_over(self, name: str) -> Sequence[Any]:
        return [self.copy_group]


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

    def gathered(self, name: str, part: torch.Tensor, group: Any) -> torch.Tensor:
        whole = super().gathered(name, part, group)
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


@spread("parts", "refits_are")
class ARefitHasThePartsInAnotherOrder(ShardedReferencePolicy):
    """An engine gets the last rank's part of every tensor first."""

    def gathered(self, name: str, part: torch.Tensor, group: Any) -> torch.Tensor:
        whole = super().gathered(name, part, group)
        if group is not self.refit_group:
            return whole
        return torch.cat(whole.tensor_split(self.shards)[::-1])
