"""What a loop may do to an engine, and is told where it may not."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from counting_engine import collect
from prompt_rows import prompts

from rl_core import LoopWarning
from rl_core.batch import BatchedDataDict
from rl_core.config import check_config
from rl_core.errors import ConfigError, DataError, LifecycleError
from rl_core.interfaces import GenerationConfig
from rl_core.weights.driver import warn_of_sampling
from rl_core.weights.options import SendOptions


def drawn(output: BatchedDataDict[Any]) -> list[int]:
    return output["output_ids"][:, 1].tolist()


# -- seeds ----------------------------------------------------------------------------------------


def test_calls_that_draw_nothing_from_the_seed_do_not_count(make):
    plain, other = make(seed=3), make(seed=3)
    expected = [drawn(plain.generate(prompts([5], [6]))) for _ in range(2)]
    other.generate(prompts([5]), greedy=True)
    other.generate(prompts([5], seed=torch.tensor([1])))
    other.generate(prompts())
    assert [drawn(other.generate(prompts([5], [6]))) for _ in range(2)] == expected


# -- the front door -------------------------------------------------------------------------------


class Encoding(Mapping[str, Any]):
    """What a tokenizer returns: a mapping with attributes and methods of its own."""

    def __init__(self, **data: Any) -> None:
        self.data = data

    def __getitem__(self, key: str) -> Any:
        return self.data[key]

    def __iter__(self) -> Any:
        return iter(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_what_a_tokenizer_returns_is_a_batch(make, kind):
    mask = torch.tensor([[1, 1], [1, 0]])
    given = kind(input_ids=torch.tensor([[5, 6], [7, 0]]), attention_mask=mask)
    output = make().generate(given, greedy=True)
    assert output["unpadded_sequence_lengths"].tolist() == [6, 5]
    assert len(collect(make().generate_async(given))) == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a prompt"], "not a list of str"),
        ([[5, 6]], "not a list of list"),
        ("a prompt", "not a str"),
        ({"input_ids": [[5, 6]], "attention_mask": [[1, 1]]}, "not a list"),
        ({"attention_mask": torch.ones(1, 2)}, "the batch has none"),
    ],
)
def test_what_is_no_batch_is_refused_with_how_to_make_one(make, given, words):
    with pytest.raises(DataError, match=words) as refused:
        make().generate(given)
    assert 'padding_side="right"' in str(refused.value.fix)


def test_a_tensor_on_a_device_is_refused_with_what_to_call(make):
    with pytest.raises(DataError, match="'input_ids' is on meta") as refused:
        make().generate(BatchedDataDict(prompts([5])).to("meta"))
    assert 'data.to("cpu")' in str(refused.value.fix)


@pytest.mark.parametrize(
    ("data", "fix"),
    [
        (prompts([5, 99]), "model's own tokenizer"),
        (prompts([5], []), "drop the row"),
        (prompts([5]) | {"input_lengths": torch.tensor([2])}, "real tokens"),
        (prompts([5]) | {"attention_mask": torch.tensor([[0]])}, "leave one"),
        ({"input_ids": torch.tensor([[0, 5]]), "attention_mask": torch.tensor([[0, 1]])}, "pad on"),
    ],
)
def test_every_cause_has_its_own_fix(make, data, fix):
    with pytest.raises(DataError) as refused:
        make().generate(BatchedDataDict(data))
    assert fix in str(refused.value.fix)


# -- lifecycle ------------------------------------------------------------------------------------


def test_an_engine_that_keeps_its_memory_goes_on_serving(make):
    engine = make()
    assert engine.finish_generation(release_gpu=False) is True
    assert drawn(engine.generate(prompts([5]), greedy=True)) == [6]
    assert engine.finish_generation(release_gpu=True) is True
    with pytest.raises(LifecycleError, match="kv_cache and weights are asleep"):
        engine.generate(prompts([5]))


def test_an_engine_with_devices_of_its_own_sleeps_only_when_it_is_told_to(make):
    alone = make(colocated={"enabled": False, "resources": None})
    alone.finish_generation()
    alone.generate(prompts([5]))
    alone.finish_generation(tags=["kv_cache"])
    with pytest.raises(LifecycleError, match="kv_cache is asleep"):
        alone.generate(prompts([5]))
    together = make(colocated={"enabled": True})
    together.finish_generation()
    with pytest.raises(LifecycleError):
        together.generate(prompts([5]))


@pytest.mark.parametrize(
    "keywords",
    [{"release_gpus": False}, {"release_gpu": None}, {"tags": ["weights"], "level": 1}],
)
def test_keywords_that_mean_nothing_are_refused(make, keywords):
    with pytest.raises(ConfigError):
        make().finish_generation(**keywords)
    with pytest.raises(ConfigError, match="release_gpu"):
        make().prepare_for_generation(release_gpu=False)


def test_hardware_is_for_the_cluster_to_give():
    base = {"backend": "any", "model_name": "any"}
    for resources in (None, {}, {"gpus_per_node": None, "num_nodes": None}):
        colocated = {"enabled": False, "resources": resources}
        assert check_config(GenerationConfig, base | {"colocated": colocated}, what="x")
    assert check_config(GenerationConfig, base | {"colocated": None}, what="x")
    colocated = {"enabled": False, "resources": {"gpus_per_node": 2}}
    with pytest.raises(ConfigError, match="RayVirtualCluster") as refused:
        check_config(GenerationConfig, base | {"colocated": colocated}, what="x")
    assert refused.value.details["key"] == "colocated.resources.gpus_per_node"


# -- refits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"temperature": 0.7}, "temperature 0.7,"),
        ({"top_p": 0.8}, "temperature 1, top_p 0.8,"),
        ({"top_k": 20}, "top_k 20,"),
        ({"repetition_penalty": 1.3, "logprobs_mode": "raw"}, "repetition_penalty 1.3,"),
    ],
)
def test_another_distribution_is_warned_of_once_for_each_engine(make, option, said):
    policy = SimpleNamespace(config={"temperature": 1.0})
    other, same, greedy = make(**option), make(top_p=1.0, top_k=-1), make(**option, do_sample=False)
    with pytest.warns(LoopWarning, match=f"{re.escape(said)} but the policy.*temperature 1 over"):
        warn_of_sampling(policy, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine in (other, same, greedy):
            warn_of_sampling(policy, engine)


NESTED = {"layer_0": {"k_scale": 0.5, "v_scale": 2.0}}


@pytest.mark.parametrize(
    "given",
    [
        NESTED,
        {"format": "e4m3", "layers": NESTED},
        {"layer_0.k_scale": 0.5, "layer_0.v_scale": 2.0},
    ],
)
def test_scales_are_taken_as_calibration_returns_them(given):
    flat = {"layer_0.k_scale": 0.5, "layer_0.v_scale": 2.0}
    assert SendOptions.of({"kv_scales": given}).kv_scales == flat
    assert SendOptions.of({"kv_scales": None}).kv_scales == {}


@pytest.mark.parametrize("given", [[0.5], {"k": 0.0}, {"k": "a"}, {"l": {"k": float("nan")}}])
def test_scales_that_are_none_are_refused(given):
    with pytest.raises(ConfigError, match="kv_scales"):
        SendOptions.of({"kv_scales": given})


def test_output_knows_how_it_was_generated(make):
    engine = make(temperature=0.7)
    first, second = engine.generate(prompts([5])), engine.generate(prompts([5]), greedy=True)
    assert first.provenance.distribution == "temperature 0.7"
    assert second.provenance.distribution is None
    [(_, row)] = collect(engine.generate_async(prompts([5])))
    assert row.provenance == first.provenance
