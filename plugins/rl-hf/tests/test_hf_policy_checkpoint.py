"""Checkpoints: exact to resume from, whole or not there."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
from module_weights import weights
from prompt_rows import random_prompts
from simple_pair import same

from rl_backends.policy.checkpoint_directory import write_directory
from rl_core.errors import CheckpointError
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

OPTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-3},
    "scheduler": {"name": "cosine", "warmup_steps": 2, "total_steps": 9},
}


def policy_at(path: Path, steps: int = 0, **config: Any) -> HuggingFacePolicy:
    policy = HuggingFacePolicy(str(path), **{**OPTIONS, **config})
    for _ in range(steps):
        policy.train(random_prompts(12, 3, 7, 9), NLLLossFn())
    return policy


def test_an_export_is_a_model_and_no_checkpoint(tiny, tmp_path):
    policy = policy_at(tiny(), 1)
    policy.export_hf(tmp_path / "model")
    other = HuggingFacePolicy(str(tmp_path / "model"))
    assert same(weights(other.model), weights(policy.model))
    with pytest.raises(CheckpointError, match="no training state"):
        other.load_checkpoint(tmp_path / "model")


def test_what_is_no_checkpoint_is_never_replaced(tiny, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/plan.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        policy_at(tiny()).save_checkpoint(tmp_path / "notes")
    assert (tmp_path / "notes/plan.txt").read_text() == "keep me"
    assert os.listdir(tmp_path) == ["notes"]


@pytest.mark.parametrize("room", [1000, 100_000])
def test_a_full_disk_is_named_and_spares_what_is_there(tiny, tmp_path, room):
    policy = policy_at(tiny(), 1)
    policy.save_checkpoint(tmp_path / "ck")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for save, name in (
        (policy.save_checkpoint, "ck"),
        (policy.save_checkpoint, "new"),
        (policy.export_hf, "model"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limit[1]))
        try:
            with pytest.raises(CheckpointError, match=f"{tmp_path}/{name} was not written"):
                save(tmp_path / name)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        assert os.listdir(tmp_path) == ["ck"]
    assert before == {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    policy.save_checkpoint(tmp_path / "new")
    policy_at(tiny(), resume_from=str(tmp_path / "new"))


def test_a_place_where_nothing_can_be_written_is_named(tiny, tmp_path):
    (tmp_path / "file").write_text("of the user")
    with pytest.raises(CheckpointError, match="file/ck was not written: FileExistsError"):
        policy_at(tiny()).save_checkpoint(tmp_path / "file" / "ck")


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "rl_training/../../outside"])
def test_a_manifest_names_no_files_elsewhere(tiny, tmp_path, name):
    policy = policy_at(tiny())
    policy.save_checkpoint(tmp_path / "ck")
    manifest = tmp_path / "ck/rl_checkpoint.json"
    content = json.loads(manifest.read_text())
    content["files"][name] = [0, ""]
    manifest.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is outside of it"):
        policy.load_checkpoint(tmp_path / "ck")


def test_a_checkpoint_of_another_model_names_the_tensors(tiny, tmp_path):
    policy_at(tiny(), 1).save_checkpoint(tmp_path / "ck")
    other = policy_at(tiny("qwen2", hidden_size=32))
    before = weights(other.model)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[272, 128\]"):
        other.load_checkpoint(tmp_path / "ck")
    assert same(weights(other.model), before)


def test_a_directory_appears_as_a_whole_or_not_at_all(tmp_path):
    def write() -> None:
        with write_directory(tmp_path / "made") as directory:
            (directory / "half.txt").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []
