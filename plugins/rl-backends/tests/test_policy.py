"""The base class of policies over the smallest model there is, alone and on several ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from rl_backends import PolicyBackend, RowLimits
from rl_backends.policy.ranks import RankGroup
from rl_backends.policy.rows import Microbatching
from rl_backends.tensors import NamedTensorSource, module_tensors
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, CheckpointError, LifecycleError, TrainingError
from rl_core.interfaces import DataParallelRank, LossFunction, LossInputType

VOCABULARY, LR = 11, 0.5
CONFIG = {"optimizer": {"lr": LR}, "max_grad_norm": None}


class Bigram(PolicyBackend):
    """Each token's logits are a row of a matrix; steps are those of SGD."""

    def __init__(self, worker: Any = None, **config: Any) -> None:
        self.model = torch.nn.Embedding(VOCABULARY, VOCABULARY)
        start = torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(3))
        self.model.weight.data.copy_(start)
        self.start, self.weight = start, self.model.weight
        self.seen: list[int] = []
        parallel = {key: config.pop(key, None) for key in ("ranks", "data_parallel")}
        super().__init__({**CONFIG, **config}, RowLimits(VOCABULARY, 20), worker=worker, **parallel)

    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        self.seen.append(rows.size)
        assert rows["input_ids"].shape[1] == rows["input_lengths"].max()
        logits = torch.nn.functional.embedding(rows["input_ids"], self.weight)
        if wanted is LossInputType.LOGIT:
            return logits
        scores = logits.log_softmax(-1)[:, :-1].gather(2, rows["input_ids"][:, 1:, None])[..., 0]
        real = torch.arange(1, rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
        return torch.cat([torch.zeros(rows.size, 1), scores * real], 1)

    @contextmanager
    def reference(self) -> Iterator[None]:
        self.weight = self.start
        try:
            yield
        finally:
            self.weight = self.model.weight

    def gradient_norm(self) -> float:
        grad = self.model.weight.grad
        assert grad is not None
        if self.data_parallel is None or self.data_parallel.size > 1:
            self.ranks.sum_([grad])
            if self.data_parallel is not None:  # each part was summed once for every rank of it
                grad /= self.ranks.size / self.data_parallel.size
        return float(grad.norm())

    def take_step(self, lr: float, scale: float) -> None:
        with torch.no_grad():
            self.model.weight -= lr * scale * self.model.weight.grad

    def clear_gradients(self) -> None:
        self.model.zero_grad()

    def write_checkpoint(self, directory: Path) -> None:
        torch.save(self.model.state_dict(), directory / f"weights{self.ranks.rank}.pt")

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        weights = torch.load(directory / f"weights{self.ranks.rank}.pt")
        return lambda: self.model.load_state_dict(weights)

    def weight_source(self) -> NamedTensorSource:
        return NamedTensorSource(module_tensors(self.model))

    def on_shutdown(self) -> None:
        del self.model


class Nll(LossFunction):
    def __call__(self, inputs: Any, data: Any, **counts: Any) -> Any:
        weights = data["token_mask"] * data["sample_mask"][:, None]
        loss = -(inputs * weights).sum() / counts["global_valid_toks"]
        worst = float((-inputs * weights).detach().max())
        return loss, {"share": float(loss.detach()), "nll_max": worst}


def batch() -> BatchedDataDict[Any]:
    ids = torch.randint(VOCABULARY, (8, 13), generator=torch.Generator().manual_seed(5))
    lengths = torch.tensor([13, 2, 7, 5, 12, 4, 9, 3])
    mask = torch.tensor([1.0, 1, 0, 1, 1, 1, 0, 1])
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths, "sample_mask": mask})


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ({}, [8, 1]),
        ({"sequence_packing": {"enabled": True}}, [1, 8]),
        ({"sequence_packing": {"enabled": True}, "train_micro_batch_size": 4}, [4, 4, 1]),
        ({"sequence_packing": {"enabled": True}, "logprob_batch_size": 4}, [1, 8]),
        (
            {
                "sequence_packing": {"enabled": True, "train_mb_tokens": 9000},
                "train_micro_batch_size": 4,
            },
            [9],
        ),
        ({"dynamic_batching": {"enabled": True}}, [8, 1]),
    ],
    ids=["padded", "packed", "packed rows", "scoring alone", "tokens before rows", "dynamic"],
)
def test_a_bound_that_is_not_configured_lets_every_row_pass(
    config: dict[str, Any], sizes: list[int]
) -> None:
    lengths = torch.tensor([100, 5000, 80, 10, 70, 60, 50, 40, 90])
    plan = Microbatching(config).plan(lengths, "train", width=5000)
    assert sorted(map(len, plan)) == sorted(sizes)
    pairs = Microbatching({"sequence_packing": {"enabled": True}})
    plan = pairs.plan(torch.tensor([3000, 3000, 9, 9]), "train", width=3000, group_size=2)
    assert sorted(torch.cat(plan).tolist()) == [0, 1, 2, 3]


