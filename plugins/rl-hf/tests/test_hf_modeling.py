"""Loading a checkpoint, or saying what is wrong with it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from rl_backends.torch.checkpoints import load_tokenizer
from rl_core.errors import ConfigError
from rl_core.install import install_command
from rl_core.plugins.manifest import GENERATION_CAPABILITIES, POLICY_CAPABILITIES
from rl_hf.manifest import BACKEND
from rl_hf.modeling import load_model, model_facts


@pytest.fixture
def broken(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be broken."""
    return shutil.copytree(tiny(), tmp_path / "model")


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def load(path: Path | str, *, for_training: bool = False, **config: Any) -> Any:
    return load_model({"model_name": str(path), **config}, for_training=for_training)


def test_the_checkpoints_dtype_is_kept_for_generation_and_not_for_training(
    tiny: Callable[..., Path],
):
    path = tiny(dtype="bfloat16")
    assert load(path).dtype == torch.bfloat16
    assert load(path, for_training=True).dtype == torch.float32
    assert load(path, for_training=True, torch_dtype="bfloat16").dtype == torch.bfloat16


def test_facts_come_from_model_and_tokenizer(tiny: Callable[..., Path]):
    path = tiny()
    facts = model_facts(load(path), load_tokenizer(str(path)), {})
    assert (facts.pad_token_id, facts.eos_token_ids) == (0, (1,))
    assert (facts.vocab_size, facts.max_model_len) == (272, 256)


def test_damaged_weights_are_named(broken: Path):
    (broken / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(broken)


def test_damaged_settings_are_named(broken: Path):
    (broken / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not JSON"):
        load(broken)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"num_hidden_layers": 3, "layer_types": None}, "model.layers.2"),
        ({"intermediate_size": 99}, "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_weights_that_the_checkpoint_lacks_are_no_random_numbers(
    broken: Path, changes: dict[str, Any], name: str
):
    edit(broken / "config.json", **changes)
    with pytest.raises(ConfigError, match=name):
        load(broken)


@pytest.mark.parametrize("trust", [False, True])
def test_code_in_the_checkpoint_runs_only_if_trusted(
    broken: Path, trust: bool, monkeypatch: pytest.MonkeyPatch
):
    modules = str(broken.parent / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", [*sys.path])
    # transformers registers trusted code for every later model of the same configuration class.
    monkeypatch.setattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})
    edit(broken / "config.json", auto_map={"AutoModelForCausalLM": "extra.Model"})
    witness = broken / "was_run"
    (broken / "extra.py").write_text(
        "from pathlib import Path\n"
        f"Path({str(witness)!r}).touch()\n"
        "from transformers import Qwen2ForCausalLM\n"
        "class Model(Qwen2ForCausalLM): pass\n"
    )
    if trust:
        load(broken, trust_remote_code=True)
    else:
        with pytest.raises(ConfigError, match=r"extra\.Model") as caught:
            load(broken)
        assert caught.value.details["key"] == "trust_remote_code"
    assert witness.exists() == trust


def test_a_model_without_a_pad_token_says_what_to_set(broken: Path):
    for file in (*broken.glob("tokenizer*"), broken / "generation_config.json"):
        file.unlink()
    edit(broken / "config.json", pad_token_id=None)
    model = load(broken)
    with pytest.raises(ConfigError, match="has a pad token") as caught:
        model_facts(model, None, {"model_name": str(broken)})
    assert caught.value.details["key"] == "pad_token_id"
    assert model_facts(model, None, {"pad_token_id": 7}).pad_token_id == 7


@pytest.mark.parametrize(
    ("config", "key", "words"),
    [
        ({"device": "nonsense"}, "device", "does not exist"),
        ({"device": "cuda:99"}, "device", "there is no device cuda:99"),
        ({"load_in_4bit": True, "device": "cpu"}, "load_in_4bit", "needs a CUDA device"),
        ({"load_in_4bit": True, "load_in_8bit": True}, "load_in_8bit", "exclude each other"),
        ({"device_map": "auto", "device": "cpu"}, "device_map", "exclude each other"),
        ({"attn_implementation": "nonsense"}, "model_name", "nonsense"),
    ],
)
def test_what_cannot_be_had_is_refused_with_its_key(
    tiny: Callable[..., Path], config: dict[str, Any], key: str, words: str
):
    with pytest.raises(ConfigError, match=words) as caught:
        load(tiny(), **config)
    assert caught.value.details["key"] == key


def test_quantised_weights_are_not_trained(tiny: Callable[..., Path]):
    with pytest.raises(ConfigError, match="quantised weights can be neither trained"):
        load(tiny(), for_training=True, load_in_8bit=True)


def test_a_missing_package_comes_with_its_command(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rl_hf.modeling.importlib.util.find_spec", lambda name: None)
    command = re.escape(install_command("rl-hf", "device-map"))
    with pytest.raises(ConfigError, match=command):
        load(tiny(), device_map="auto")


def test_loading_is_quiet_and_leaves_the_logs_as_they_were(
    tiny: Callable[..., Path], capfd: pytest.CaptureFixture[str]
):
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    path = tiny()
    capfd.readouterr()
    load(path)
    load_tokenizer(str(path))
    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_the_manifest_declares_every_capability():
    assert set(BACKEND.capabilities["generation"]) == set(GENERATION_CAPABILITIES)
    assert set(BACKEND.capabilities["policy"]) == set(POLICY_CAPABILITIES)
    assert BACKEND.kinds == ("generation", "policy")


def test_manifest_and_configuration_import_no_engine():
    code = (
        "import sys, rl_hf.manifest, rl_hf.config; "
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_language_model_alone_of_a_model_of_images_is_trained(tiny: Callable[..., Path]):
    model = load(tiny("qwen2_5_vl"), for_training=True)
    trained = {name: p.requires_grad for name, p in model.named_parameters()}
    assert set(trained.values()) == {True, False}
    assert all(once != name.startswith("model.visual.") for name, once in trained.items())
    assert all(p.requires_grad for p in load(tiny("qwen2_5_vl")).parameters())
