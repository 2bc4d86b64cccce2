"""A model over several ranks does what one rank does: the same dropout, steps and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from rl_conformance.losses import LogitLikelihood, SequenceLikelihood
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core import create_policy
from rl_core.batch import BatchedDataDict
from rl_hosting import LocalCluster

TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERT, SEQUENCE = "expert_model_parallel_size", "sequence_parallel"
# A large eps: some biases have no gradient but rounding, which Adam would blow up to its rate.
OPTIONS: dict[str, Any] = {
    "backend": "megatron",
    "optimizer": {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-3},
    "max_grad_norm": 1.0,
    "temperature": 0.9,
    "generation": {"max_new_tokens": 8},
    "seed": 3,
}
PACKED = {"sequence_packing": {"enabled": True, "train_mb_tokens": 40, "logprob_mb_tokens": 40}}
DROPS = {"attention_dropout": 0.3}


@dataclass
class Layout:
    """How many ranks, what the model is, and what the policy is told besides.

    Copies draw dropout of their own, so models of several have none.
    """

    ranks: int
    family: str
    model: dict[str, Any]
    config: dict[str, Any]


LAYOUTS = {
    "tp2": Layout(2, "qwen3", DROPS, {TENSOR: 2, "activation_recompute": "selective"}),
    "pp2": Layout(2, "qwen2", DROPS, {PIPELINE: 2, "activation_recompute": "full"}),
    "dp2": Layout(2, "llama", {}, {}),
    "tp2-sp": Layout(
        2,
        "llama",
        {"attention_bias": True, "mlp_bias": True, "vocab_size": 269, **DROPS},
        {TENSOR: 2, SEQUENCE: True, "activation_recompute": "full"},
    ),
    "tp2-sp-packed": Layout(2, "qwen3", DROPS, {TENSOR: 2, SEQUENCE: True, **PACKED}),
    "tp2-pp2": Layout(4, "qwen3", DROPS, {TENSOR: 2, PIPELINE: 2}),
    "ep2": Layout(2, "qwen3_moe", {}, {EXPERT: 2, **PACKED}),
    "ep2-tp2-sp": Layout(4, "qwen3_moe", {}, {EXPERT: 2, TENSOR: 2, SEQUENCE: True}),
    "ep2-pp2": Layout(4, "qwen3_moe", {"tie_word_embeddings": True}, {EXPERT: 2, PIPELINE: 2}),
    "dp2-tp2": Layout(4, "llama", {"num_key_value_heads": 4}, {TENSOR: 2}),
}
#: What every run tries here; pipelines and copies are checked there by clause P14.
FEW = ("tp2",)


@dataclass
class Pair:
    """Ranks and one that does the same as they do, each step of the way."""

    path: str
    layout: Layout
    ranks: Any
    alone: Any

    @property
    def config(self) -> dict[str, Any]:
        return {**OPTIONS, **self.layout.config, "model_name": self.path}

    @property
    def plain(self) -> dict[str, Any]:
        """Configuration of one rank."""
        keys = (TENSOR, PIPELINE, EXPERT, SEQUENCE)
        return {key: value for key, value in self.config.items() if key not in keys}

    def step(self, loss: Any = None, **rows: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        found, expected = (
            p.train(batch(**rows), loss or NegativeLogLikelihood(), mbs=3)
            for p in (self.ranks, self.alone)
        )
        for key in ("loss", "grad_norm"):
            assert found[key] == pytest.approx(expected[key], rel=2e-5), (loss, key)
        return found, expected


@pytest.fixture(scope="module")
def warm(tiny: Callable[..., Path]) -> Iterator[None]:
    """Keeps the process that others are forked from."""
    with LocalCluster(1, threads=1) as one:
        policy = create_policy({**OPTIONS, "model_name": str(tiny())}, one)
        yield
        policy.shutdown()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[] if name in FEW else [pytest.mark.full]) for name in LAYOUTS
    ],
)
def pair(request: pytest.FixtureRequest, warm: None, tiny: Callable[..., Path]) -> Iterator[Pair]:
    layout = LAYOUTS[request.param]
    made = Pair(str(tiny(layout.family, **layout.model)), layout, None, None)
    with LocalCluster(layout.ranks, threads=1) as cluster:
        made.ranks = create_policy(made.config, cluster)
        made.alone = create_policy(made.plain)
        yield made
        made.ranks.shutdown()
        made.alone.shutdown()


def batch(**extra: Any) -> BatchedDataDict[Any]:
    return training_batch((12, 3, 31, 1, 17, 8, 2, 5), **extra)


def files(policy: Any, path: Path) -> dict[str, torch.Tensor]:
    policy.save_checkpoint(path)
    return load_file(path / "model.safetensors")


def close(found: Any, expected: Any, atol: float = 1e-4) -> None:
    for key in expected:
        torch.testing.assert_close(found[key], expected[key], atol=atol, rtol=1e-4, msg=key)


def test_scores_and_steps_are_those_of_one_rank(pair, tmp_path):
    data = batch()
    for _ in range(2):
        close(pair.ranks.get_logprobs(data), pair.alone.get_logprobs(data))
        close(pair.ranks.get_topk_logits(data, 5), pair.alone.get_topk_logits(data, 5))
        for loss in (NegativeLogLikelihood(), SequenceLikelihood(), LogitLikelihood()):
            pair.step(loss)
    found, expected = (p.get_reference_policy_logprobs(data) for p in (pair.ranks, pair.alone))
    close(found, expected)
    found, expected = files(pair.ranks, tmp_path / "a"), files(pair.alone, tmp_path / "b")
    assert found.keys() == expected.keys()
    close(found, expected, atol=2e-5)


@pytest.mark.full
def test_fewer_rows_than_copies_and_rows_that_do_not_count(pair):
    data = training_batch((6,))
    close(pair.ranks.get_logprobs(data), pair.alone.get_logprobs(data))
    mask = torch.tensor([1.0, 0, 0, 1, 0, 0, 0, 0])
    pair.step(sample_mask=mask)
    pair.step(sample_mask=torch.tensor([1.0, *[0] * 7]))


@pytest.mark.full
def test_observed_heads_are_those_of_one_rank(pair):
    found, expected = (
        p.calibrate_qkv_fp8_scales(batch(), include_q=True)["layers"]
        for p in (pair.ranks, pair.alone)
    )
    assert found.keys() == expected.keys()
    for layer, scales in expected.items():
        assert found[layer] == pytest.approx(scales, rel=1e-3)


@pytest.mark.full
def test_a_checkpoint_goes_on_as_any_number_of_ranks(pair, tmp_path):
    pair.step()
    pair.ranks.save_checkpoint(tmp_path / "ranks")
    pair.alone.save_checkpoint(tmp_path / "alone")
    ahead = pair.step()
    resumed = create_policy({**pair.plain, "resume_from": str(tmp_path / "ranks")})
    again = resumed.train(batch(), NegativeLogLikelihood(), mbs=3)
    resumed.shutdown()
    with LocalCluster(pair.layout.ranks, threads=1) as cluster:
        config = {**pair.config, "resume_from": str(tmp_path / "alone")}
        spread = create_policy(config, cluster)
        over = spread.train(batch(), NegativeLogLikelihood(), mbs=3)
        spread.shutdown()
    for result in (again, over):
        for key in ("loss", "grad_norm", "lr"):
            assert result[key] == pytest.approx(ahead[1][key], rel=2e-5)


@pytest.mark.full
def test_what_two_stages_saved_goes_on_as_two_halves_of_each_layer(tiny, tmp_path):
    path, results = str(tiny("qwen2", **DROPS)), []
    ways: list[dict[str, Any]] = [
        {PIPELINE: 2},
        {TENSOR: 2},
        {TENSOR: 2, SEQUENCE: True},
        {PIPELINE: 2},
    ]
    for number, way in enumerate(ways):
        config = {**OPTIONS, **way, "model_name": path, "torch_dtype": "bfloat16"}
        if number:
            config["resume_from"] = str(tmp_path / str(number - 1))
        with LocalCluster(2, threads=1) as cluster:
            policy = create_policy(config, cluster)
            policy.train(batch(), NegativeLogLikelihood(), mbs=3)
            policy.save_checkpoint(tmp_path / str(number))
            results.append(policy.train(batch(), NegativeLogLikelihood(), mbs=3)["loss"])
            policy.shutdown()
    alone = create_policy({**OPTIONS, "model_name": path, "torch_dtype": "bfloat16"})
    expected = [alone.train(batch(), NegativeLogLikelihood(), mbs=3)["loss"] for _ in range(5)]
    alone.shutdown()
    assert results == pytest.approx(expected[1:], rel=1e-2)
