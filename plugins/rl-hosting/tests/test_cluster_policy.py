"""A policy in workers: what is said where, if another worker reports than sends."""

from __future__ import annotations

from typing import Any

import torch

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import DataParallelRank
from rl_hosting.cluster.policy import RemotePolicy


class TwoStages:
    """A named test double of workers that share a model: the first sends, the second reports."""

    name = "two stages"

    def attributes(self, name: str) -> list[Any]:
        assert name == "data_parallel"
        return [DataParallelRank(0, 1, False), DataParallelRank(0, 1, True)]

    def attribute(self, rank: int, name: str) -> Any:
        return [{"weights_version": 7, "weights_origin": 5}, {}][rank][name]

    def call_all(self, method: str, data: Any, greedy: bool) -> list[Any]:
        rows = {"weights_version": torch.zeros(2).long(), "weights_origin": torch.zeros(2).long()}
        return [None, BatchedDataDict(rows)]


def test_rows_of_a_policy_are_of_the_version_that_its_sending_worker_counts():
    policy = RemotePolicy.__new__(RemotePolicy)
    policy.config, policy._group = {}, TwoStages()  # type: ignore[assignment]
    policy._connect()
    rows = policy.generate(BatchedDataDict({"input_ids": torch.ones(2, 1).long()}))
    assert rows["weights_version"].tolist() == [7, 7]
    assert rows["weights_origin"].tolist() == [policy.weights_origin] * 2 == [5, 5]