def test_a_policy_without_topk_refuses_and_none_works_after_shutdown() -> None:
    policy = Bigram()
    with pytest.raises(CapabilityError, match="top-k"):
        policy.get_topk_logits(batch(), 2)
    assert policy.shutdown()
    assert policy.shutdown()
    for call in (policy.get_logprobs, lambda rows: policy.train(rows, Nll())):
        with pytest.raises(LifecycleError, match="after shutdown"):
            call(batch())


def test_a_source_from_before_a_step_is_not_confirmed() -> None:
    policy = Bigram()
    source = policy.refit_source()
    policy.train(batch(), Nll())
    with pytest.raises(LifecycleError, match="during a refit, at weight"):
        list(source.tensors(["weight"]))
    policy.shutdown()


# -- several ranks --------------------------------------------------------------------------------


def on_ranks(
    count: int,
    parts: int,
    work: Callable[[Any], Any],
    kind: type[Bigram] = Bigram,
    **config: Any,
) -> list[Any]:
    """Runs ``count`` ranks in threads, neighbours of which share rows; the last one reports."""
    store, each = dist.HashStore(), count // parts
    # torch releases the GIL while it frees a group. If garbage collection in one rank's thread
    # frees one amid get_rng_state, that thread keeps torch's lock of random numbers, and a thread
    # that has the GIL and wants the lock waits for ever. So groups of earlier tests are freed now,
    # and those of this one after all ranks have ended.
    gc.collect()
    groups = []

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, count, timedelta(seconds=20))
        groups.append(group)
        shared = DataParallelRank(rank // each, parts, rank % each == each - 1)
        policy = kind(ranks=RankGroup.of(group), data_parallel=shared, **config)
        try:
            return work(policy)
        except Exception as error:
            return error
        finally:
            policy.shutdown()

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def rows_of(policy: Bigram) -> BatchedDataDict[Any]:
    assert policy.data_parallel is not None
    mine = range(policy.data_parallel.rank, 8, policy.data_parallel.size)
    return batch().select_indices(list(mine))


@pytest.mark.parametrize(("count", "parts"), [(2, 2), (4, 2), (2, 1)])
def test_ranks_that_share_rows_count_once(count: int, parts: int) -> None:
    alone = Bigram().train(batch(), Nll())
    results = on_ranks(count, parts, lambda policy: policy.train(rows_of(policy), Nll()))
    for result in results:
        for key in ("loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "nll_max"):
            assert result[key] == pytest.approx(alone[key], rel=1e-5), (key, result)
    assert all(result == results[0] for result in results)


def test_a_rank_that_cannot_write_leaves_no_checkpoint_anywhere(tmp_path: Path) -> None:
    class Full(Bigram):
        def write_checkpoint(self, directory: Path) -> None:
            if self.ranks.rank:
                raise OSError("no space left on device")
            super().write_checkpoint(directory)

    store = dist.HashStore()

    def run(rank: int) -> Any:
        group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))
        policy = Full(ranks=RankGroup.of(group))
        with pytest.raises((CheckpointError, TrainingError), match="no space"):
            policy.save_checkpoint(tmp_path / "ck")
        with pytest.raises(CheckpointError, match="no checkpoint"):
            policy.load_checkpoint(tmp_path / "ck")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    assert list(tmp_path.iterdir()) == []


