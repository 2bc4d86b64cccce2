"""Refits of a foreign trainer's module with DTensors, called on all of its ranks."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mesh_ranks import MeshRank, Net
from patience import enough_for
from remote import Remote
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_backends.mesh import mesh_members
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    LifecycleError,
    RefitAborted,
    RefitPeerError,
)
from rl_core.ports import free_port
from rl_core.weights import refit

#: The first two are of one trainer.
MESHES = {"first": [0, 1], "second": [0, 3, 1], "third": [0, 2]}

TRAIN, CONVERT = ("train",), ("convert",)

pytestmark = pytest.mark.xdist_group("mesh ranks")


class Ranks:
    """The processes of a trainer."""

    def __init__(self, size: int) -> None:
        port = free_port()
        self.of = [Remote(MeshRank, rank, size, port) for rank in range(size)]

    def __call__(self, name: str, *arguments: Any, **options: Any) -> list[Any]:
        """What all of them return; errors are results, too."""
        for rank in self.of:
            rank.start(name, *arguments, **options)
        return [result_of(rank) for rank in self.of]

    def close(self) -> None:
        for rank in self.of:
            rank.process.kill()
            rank.process.join()


def result_of(rank: Remote) -> Any:
    try:
        return rank.result()
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def agree(ranks: Ranks, kind: str, dtype: str = "float32") -> None:
    """Refits of the sharded module are those of a module that one process has, bit for bit."""
    ranks("build", kind, engine=dtype)
    alone = MeshRank.__new__(MeshRank)
    alone.model, alone.rank = Net(1), 0
    alone.engine = Net(99, dtype=getattr(torch, dtype))
    alone.optimizer = torch.optim.AdamW(alone.model.parameters(), lr=0.1)
    cases = [{"verify": "installed"}, {"isolation": "staged"}, {"delta": True}]
    cases += [{"transport": "collective"}] * (kind == "fsdp")
    for version, options in enumerate(cases, 1):
        reports = ranks("refit", **options)
        assert [r["version"] for r in reports] == [version] * len(ranks.of), reports
        assert all(r == reports[0] for r in reports)
        packed = dtype != "float32" or "transport" in options
        assert reports[0]["mode"] == ("packed" if packed else "direct"), reports[0]["fallback"]
        refit(alone.model, alone.engine)
        state = ranks.of[0].state()
        assert state.keys() == alone.state().keys()
        for name, tensor in alone.state().items():
            assert torch.equal(tensor, state[name]), name
        ranks("change")
        alone.change()


@pytest.mark.parametrize("kind", ["fsdp", "offloaded", "tensor parallel"])
def test_a_sharded_module_is_refit_as_one_that_is_whole(two: Ranks, kind: str) -> None:
    agree(two, kind)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["fsdp", "tensor parallel", "replicated", "both"])
def test_four_ranks_of_any_mesh_are_refit_as_one(four: Ranks, kind: str) -> None:
    agree(four, kind)


@pytest.mark.parametrize("kind", ["fsdp", "offloaded"])
def test_training_goes_on_as_if_nothing_had_moved(two: Ranks, kind: str) -> None:
    """With what FSDP gathers, clipped gradients, checkpoints and replaced parameters."""
    seen = []
    for mode in ("direct", "packed"):
        two("build", kind)
        for then in (
            TRAIN,
            ("load", 2, False),
            TRAIN,
            ("load", -1, True),
            TRAIN,
            CONVERT,
            TRAIN,
        ):
            reports = two("refit", mode=mode)
            assert [report["mode"] for report in reports] == [mode] * 2, reports
            seen.append((two.of[0].state(), two(*then)))
    half = len(seen) // 2
    for (one, trained), (other, right) in zip(seen[:half], seen[half:], strict=True):
        assert all(one[name].equal(tensor) for name, tensor in other.items())
        assert trained == right
    assert len({tuple(result) for _, result in seen[:half] if result != [None] * 2}) == 4


def test_a_kept_state_dict_of_shards_keeps_a_refit_packed_and_right(two: Ranks) -> None:
    two("build", "fsdp")
    two("keep_state")
    for version in (1, 2):
        reports = two("refit")
        assert [r["version"] for r in reports] == [version] * 2
        assert reports[0]["mode"] == "packed"
        assert "outside of the weight source" in reports[0]["fallback"]
        assert two.of[0].state()["up.bias"].equal(two("full", "up.bias")[0])
        two("change")
    two("keep_state", keep=False)
    assert two("refit")[0]["mode"] == "direct"


def test_a_call_that_fails_on_one_rank_puts_no_two_modules_together(two: Ranks) -> None:
    seconds = enough_for(lambda: two("build", "fsdp"), least=4.0)
    first, second = two.of
    second.start("refit", deadline_s=seconds)
    with pytest.raises(ConfigError):
        first.fail()
    first.build("fsdp", 2)  # of the same shapes
    first.start("refit", deadline_s=seconds)
    assert [type(result_of(rank)) for rank in two.of] == [RefitPeerError] * 2
    second.build("fsdp", 2)
    assert [r["version"] for r in two("refit")] == [1, 1]
    assert torch.equal(first.state()["down.bias"], Net(2).down.bias)


def test_a_module_that_is_sharded_between_two_refits(two: Ranks) -> None:
    two("build", "plain")
    assert two.of[0].refit()["version"] == 1
    assert isinstance(two("refit")[1], ConfigError)  # a module that is whole needs no other rank
    two("shard", "fsdp")
    reports = two("refit")
    assert reports[0] == reports[1]
    two("change")
    assert all(isinstance(r, dict) for r in two("refit"))


@pytest.mark.parametrize("kind", ["fsdp", "copies"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_changed_alone_is_named(two: Ranks, kind: str, rank: int) -> None:
    two("build", kind)
    two("refit")
    two.of[rank].change_alone(counted=True)
    before = two.of[0].state()
    errors = two("refit")
    assert [type(error) for error in errors] == [LifecycleError, RefitAborted], errors
    assert errors[0].details["rank"] == 1
    assert re.search(r"rank 1 of 2 .* has changed .* times, rank 0 \d+ times", str(errors[0]))
    assert all(tensor.equal(before[name]) for name, tensor in two.of[0].state().items())
    two.of[1 - rank].change_alone(counted=True)
    assert [r["version"] for r in two("refit")] == [2, 2]


@pytest.mark.parametrize("options", [{}, {"mode": "packed"}, {"delta": True}])
def test_copies_that_differ_are_not_committed(two: Ranks, options: dict[str, Any]) -> None:
    two("build", "copies")
    [report, _] = two("refit")
    assert report["compared_bytes"] == report["bytes"]
    two.of[1].change_alone(counted=False)
    errors = two("refit", **options)
    assert [type(error) for error in errors] == [LifecycleError, RefitAborted], errors
    assert errors[0].details["rank"] == 1
    assert "rank 1 of 2" in str(errors[0])
    two.of[0].change_alone(counted=False)
    assert [r["version"] for r in two("refit", **options)] == [2, 2]


def test_copies_that_are_not_compared_come_from_one_rank(two: Ranks) -> None:
    two("build", "copies")
    two.of[1].change_alone(counted=False)
    report = two("refit", verify="none")[0]
    assert isinstance(report, dict), report
    assert report["compared_bytes"] == 0
    state = two.of[0].state()
    assert all(tensor.equal(state[name]) for name, tensor in Net(1).named_parameters())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_nan_refuses_for_all(two: Ranks, rank: int) -> None:
    two("build", "fsdp")
    two("refit", check_finite="refuse")
    two.of[rank].spoil()
    for error in two("refit", check_finite="refuse"):
        assert "version 2 has NaN or infinity" in str(error)
        assert "up.weight" in str(error)
    assert torch.equal(two.of[0].state()["up.weight"], Net(1).up.weight)
    assert [r["version"] for r in two("refit", check_finite="warn")] == [2, 2]


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("before", [0, 1])
def test_a_rank_that_does_not_call_is_named_and_the_next_refit_works(
    two: Ranks, missing: int, before: int
) -> None:
    seconds = enough_for(lambda: two("build", "fsdp"), least=2.0)
    for _ in range(before):
        two("refit")
    begun = time.monotonic()
    two.of[1 - missing].start("refit", deadline_s=seconds)
    error = result_of(two.of[1 - missing])
    assert time.monotonic() - begun < 6 * seconds
    assert isinstance(error, RefitPeerError), error
    assert error.details["rank"] == missing
    two("change")
    results = two("refit")
    if missing == 1 and isinstance(results[1], RefitAborted):  # it got the end of the refit before
        results = two("refit")
    assert all(isinstance(r, dict) for r in results), results


def test_each_rank_and_all_engines_are_a_group_of_their_own(two: Ranks) -> None:
    for _ in range(4):  # each time, all groups are made anew
        two("build", "fsdp")
        two.of[0].two_engines()
        results = two("refit", transport="collective")
        assert all(isinstance(r, dict) for r in results), results
        one, other = two.of[0].received()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        assert torch.equal(one["down.bias"], Net(1).down.bias)


def test_a_tensor_on_a_mesh_of_other_ranks_is_named() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        meshes = {name: DeviceMesh("cpu", ranks) for name, ranks in MESHES.items()}
        tensors = {n: DTensor.from_local(torch.ones(2), mesh) for n, mesh in meshes.items()}
        with pytest.raises(CapabilityError, match=r"Net: third is on a mesh of the ranks \[0, 2\]"):
            mesh_members("Net", tensors)
        del tensors["third"]
        assert mesh_members("Net", tensors) == (0, 1, 3)
    finally:
        dist.destroy_process_group()


def test_nothing_is_left_of_a_module_that_no_longer_exists(two: Ranks) -> None:
    kept = []
    for _ in range(3):
        two("build", "fsdp")
        two("refit")
        kept.append(two("drop"))
    assert kept[1] == kept[2]
