"""Errors as text, and rows dealt to workers: what needs no Ray."""

from __future__ import annotations

import pickle
import time
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError, RefitPeerError, RLError, WorkerError
from rl_core.futures import spawn
from rl_hosting.cluster.launcher import wait_for_all
from rl_hosting.cluster.remote_error import worker_error
from rl_hosting.cluster.sharding import deal, training_shards

LENGTHS = st.lists(st.integers(1, 50), max_size=40)
PARTS = st.integers(1, 5)


def caught(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


class Odd(ValueError):
    """Cannot be made from its text."""

    def __init__(self, one: object, two: object) -> None:
        super().__init__("odd text")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (Odd(1, 2), ValueError),
        (FileNotFoundError(2, "no file", "here"), FileNotFoundError),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "no text"), UnicodeError),
        (ExceptionGroup("several", [ValueError("one")]), Exception),
        (StopIteration("at the end"), StopIteration),
        (RefitPeerError("gone", phase="SEAL", peer="receiver 1"), RefitPeerError),
    ],
)
def test_the_error_survives_pickling_with_its_known_class(
    error: Exception, kind: type[Exception]
) -> None:
    sent = worker_error(caught(error), "worker-3")
    arrived = pickle.loads(pickle.dumps(sent))
    assert isinstance(arrived, kind)
    assert isinstance(arrived, WorkerError)
    assert str(arrived) == str(sent)
    assert arrived.remote_type.endswith(type(error).__qualname__)
    assert "raise error" in arrived.remote_traceback


def test_the_message_names_worker_class_and_text() -> None:
    assert str(worker_error(caught(Odd(1, 2)), "worker-3")) == "Odd in worker-3: odd text"


def test_details_and_fix_of_our_errors_travel_as_plain_values() -> None:
    error = worker_error(RLError("bad", fix="mend", rows=(1, 2), made_of=torch.float32), "w")
    assert error.fix == "mend"
    assert error.details["rows"] == [1, 2]
    assert error.details["made_of"] == "torch.float32"


def test_an_error_that_came_from_another_worker_stays_as_it_is() -> None:
    inner = worker_error(KeyError("k"), "inner")
    assert worker_error(inner, "outer") is inner


@given(LENGTHS, PARTS)
def test_every_item_is_dealt_once_and_in_order(lengths: list[int], parts: int) -> None:
    table = deal(torch.tensor(lengths, dtype=torch.int64), parts)
    real = [row[row < len(lengths)].tolist() for row in table]
    assert sorted(row for part in real for row in part) == list(range(len(lengths)))
    assert all(row == sorted(row) for row in real)
    assert max(map(len, real)) - min(map(len, real)) <= 1


def rows(lengths: list[int]) -> BatchedDataDict[Any]:
    count = torch.tensor(lengths, dtype=torch.int64)
    ids = (torch.arange(1, len(lengths) + 1)[:, None]).expand(-1, 50).clone()
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": count, "sample_mask": torch.ones(len(lengths))}
    )


@given(st.integers(1, 4), st.integers(1, 5), st.sampled_from([1, 2, 3]), PARTS, st.data())
def test_each_step_has_its_own_rows_in_whole_groups(
    steps: int, groups: int, group_size: int, parts: int, draw: st.DataObject
) -> None:
    gbs = groups * group_size
    count = steps * gbs
    lengths = draw.draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    shards, padded = training_shards(rows(lengths), parts, gbs, group_size)
    local = padded // parts
    assert {shard.size for shard in shards} == {steps * local}
    for step in range(steps):
        seen = []
        for shard in shards:
            part = shard.slice(step * local, (step + 1) * local)
            members = (part["input_ids"][:, 0] - 1).view(-1, group_size)
            assert (members[:, 0] % group_size == 0).all()
            assert (members.diff(dim=1) == 1).all()
            seen += members.flatten()[part["sample_mask"] == 1].tolist()
        assert sorted(seen) == list(range(step * gbs, (step + 1) * gbs))


def test_a_global_batch_that_splits_groups_is_refused() -> None:
    with pytest.raises(DataError, match="group size 2"):
        training_shards(rows([1] * 6), 2, 3, 2)


def test_a_global_batch_of_no_rows_is_refused() -> None:
    ones = torch.ones(4, 1, dtype=torch.int64)
    batch = BatchedDataDict({"input_ids": ones, "input_lengths": ones[:, 0]})
    with pytest.raises(DataError, match="global batch size 0"):
        training_shards(batch, 2, 0, 1)


def test_a_shutdown_waits_for_the_workers_after_one_that_fails() -> None:
    failing = spawn("failing", lambda: 1 / 0)
    slow = spawn("slow", lambda: time.sleep(0.2))
    with pytest.raises(ZeroDivisionError):
        wait_for_all([failing, slow])
    assert slow.done()
