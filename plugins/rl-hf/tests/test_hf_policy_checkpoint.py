"""Checkpoints: exact to resume from, whole or not there."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from rl_backends.policy.checkpoint_directory import write_directory
from rl_core.batch import BatchedDataDict
from rl_core.errors import CheckpointError
from rl_hf.policy import HuggingFacePolicy
from rl_losses import NLLLossFn

OPTIONS: dict[str, Any] = {
    "optimizer": {"lr": 1e-3},
    "scheduler": {"name": "cosine", "warmup_steps": 2, "total_steps": 9},
}


def batch() -> BatchedDataDict[Any]:
    ids = torch.randint(3, 272, (4, 12), generator=torch.Generator().manual_seed(7))
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor([12, 3, 7, 9])})


def policy_at(path: Path, steps: int = 0, **config: Any) -> HuggingFacePolicy:
    policy = HuggingFacePolicy(str(path), **{**OPTIONS, **config})
    for _ in range(steps):
        policy.train(batch(), NLLLossFn())
    return policy


def weights(policy: HuggingFacePolicy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.mark.parametrize("lora", [None, {"r": 4, "target_modules": ["q_proj", "v_proj"]}])
def test_a_checkpoint_is_a_model_that_transformers_loads(tiny, tmp_path, lora):
    policy = policy_at(tiny(), 2, lora=lora)
    policy.save_checkpoint(tmp_path / "ck")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ck").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "ck")
    assert tokenizer.pad_token_id == 0
    data = batch()
    logits = model(data["input_ids"][:1]).logits[0].log_softmax(-1)
    expected = logits[:-1].gather(-1, data["input_ids"][0, 1:, None])[:, 0]
    scores = policy.get_logprobs(data)["logprobs"][0, 1:]
    torch.testing.assert_close(scores, expected.detach(), atol=1e-4, rtol=0)
    assert list((tmp_path / "ck").glob("*.safetensors")) == [tmp_path / "ck/model.safetensors"]


def test_an_export_is_a_model_and_no_checkpoint(tiny, tmp_path):
    policy = policy_at(tiny(), 1)
    policy.export_hf(tmp_path / "model")
    other = HuggingFacePolicy(str(tmp_path / "model"))
    assert_same(weights(other), weights(policy))
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


KILLED = """
    import os, signal, sys, torch
    from pathlib import Path
    from rl_backends.policy import checkpoint_directory as checkpoint
    from rl_hf.policy import HuggingFacePolicy
    from rl_losses import NLLLossFn
    from rl_core.batch import BatchedDataDict

    model, path, where = sys.argv[1:]

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    policy = HuggingFacePolicy(model)
    if where == "sealing":
        checkpoint._seal = die
    else:
        whole = Path.rename
        def rename(self, target):
            if str(self).endswith(".partial"):
                die()
            return whole(self, target)
        Path.rename = rename
    policy.train(BatchedDataDict({"input_ids": torch.full((1, 4), 5),
                                  "input_lengths": torch.tensor([4])}), NLLLossFn())
    policy.save_checkpoint(path)
"""


@pytest.mark.parametrize("where", ["sealing", "renaming"])
@pytest.mark.parametrize("former", [False, True], ids=["first", "over-former"])
def test_a_killed_save_never_loads_and_the_former_still_does(tiny, tmp_path, where, former):
    path = tmp_path / "ck"
    policy = policy_at(tiny(), 2)
    if former:
        policy.save_checkpoint(path)
    code = textwrap.dedent(KILLED)
    process = subprocess.run(
        [sys.executable, "-c", code, str(tiny()), str(path), where], timeout=120
    )
    assert process.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".ck.*.partial"))
    other = policy_at(tiny())
    if former:
        other.load_checkpoint(path)
        assert_same(weights(other), weights(policy))
    else:
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            other.load_checkpoint(path)
    if where == "sealing":
        for partial in tmp_path.glob(".ck.*.partial"):
            with pytest.raises(CheckpointError, match="incomplete"):
                other.load_checkpoint(partial)
    policy.save_checkpoint(path)
    assert os.listdir(tmp_path) == ["ck"]


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("model.safetensors", "truncate", "bytes instead of"),
        ("model.safetensors", "flip", "was changed"),
        ("rl_training/state.safetensors", "remove", "is missing"),
        ("rl_training/state.json", "flip", "was changed"),
        ("rl_checkpoint.json", "remove", "not a checkpoint"),
        ("rl_checkpoint.json", "truncate", "not valid JSON"),
        ("rl_checkpoint.json", '{"format": 1}', "not the manifest of a checkpoint"),
        (
            "rl_checkpoint.json",
            '{"format": 1, "files": {"a": 5}}',
            "not the manifest of a checkpoint",
        ),
        ("extra.safetensors", "", "was added"),
        ("modeling.py", "", "was added"),
        ("rl_training/rank-1.bin", "", "was added"),
    ],
)
def test_a_damaged_checkpoint_names_the_file_and_changes_nothing(
    tiny, tmp_path, file, damage, words
):
    policy = policy_at(tiny(), 1)
    policy.save_checkpoint(tmp_path / "ck")
    victim = tmp_path / "ck" / file
    content = bytearray(victim.read_bytes() if victim.exists() else b"")
    if damage == "remove":
        victim.unlink()
    elif damage not in ("flip", "truncate"):
        victim.write_text(damage)
    else:
        content[-9] ^= 1
        victim.write_bytes(content if damage == "flip" else content[:-5])
    before = weights(policy)
    with pytest.raises(CheckpointError, match=words) as error:
        policy.load_checkpoint(tmp_path / "ck")
    assert file in error.value.message
    assert_same(weights(policy), before)


def test_a_checkpoint_of_another_model_names_the_tensors(tiny, tmp_path):
    policy_at(tiny(), 1).save_checkpoint(tmp_path / "ck")
    other = policy_at(tiny("qwen2", hidden_size=32))
    before = weights(other)
    with pytest.raises(CheckpointError, match=r"embed_tokens.weight is \[272, 128\]"):
        other.load_checkpoint(tmp_path / "ck")
    assert_same(weights(other), before)


def test_a_directory_appears_as_a_whole_or_not_at_all(tmp_path):
    def write() -> None:
        with write_directory(tmp_path / "made") as directory:
            (directory / "half.txt").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert os.listdir(tmp_path) == []
