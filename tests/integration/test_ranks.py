"""One policy over several ranks does what one process does, and refits are bit for bit."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import sharded
import torch
from sharded import batch, engine_of, same, sources, weights

from rl_backends.changes import WeightChanges
from rl_core.errors import LifecycleError
from rl_core.futures import as_concurrent, spawn, wait
from rl_core.weights import refit
from rl_hosting import LocalCluster, local_cluster
from rl_losses import NLLLossFn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from rl_hosting.cluster import RemotePolicy

pytestmark = pytest.mark.usefixtures("one_thread")
SOON = 60.0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return sharded.manifest_in(tmp_path_factory.mktemp("site"))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 2), id="tp2"),
        pytest.param((4, 2), id="tp2-dp2"),
        pytest.param((4, 4), id="tp4", marks=pytest.mark.full),
    ],
)
def policy(request: pytest.FixtureRequest, manifest: Any, model: Path) -> Iterator[RemotePolicy]:
    ranks, shards = request.param
    with (
        LocalCluster(ranks, threads=1) as cluster,
        sharded.sharded_policy(cluster, manifest, model, shard_ranks=shards) as policy,
    ):
        yield policy


def test_every_rank_has_a_part_alone_and_steps_and_scores_are_those_of_one_process(
    policy: RemotePolicy, model: Path
) -> None:
    alone, data = sharded.alone(model), batch()
    one_copy = policy._rows.size == 1
    for _ in range(2):
        given = policy.train(data, NLLLossFn(), gbs=4)
        expected = alone.train(data, NLLLossFn(), gbs=4)
        for key in ("loss", "grad_norm", "global_valid_toks", "lr"):
            assert given[key] == pytest.approx(expected[key], rel=0 if one_copy else 1e-5), key
    scores = policy.get_logprobs(data)["logprobs"]
    torch.testing.assert_close(scores, alone.get_logprobs(data)["logprobs"], rtol=1e-4, atol=1e-4)
    engine = engine_of(model)
    refit(policy, engine, deadline_s=SOON)
    if one_copy:  # with several copies, gradients are summed in another order
        assert scores.equal(alone.get_logprobs(data)["logprobs"])
        assert same(weights(engine), weights(alone))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"verify": "installed"},
        {"verify": "none"},
        {"isolation": "staged"},
        {"transport": "collective", "address": "127.0.0.1"},
        {"bucket_bytes": 4096},
    ],
    ids=str,
)
def test_every_way_to_refit_is_bit_for_bit(
    policy: RemotePolicy, model: Path, options: dict[str, Any]
) -> None:
    engine = engine_of(model)
    before = sources(policy)
    report = refit(policy, engine, deadline_s=SOON, **options)
    expected = engine_of(model)
    refit(policy, expected, deadline_s=SOON)
    assert same(weights(engine), weights(expected))
    assert report.mode == "packed"
    assert all(bool(tensor.any()) for name, tensor in weights(engine).items() if "weight" in name)
    after = sources(policy)
    assert [rank["made"] - old["made"] for rank, old in zip(after, before, strict=True)] == [
        2 + ("transport" in options),
        *[2] * (len(after) - 1),
    ]
    assert all(rank["made"] == rank["closed"] for rank in after)


def test_a_delta_skips_the_same_tensors_on_every_rank(policy: RemotePolicy, model: Path) -> None:
    engine = engine_of(model)
    first = refit(policy, engine, deadline_s=SOON)
    again = refit(policy, engine, delta=True, deadline_s=SOON)
    assert (again.skipped, again.tensors) == (first.tensors, 0)
    name = next(n for n in weights(engine) if n.endswith("mlp.up_proj.weight"))
    with torch.no_grad():
        engine.model.state_dict(keep_vars=True)[name].zero_()
    known = engine._receiver.known
    parts = [part for part in known if part.startswith(f"{name}[")]  # one of each rank
    for part in parts:
        del known[part]
    assert len(parts) > 1
    partly = refit(policy, engine, delta=True, deadline_s=SOON)
    assert partly.tensors == 1
    late = engine_of(model)
    refit(policy, late, version=policy.weights_version, deadline_s=SOON)
    assert same(weights(engine), weights(late))


def test_a_ticket_is_bit_for_bit_and_closes_their_sources(
    policy: RemotePolicy, model: Path
) -> None:
    engine, expected = engine_of(model), engine_of(model)
    [keys] = policy.prepare_weights_for_ipc()
    assert engine.update_weights(policy.get_weights_ipc_handles(keys))
    refit(policy, expected, deadline_s=SOON)
    assert same(weights(engine), weights(expected))
    assert all(rank["made"] == rank["closed"] for rank in sources(policy))


def test_a_step_in_the_midst_of_a_refit_ends_it_on_all_ranks(
    policy: RemotePolicy, model: Path
) -> None:
    engine = engine_of(model)
    info = policy.prepare_refit_info()
    engine.prepare_refit_info(info)
    begin = policy._group.begin_refit  # the step is not to come before it on any rank
    sending = begin("send_weights", deadline_s=SOON)
    policy.train(batch(), NLLLossFn(), gbs=8)
    receiving = engine.receive_weights(deadline_s=SOON)
    for future in sending:
        with pytest.raises(Exception, match=r"weights changed|ended the refit"):
            wait(future, SOON)
    # As ``refit`` does: on a busy machine, ranks notice the step before the engine has come.
    engine.cancel_refit(info["number"])
    with pytest.raises(Exception, match=r"weights changed|cancelled"):
        wait(receiving, SOON)
    with pytest.raises(LifecycleError, match="weights changed"):
        wait(sending[0], SOON)
    refit(policy, engine, deadline_s=SOON)
    assert all(rank["made"] == rank["closed"] for rank in sources(policy))


@pytest.mark.parametrize("late", [None, 0, 1])
def test_refits_that_others_follow_or_that_are_refused_end_on_all_ranks(
    policy: RemotePolicy, model: Path, late: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begins: list[Future[Any]] = []
    second = threading.Event()

    def spawn_late(name: str, function: Callable[[], Any]) -> Future[Any]:
        """The thread of the first refit's call runs late, as on a busy machine."""
        if not (name.startswith("begin-") and name.endswith(f"worker-{late}")):
            return spawn(name, function)
        one_waits = not begins
        begins.append(spawn(name, lambda: (one_waits and second.wait(0.5), function())[1]))
        begins[-1].add_done_callback(lambda _: second.set())
        return begins[-1]

    monkeypatch.setattr(local_cluster, "spawn", spawn_late)
    engine = engine_of(model)
    info = policy.prepare_refit_info()
    engine.prepare_refit_info(info)
    superseded = policy.send_weights(deadline_s=SOON)
    sending = policy.send_weights(deadline_s=SOON)
    for future in superseded:  # before an engine can answer it
        with pytest.raises(Exception, match=r"newer refit|ended the refit"):
            wait(future, SOON)
    calls = map(
        as_concurrent,
        [*sending, *engine.receive_weights(number=info["number"] + 1, deadline_s=SOON)],
    )
    assert not [error for call in calls if (error := call.exception(SOON))]
    fresh = engine_of(model)
    fresh.prepare_refit_info(policy.prepare_refit_info())
    refused = policy.send_weights(deadline_s=SOON, mode="direct")
    fresh.receive_weights(deadline_s=SOON)
    for future in refused:
        with pytest.raises(Exception, match=r"not possible|ended the refit"):
            wait(future, SOON)
    refit(policy, fresh, deadline_s=SOON)  # the description before it had no refit
    assert all(rank["made"] == rank["closed"] for rank in sources(policy))


