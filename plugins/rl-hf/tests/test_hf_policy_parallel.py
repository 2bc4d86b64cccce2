"""Two data-parallel workers do what one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hf_ranks import run_ranks

from rl_backends.policy.ranks import RankGroup
from rl_core.errors import ConfigError
from rl_core.interfaces import WorkerContext

WORKER = """
    import json, sys, torch
    from rl_core.batch import BatchedDataDict
    from rl_core.errors import RLError
    from rl_core.interfaces import WorkerContext
    from rl_core.weights import refit
    from rl_hf.generation import HuggingFaceGeneration
    from rl_hf.policy import HuggingFacePolicy
    from rl_losses import NLLLossFn

    model, directory, rank, size, port = sys.argv[1:3] + [int(a) for a in sys.argv[3:]]
    ids = torch.randint(3, 272, (8, 20), generator=torch.Generator().manual_seed(7))
    data = BatchedDataDict({
        "input_ids": ids,
        "input_lengths": torch.tensor([20, 3, 11, 7, 16, 5, 9, 12]),
        "sample_mask": torch.tensor([1.0, 1, 0, 1, 1, 0, 1, 0]),
    })
    # Of the second global batch, no row of rank 1 counts.
    mine = data.select_indices([i for i in range(8) if i % size == rank])
    worker = WorkerContext(rank, size, rank, "127.0.0.1", port) if size > 1 else None
    options = {"optimizer": {"lr": 1e-3, "eps": 1e-3}, "reference": "none"}
    policy = HuggingFacePolicy.from_config(
        {"backend": "hf", "model_name": model, **options}, worker=worker
    )
    steps = policy.train(mine, NLLLossFn(), gbs=4)
    evaluation = policy.train(mine, NLLLossFn(), eval_mode=True)["loss"]
    policy.save_checkpoint(f"{directory}/checkpoint")
    resumed = policy.train(mine, NLLLossFn())["loss"]
    policy.load_checkpoint(f"{directory}/checkpoint")
    if rank == 0:
        engine = HuggingFaceGeneration(model)
        assert refit(policy, engine).mode == "direct"
        engine.shutdown()
    again = policy.train(mine, NLLLossFn())["loss"]
    result = {
        "steps": steps, "evaluation": evaluation, "resumed": [resumed, again],
        "weights": sum(float(p.double().abs().sum()) for p in policy.model.parameters()),
        "sends": len(
            policy.send_weights(deadline_s=5)
            + policy.init_collective("127.0.0.1", 1, size + 1, train_world_size=size)
            + policy.broadcast_weights_for_collective(deadline_s=5)
        ) if rank else None,
        "info": policy.prepare_refit_info() is not None,
    }
    if size > 1:
        mine["input_lengths"][0] = 99 if rank else 1
        try:
            policy.train(mine, NLLLossFn())
        except RLError as error:
            result["error"] = [type(error).__name__, str(error)]
    policy.shutdown()
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def results(tiny, tmp_path_factory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("parallel")
    (directory / "alone").mkdir()
    (directory / "pair").mkdir()
    [alone] = run_ranks(WORKER, 1, tiny(), directory / "alone")
    return alone, run_ranks(WORKER, 2, tiny(), directory / "pair")


def test_two_workers_step_as_one_does(results):
    alone, pair = results
    for other in pair:
        for key in ("loss", "grad_norm", "global_valid_toks", "global_valid_seqs", "nll"):
            history = other["steps"]["step_metrics"][key]
            assert history == pytest.approx(alone["steps"]["step_metrics"][key], rel=1e-5)
        assert other["weights"] == pytest.approx(alone["weights"], rel=1e-7)
        assert other["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-5)


def test_both_workers_hold_the_same_weights_and_results(results):
    _, (first, second) = results
    assert first["weights"] == second["weights"]
    assert first["steps"] == second["steps"]


def test_both_workers_resume_from_one_checkpoint_and_after_a_refit_of_rank_0(results):
    for result in (results[0], *results[1]):
        assert len(set(result["resumed"])) == 1


def test_only_rank_0_sends_a_refit(results):
    _, (first, second) = results
    assert second["sends"] == 0
    assert (first["info"], second["info"]) == (True, False)


def test_a_bad_row_of_one_worker_stops_all_of_them(results):
    _, (first, second) = results
    assert second["error"][0] == "DataError"
    assert first["error"][0] == "TrainingError"
    assert "rank 1" in first["error"][1]
    assert "padded width" in first["error"][1]


def test_workers_without_a_port_are_refused():
    with pytest.raises(ConfigError, match="no port"):
        RankGroup(WorkerContext(rank=0, world_size=2))


def test_a_group_of_gpus_is_aborted_before_it_is_dropped():
    aborted: list[str] = []
    alone = RankGroup()
    alone.close()
    alone._messages = object()
    alone._tensors = SimpleNamespace(abort=lambda: aborted.append("tensors"))
    alone.close()
    alone.close()
    assert aborted == ["tensors"]
