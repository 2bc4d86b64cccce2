"""A plugin names the tensors of a checkpoint that this package knows nothing of."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from installed import install
from safetensors.torch import load_file, save_file
from simple_pair import Engine, InPlaceSink, blank

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.errors import ConfigError, PluginError
from rl_core.plugins.discovery import HOOKS
from rl_core.refit import refit
from rl_hf.policy import HuggingFacePolicy
from rl_megatron.policy import MegatronPolicy

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["install"]

PARTS = (
    ("model.layers.", "net.blocks."),
    ("model.embed_tokens.", "net.tokens."),
    ("lm_head.", "net.head."),
    ("self_attn.q_proj", "attend.query"),
    ("self_attn.k_proj", "attend.key"),
    ("mlp.experts.gate_up_proj", "mlp.experts.both"),
    (".gate_proj.", ".opens."),
)
PLUGIN = f"""
from rl_core.plugins.hookspecs import hookimpl

@hookimpl
def weight_name_mappers(manifest):
    def renamed(name):
        for ours, acmes in {PARTS!r}:
            name = name.replace(ours, acmes)
        return name
    return renamed if manifest.name == "megatron" else None
"""
OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-3, "eps": 1e-3}}


def acmes(name: str) -> str:
    for ours, theirs in PARTS:
        name = name.replace(ours, theirs)
    return name


@pytest.fixture
def acme(install: Any, tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A checkpoint under acme's names, whose plugin is installed."""
    install("rl-acme", {HOOKS: {"acme": "rl_acme"}}, {"rl_acme": PLUGIN})

    def make(family: str = "llama", *, tied_again: bool = False, **overrides: Any) -> Path:
        path = tmp_path / "acme"
        shutil.copytree(tiny(family, **overrides), path)
        config = json.loads((path / "config.json").read_text())
        config |= {"model_type": "acme", "architectures": ["AcmeForCausalLM"]}
        (path / "config.json").write_text(json.dumps(config))
        tensors = load_file(path / "model.safetensors")
        if tied_again:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        renamed = {acmes(name): tensor for name, tensor in tensors.items()}
        save_file(renamed, path / "model.safetensors")
        return path

    return make


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_it_loads_trains_and_exports_under_its_own_names(acme, tiny, built, tmp_path, family):
    path = acme(family)
    policy = built(MegatronPolicy(str(path), architecture=family, **OPTIONS))
    other = built(HuggingFacePolicy(str(tiny(family)), **OPTIONS))
    data = training_batch((9, 4, 15, 2))
    for _ in range(2):
        found, expected = (p.train(data, NegativeLogLikelihood())["loss"] for p in (policy, other))
        assert found == pytest.approx(expected, rel=1e-5)
    policy.export_hf(tmp_path / "out")
    files = {
        kind: load_file(where / "model.safetensors")
        for kind, where in (("given", path), ("made", tmp_path / "out"))
    }
    if family == "llama":
        assert set(files["made"]) == set(files["given"])
    assert any("attend.query" in name for name in files["made"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "acme"
    again = built(MegatronPolicy(str(tmp_path / "out"), architecture=family))
    assert again.get_logprobs(data)["logprobs"].equal(policy.get_logprobs(data)["logprobs"])
    policy.save_checkpoint(tmp_path / "ck")
    resumed = built(
        MegatronPolicy(str(path), architecture=family, resume_from=str(tmp_path / "ck"), **OPTIONS)
    )
    assert resumed.train(data, NegativeLogLikelihood()) == policy.train(
        data, NegativeLogLikelihood()
    )


@pytest.mark.parametrize("tied", [False, True])
def test_an_engine_gets_its_names(acme, built, tied):
    policy = built(MegatronPolicy(str(acme(tie_word_embeddings=tied)), architecture="llama"))
    source = policy.weight_source()
    ours = {s.name for s in source.specs()}
    whole = dict(source.tensors([s.name for s in source.specs() if s.alias_of is None]))
    expected = {acmes(name): tensor.clone() for name, tensor in whole.items()}
    source.close()
    ties = {"net.head.weight": "net.tokens.weight"} if tied else {}
    assert {acmes(name) for name in ours} == {*expected, *ties}
    held = blank(expected)
    held |= {tie: held[name] for tie, name in ties.items()}
    engine = Engine(held, ties, kind=InPlaceSink)
    refit(policy, engine)
    assert all(torch.equal(engine.sink.tensor[name], t) for name, t in expected.items())


def test_a_tied_output_that_is_stored_under_its_name_is_no_surplus(acme, built):
    path = acme("qwen2", tied_again=True)
    built(MegatronPolicy(str(path), architecture="qwen2")).shutdown()


def test_without_the_architecture_it_is_named_and_what_to_do(acme):
    with pytest.raises(ConfigError, match=r"'acme'; mapped are") as raised:
        MegatronPolicy(str(acme()))
    assert "weight_name_mappers" in raised.value.fix


def test_errors_name_tensors_as_the_file_does(acme, tmp_path):
    path = acme()
    tensors = load_file(path / "model.safetensors")
    del tensors["net.tokens.weight"]
    tensors["net.blocks.0.attend.query.weight"] = torch.zeros(2, 2)
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(
        ConfigError, match=r"net\.tokens\.weight is missing.*attend\.query.*\[2, 2\]"
    ):
        MegatronPolicy(str(path), architecture="llama")


def test_a_plugin_that_gives_two_tensors_one_name_is_named(install, tiny):
    bad = PLUGIN.replace("return name\n", "return name.replace('k_proj', 'q_proj')\n")
    bad = bad.replace(
        "('self_attn.q_proj', 'attend.query'), ('self_attn.k_proj', 'attend.key'), ", ""
    )
    install("rl-bad", {HOOKS: {"bad": "rl_bad"}}, {"rl_bad": bad})
    with pytest.raises(PluginError, match=r"rl-bad .* would both be called"):
        MegatronPolicy(str(tiny()))