def test_a_rank_at_another_step_is_named_and_refused_until_all_load(
    policy: RemotePolicy, model: Path, tmp_path: Path
) -> None:
    engine, apart = engine_of(model), WeightChanges()
    refit(policy, engine, deadline_s=SOON)
    policy.save_checkpoint(tmp_path / "before")
    expected = policy.train(batch(), NLLLossFn(), gbs=8)["loss"]
    before, version = weights(engine), engine._receiver.version
    policy._group.call(1, "__setattr__", "changes", apart)  # as if it had never taken a step
    begun = time.monotonic()
    for verify in ("wire", "installed"):
        with pytest.raises(
            LifecycleError, match=r"rank 1 of .* is at step or load number 0, rank 0 at \d"
        ):
            refit(policy, engine, deadline_s=SOON, verify=verify)
    for call in (
        lambda: policy.train(batch(), NLLLossFn(), gbs=8),
        lambda: policy.save_checkpoint(tmp_path / "mixture"),
    ):
        with pytest.raises(LifecycleError, match=r"rank 1 of .* load number 0"):
            call()
    assert time.monotonic() - begun < SOON / 2
    engine._receiver.check()  # not torn
    assert engine._receiver.version == version
    assert same(weights(engine), before)
    assert [path.name for path in tmp_path.iterdir()] == ["before"]
    policy.load_checkpoint(tmp_path / "before")
    assert policy.train(batch(), NLLLossFn(), gbs=8)["loss"] == expected
    refit(policy, engine, deadline_s=SOON)
    assert all(rank["made"] == rank["closed"] for rank in sources(policy))


def test_a_checkpoint_is_that_of_one_process(
    policy: RemotePolicy, manifest: Any, model: Path, tmp_path: Path
) -> None:
    policy.train(batch(), NLLLossFn(), gbs=8)
    policy.save_checkpoint(tmp_path)
    alone = sharded.ReferencePolicy(str(model), **sharded.TRAINING, resume_from=str(tmp_path))
    data = batch()
    assert policy.get_logprobs(data)["logprobs"].equal(alone.get_logprobs(data)["logprobs"])
    cluster, shards = LocalCluster(2, threads=1), {"shard_ranks": 2}
    resumed = {"resume_from": str(tmp_path), **shards}
    with cluster, sharded.sharded_policy(cluster, manifest, model, **resumed) as other:
        given, expected = (p.train(data, NLLLossFn(), gbs=8) for p in (other, alone))
        assert given["loss"] == expected["loss"]
        assert other.get_logprobs(data)["logprobs"].equal(alone.get_logprobs(data)["logprobs"])