def refuses(policy: Bigram, calls: Any, match: str) -> None:
    """Each call raises at once, on this rank as on all others, and changes nothing."""
    before = policy.model.weight.detach().clone()
    for call in calls:
        with pytest.raises(LifecycleError, match=match) as raised:
            call(policy)
        assert "load a checkpoint" in raised.value.fix or "load one checkpoint" in raised.value.fix
    assert torch.equal(policy.model.weight, before)


def test_ranks_of_other_weights_refuse_at_once_until_all_have_loaded(tmp_path: Path) -> None:
    def go_apart(policy: Bigram) -> Any:
        policy.train(rows_of(policy), Nll())
        policy.save_checkpoint(tmp_path / "ck")
        expected = policy.train(rows_of(policy), Nll())
        if policy.ranks.rank:
            with policy.changes.declared(), torch.no_grad():
                policy.model.weight += 1
        calls = (
            lambda policy: policy.train(rows_of(policy), Nll()),
            lambda policy: policy.train(rows_of(policy), Nll(), eval_mode=True),
            lambda policy: policy.save_checkpoint(tmp_path / "mixture"),
        )
        refuses(policy, calls, r"rank 1 of 2 .* has changed its weights 3 times, rank 0 2 times")
        policy.load_checkpoint(tmp_path / "ck")
        return expected, policy.train(rows_of(policy), Nll())

    for expected, again in on_ranks(2, 2, go_apart):
        assert again == expected
    assert [path.name for path in tmp_path.iterdir()] == ["ck"]


def load_or_train(policy: Bigram, path: Path, *, load: bool) -> None:
    if load:
        policy.load_checkpoint(path)
    else:
        policy.train(rows_of(policy), Nll())


class FailsMidway(Bigram):
    """The last rank fails in the midst of what ``fails`` names."""

    fails = ""

    def failing(self, what: str) -> None:
        if self.fails == what and self.ranks.rank == self.ranks.size - 1:
            raise RuntimeError("out of memory")

    def gradient_norm(self) -> float:
        norm = super().gradient_norm()
        self.failing("the norm")
        return norm

    def take_step(self, lr: float, scale: float) -> None:
        super().take_step(lr, scale)
        self.failing("the step")

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        put = super().read_checkpoint(directory)
        self.failing("reading")

        def putting() -> None:
            put()
            self.failing("the load")

        return putting


@pytest.mark.parametrize("what", ["the norm", "reading"])
def test_what_fails_on_one_rank_before_a_change_changes_none(tmp_path: Path, what: str) -> None:
    def fail(policy: FailsMidway) -> Any:
        policy.save_checkpoint(tmp_path / "ck")
        policy.train(rows_of(policy), Nll())
        before = policy.model.weight.detach().clone()
        policy.fails = what
        with pytest.raises((RuntimeError, TrainingError), match="out of memory"):
            load_or_train(policy, tmp_path / "ck", load=what == "reading")
        assert torch.equal(policy.model.weight, before)
        assert policy.steps == 1
        policy.fails = ""
        return policy.train(rows_of(policy), Nll())

    first, second = on_ranks(2, 2, fail, FailsMidway)
    assert first == second
    assert first["loss"] > 0


def test_ranks_that_are_given_other_checkpoints_load_none(tmp_path: Path) -> None:
    def load(policy: Bigram) -> Any:
        for name in ("0", "1"):
            policy.save_checkpoint(tmp_path / name)
            policy.train(rows_of(policy), Nll())
        before = policy.model.weight.detach().clone()
        with pytest.raises(CheckpointError, match=r"rank 1 of 2 .*another checkpoint than rank 0"):
            policy.load_checkpoint(tmp_path / str(policy.ranks.rank))
        assert torch.equal(policy.model.weight, before)
        return policy.train(rows_of(policy), Nll())

    first, second = on_ranks(2, 2, load)
    assert first == second
    assert first["loss"] > 0
