"""Rows over replicas: where they go, and that all rows of a call are of one version."""

from __future__ import annotations

import concurrent.futures
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prompt_rows import single_tokens

from rl_backends import ModelFacts
from rl_backends.generation.prompts import row_seeds
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError
from rl_hosting.cluster.generation import RemoteGeneration
from rl_hosting.cluster.sharding import Loads


class Replicas:
    """A named test double of a group of workers: each answers at its version, and counts rows.

    Args:
        versions: Of each replica; its origin is that plus 100.
        refit: Called with the number of each call, from 1, before it is answered.
    """

    def __init__(self, versions: list[int], refit: Callable[[int], None] = lambda _: None) -> None:
        self.versions = versions
        self.size = len(versions)
        self.calls: list[list[int]] = [[] for _ in versions]
        self.seeds: dict[int, int] = {}
        self._refit = refit
        self._counter = itertools.count(1)

    def attributes(self, name: str) -> list[Any]:
        if name == "weights_version":
            return list(self.versions)
        if name == "weights_origin":
            return [version + 100 for version in self.versions]
        return [{"receiver_count": 1, "facts": ModelFacts(0, (1,), 100, 64)}[name]] * self.size

    def submit_generate(self, rank: int, data: BatchedDataDict[Any], greedy: bool) -> Any:
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self._refit(next(self._counter))
        first = data["input_ids"][:, 0]
        self.calls[rank] += first.tolist()
        self.seeds |= dict(zip(first.tolist(), data.get("seed", first).tolist(), strict=True))
        rows = len(first)
        done.set_result(
            BatchedDataDict(
                {
                    "output_ids": torch.stack([first, first + 50], 1),
                    "logprobs": torch.zeros(rows, 2),
                    "generation_lengths": torch.ones(rows, dtype=torch.int64),
                    "unpadded_sequence_lengths": torch.full((rows,), 2),
                    "truncated": torch.ones(rows, dtype=torch.bool),
                    "weights_version": torch.full((rows,), self.versions[rank]),
                    "weights_origin": torch.full((rows,), self.versions[rank] + 100),
                }
            )
        )
        return done

    def wait(self, futures: Any) -> list[Any]:
        return [future.result(0) for future in futures]


def backend(replicas: Replicas, **config: Any) -> RemoteGeneration:
    made = RemoteGeneration.__new__(RemoteGeneration)
    made.config = {"max_new_tokens": 1, **config}
    made._group = replicas  # type: ignore[assignment]
    made._connect()
    return made


@pytest.mark.parametrize("after", [8, 1])
def test_rows_that_a_refit_overtook_are_generated_anew(after):
    """Also where the versions go back, as those of another trainer may."""

    def refit(call: int) -> None:
        if call == 2:  # between the first replica's rows and the second's
            replicas.versions[:] = [after, after]

    replicas = Replicas([7, 7], refit)
    output = backend(replicas).generate(single_tokens(2, 3, 4, 5))
    assert output["weights_version"].tolist() == [after] * 4
    assert output["weights_origin"].tolist() == [after + 100] * 4
    assert output["output_ids"].tolist() == [[2, 52], [3, 53], [4, 54], [5, 55]]
    again = sorted(itertools.chain(*replicas.calls))
    assert len(again) == 6  # two of four were of version 7


def test_a_call_waits_for_a_refit_that_has_not_reached_all_replicas(monkeypatch):
    replicas = Replicas([7, 8])
    looks = []

    def attributes(name: str) -> list[Any]:
        if name == "weights_version":
            looks.append(list(replicas.versions))
            if len(looks) == 4:
                replicas.versions[0] = 8
        return Replicas.attributes(replicas, name)

    monkeypatch.setattr(replicas, "attributes", attributes)
    output = backend(replicas).generate(single_tokens(2, 3))
    assert output["weights_version"].tolist() == [8, 8]
    assert len(looks) >= 4


def test_a_single_row_goes_to_the_replica_with_the_least_to_do():
    replicas = Replicas([1, 1, 1])
    generation = backend(replicas)
    held = generation._loads.assign([100])  # a long call that goes on
    for token in range(10, 16):
        generation.generate(single_tokens(token))
    [busy] = held
    assert replicas.calls[busy] == []


@pytest.mark.parametrize("size", [1, 3])
def test_row_i_draws_from_stream_i_on_any_number_of_replicas(size):
    replicas = Replicas([1] * size)
    generation = backend(replicas, seed=5)
    generation.generate(single_tokens(10))
    generation.generate(single_tokens(11, 12, 13))
    generation.generate(single_tokens(40), greedy=True)
    with pytest.raises(DataError):
        generation.generate(single_tokens(100))  # beyond the vocabulary
    generation.generate(single_tokens(15, 16))
    streams = row_seeds(5, 7).tolist()
    drawn = {row: replicas.seeds[row] for row in (10, 11, 12, 13, 15, 16)}
    assert drawn == {10 + i: streams[i] for i in (0, 1, 2, 3, 5, 6)}


@given(
    parts=st.integers(1, 5),
    calls=st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=8),
)
def test_loads_differ_by_no_more_than_one_item_and_end_at_nothing(
    parts: int, calls: list[list[int]]
) -> None:
    loads = Loads(parts)
    given_out = []
    for sizes in calls:
        shards = loads.assign(sizes)
        assert sorted(itertools.chain(*shards.values())) == list(range(len(sizes)))
        given_out.append((shards, sizes))
        assert max(loads._loads) - min(loads._loads) <= 40
    for shards, sizes in given_out:
        for part, items in shards.items():
            for item in items:
                loads.release(part, sizes[item])
    assert loads._loads == [0] * parts
