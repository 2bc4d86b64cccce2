"""A checkpoint's directory, its tokenizer and its facts, or what is wrong with them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from rl_backends.torch.checkpoints import checkpoint_directory, load_tokenizer, model_facts
from rl_core.errors import ConfigError


@pytest.fixture
def broken(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be broken."""
    return shutil.copytree(tiny(), tmp_path / "model")


def facts_of(path: Path, tokenizer: Any, config: dict[str, Any], vocab_size: int = 272) -> Any:
    text = transformers.AutoConfig.from_pretrained(path).get_text_config()
    return model_facts(config, text=text, vocab_size=vocab_size, tokenizer=tokenizer)


def test_a_directory_is_its_own():
    with pytest.raises(ConfigError, match="model directory /no/such/model does not exist"):
        checkpoint_directory("/no/such/model")


def test_a_checkpoint_is_where_it_is(tiny: Callable[..., Path], tmp_path: Path):
    assert checkpoint_directory(str(tiny())) == tiny()
    with pytest.raises(ConfigError, match=r"it has no config\.json"):
        checkpoint_directory(str(tmp_path))


def test_a_name_that_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="nobody/nothing is neither a directory nor a model"):
        checkpoint_directory("nobody/nothing")


def test_a_damaged_tokenizer_is_named(broken: Path):
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"the tokenizer of .* cannot be loaded"):
        load_tokenizer(str(broken))


def test_no_tokenizer_is_none(broken: Path):
    for file in broken.glob("tokenizer*"):
        file.unlink()
    assert load_tokenizer(str(broken)) is None


def test_code_in_the_tokenizer_runs_only_if_trusted(broken: Path):
    settings = broken / "tokenizer_config.json"
    content = json.loads(settings.read_text())
    settings.write_text(json.dumps({**content, "auto_map": {"AutoTokenizer": ["extra.T", None]}}))
    with pytest.raises(ConfigError, match=r"extra\.T"):
        load_tokenizer(str(broken))


def test_facts_come_from_configuration_and_tokenizer(tiny: Callable[..., Path]):
    path = tiny()
    facts = facts_of(path, load_tokenizer(str(path)), {})
    assert (facts.pad_token_id, facts.vocab_size, facts.max_model_len) == (0, 272, 256)
    generation = transformers.GenerationConfig(eos_token_id=[5, 6])
    facts = model_facts(
        {"pad_token_id": 7, "max_model_len": 50},
        text=object(),
        vocab_size=300,
        generation=generation,
    )
    assert (facts.eos_token_ids, facts.pad_token_id, facts.max_model_len) == ((5, 6), 7, 50)


def test_what_the_facts_lack_is_named_with_its_key(tiny: Callable[..., Path]):
    for config, text, key in (
        ({"pad_token_id": 0}, object(), "max_model_len"),
        ({"max_model_len": 9}, object(), "pad_token_id"),
    ):
        with pytest.raises(ConfigError) as caught:
            model_facts(config, text=text, vocab_size=272)
        assert caught.value.details["key"] == key
    with pytest.raises(ConfigError, match=r"pad token 272 of .* is outside its vocabulary of 272"):
        facts_of(tiny(), None, {"pad_token_id": 272})
