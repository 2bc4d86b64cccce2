"""What real ranks give to refits after training: the tensors of an export, alike on all of them."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import multiprocessing

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.errors import LifecycleError
from rl_core.interfaces import WorkerContext
from rl_core.ports import free_port
from rl_megatron import MegatronPolicy

DEADLINE_S = 120.0
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERT, SEQUENCE = "expert_model_parallel_size", "sequence_parallel"
TIED, APART = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
OPTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-2, "weight_decay": 0.1},
    "refit_experts": "separate",
}
#: Ranks, a model, and how it is spread.
LAYOUTS: dict[str, tuple[int, str, dict[str, Any], dict[str, Any]]] = {
    "pp2-tied": (2, "qwen2", TIED, {PIPELINE: 2}),
    "tp2": (2, "qwen3", APART, {TENSOR: 2}),
    "tp2-pp2-tied": (4, "llama", {**TIED, "vocab_size": 269}, {TENSOR: 2, PIPELINE: 2}),
    "tp2-pp2-sp": (4, "qwen3", APART, {TENSOR: 2, PIPELINE: 2, SEQUENCE: True}),
    "dp2-pp2-tied": (4, "qwen2", TIED, {PIPELINE: 2, "torch_dtype": "bfloat16"}),
    "dp2-tp2": (4, "llama", {**APART, "num_key_value_heads": 4}, {TENSOR: 2}),
    "ep2": (2, "qwen3_moe", {}, {EXPERT: 2}),
    "ep2-tp2-sp": (4, "qwen3_moe", {}, {EXPERT: 2, TENSOR: 2, SEQUENCE: True}),
}
#: What every run tries here.
FEW = ("pp2-tied",)


def rank_of(rank: int, ranks: int, port: int, model: str, config: dict[str, Any], out: str) -> None:
    """Trains, and writes what one rank then gives."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worker = WorkerContext(rank, ranks, rank, "127.0.0.1", port)
    policy = MegatronPolicy(model, worker=worker, **OPTIONS, **config)
    source = policy.weight_source()
    for lengths in ((9, 4, 15, 2), (5, 3, 8, 6)):
        policy.train(training_batch(lengths), NegativeLogLikelihood())
    pieces = source.pieces() or ()
    torch.save(
        [(name, box, t.clone()) for name, box, t in pieces if t is not None], f"{out}/{rank}.pt"
    )
    policy.export_hf(f"{out}/export")
    policy.shutdown()


@pytest.mark.parametrize(
    "layout", [pytest.param(n, marks=[] if n in FEW else [pytest.mark.full]) for n in LAYOUTS]
)
def test_trained_ranks_give_the_tensors_of_an_export(tiny, tmp_path: Path, layout: str) -> None:
    ranks, family, model, config = LAYOUTS[layout]
    path = str(tiny(family, **model))
    given = (ranks, free_port(), path, config, str(tmp_path))
    running = multiprocessing.spawn(rank_of, given, nprocs=ranks, join=False)
    ends = time.monotonic() + DEADLINE_S
    try:
        while not running.join(ends - time.monotonic()):  # returns when any of them has ended
            assert time.monotonic() < ends, "the ranks did not end in time"
    finally:
        for process in running.processes:
            process.kill()
    expected = load_file(tmp_path / "export" / "model.safetensors")
    before = load_file(Path(path) / "model.safetensors")
    times = {name: torch.zeros(tensor.shape) for name, tensor in expected.items()}
    for rank in range(ranks):
        for name, box, tensor in torch.load(tmp_path / f"{rank}.pt"):
            index = tuple(slice(*ends) for ends in box)
            assert tensor.equal(expected[name][index]), (rank, name, box)
            times[name][index] += 1
    assert all(bool((count >= 1).all()) for count in times.values())
    assert not all(expected[name].equal(before[name]) for name in expected.keys() & before.keys())
    assert any(bool((count > 1).all()) for count in times.values()), "no tensor has a copy"


def test_a_step_meanwhile_is_not_confirmed(tiny, built):
    policy = built(MegatronPolicy(str(tiny()), **OPTIONS))
    source = policy.weight_source()
    source.confirm()
    policy.train(training_batch((5, 3)), NegativeLogLikelihood())
    for call in (source.confirm, lambda: next(source.tensors(["model.norm.weight"]))):
        with pytest.raises(LifecycleError, match="changed during a refit"):
            call()
    again = policy.weight_source()
    again.confirm()
    for one, other in zip(again.pieces() or (), source.pieces() or (), strict=True):
        assert one.tensor is other.tensor, "a refit could not see that nothing moved"
