"""Checkpoints that are not whole are refused with file, cause and fix, before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from rl_backends.engine.checkpoint import check_checkpoint
from rl_core.errors import ConfigError
from rl_vllm import VllmGeneration


def cut(path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def index(path, **files) -> None:
    where = {"weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(where))


def untie(path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))


def only_pickled(path) -> None:
    import torch

    (path / "model.safetensors").unlink()
    torch.save({"weight": torch.zeros(1000)}, path / "pytorch_model.bin")
    cut(path / "pytorch_model.bin")


#: What is wrong, and the words that say so.
BROKEN = {
    "config.json is not JSON": (
        lambda path: cut(path / "config.json"),
        r"config\.json is not JSON",
    ),
    "config.json is no object": (
        lambda path: (path / "config.json").write_text("[]"),
        r"config\.json is not a JSON object",
    ),
    "the tokenizer is cut": (
        lambda path: cut(path / "tokenizer.json"),
        r"tokenizer\.json is not JSON",
    ),
    "the weights are cut": (
        lambda path: cut(path / "model.safetensors"),
        r"model\.safetensors has \d+ bytes, and its tensors need \d+",
    ),
    "the header is cut": (
        lambda path: (path / "model.safetensors").write_bytes(b"\x99\x99\0\0\0\0\0\0{"),
        r"model\.safetensors is cut short",
    ),
    "the weights are empty": (
        lambda path: (path / "model.safetensors").write_bytes(b""),
        r"model\.safetensors is cut short",
    ),
    "the weights are something else": (
        lambda path: (path / "model.safetensors").write_bytes(b"\4\0\0\0\0\0\0\0abcd"),
        "header cannot be read",
    ),
    "the weights are a pointer": (
        lambda path: (path / "model.safetensors").write_text("version https://git-lfs.github.com"),
        "a Git LFS pointer",
    ),
    "a shard is missing": (
        lambda path: index(path, a="model-00001-of-00002.safetensors"),
        r"names the file model-00001-of-00002\.safetensors, which does not exist",
    ),
    "a shard lacks a tensor": (
        lambda path: index(path, nothing="model.safetensors"),
        r"lacks tensors of the index \(1\): \['nothing'\]",
    ),
    "the index is no index": (
        lambda path: (path / "model.safetensors.index.json").write_text("{}"),
        "has no weight_map",
    ),
    "there are no weights": (lambda path: (path / "model.safetensors").unlink(), "has no weights"),
    "the output embeddings are missing": (untie, r"have no lm_head\.weight"),
    "a pickle is cut": (only_pickled, r"pytorch_model\.bin is cut short"),
}


@pytest.mark.parametrize("what", list(BROKEN))
def test_what_is_not_whole_is_refused_before_anything_starts(what, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("rl_hosting.generation.HostedProcess", None)
    path = tmp_path / "model"
    shutil.copytree(tiny(), path)
    breaks, says = BROKEN[what]
    breaks(path)
    with pytest.raises(ConfigError, match=says) as caught:
        VllmGeneration(None, {"model_name": str(path)})
    assert caught.value.details["key"] == "model_name"
    assert caught.value.fix


def test_random_weights_want_no_files(tiny, tmp_path):
    shutil.copytree(tiny(), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    check_checkpoint(str(tmp_path / "model"), "dummy", without_weights="")
