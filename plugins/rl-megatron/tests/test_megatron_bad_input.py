"""What is wrong is named before a model is built, and leaves nothing behind."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import distributed as dist

import rl_megatron.policy
from rl_backends.policy import ranks
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.errors import (
    CapabilityError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    RLError,
)
from rl_core.interfaces import WorkerContext
from rl_megatron.architectures import Architecture
from rl_megatron.parallel import ParallelState
from rl_megatron.policy import MegatronPolicy
from rl_megatron.sizes import Sizes
from rl_megatron.weights import owned_pieces

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "vocab_size": 64,
}
EXPERTS: dict[str, Any] = {
    **LLAMA,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "moe_intermediate_size": 96,
    "num_experts_per_tok": 2,
}
TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
EXPERT, CONTEXT = "expert_model_parallel_size", "context_parallel_size"
SEQUENCE = "sequence_parallel"


def nothing_left() -> None:
    assert ParallelState._alive is None
    assert not parallel_state.is_initialized()
    assert not dist.is_initialized()


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    nothing_left()
    yield
    nothing_left()


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(rl_megatron.policy, "build_model", fail)


@pytest.fixture
def changed(tiny: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny checkpoint whose ``config.json`` and tensors are others."""

    def make(tensors: Any = None, family: str = "llama", **settings: Any) -> Path:
        path = tmp_path / "changed"
        shutil.copytree(tiny(family), path)
        config = json.loads((path / "config.json").read_text()) | settings
        (path / "config.json").write_text(json.dumps(config))
        if tensors is not None:
            found = load_file(path / "model.safetensors")
            tensors(found)
            save_file(found, path / "model.safetensors", metadata={"format": "pt"})
        return path

    return make


def refused(path: Path | str, error: type[RLError], match: str, **config: Any) -> RLError:
    with pytest.raises(error, match=match) as raised:
        MegatronPolicy(str(path), **config)
    assert raised.value.fix
    nothing_left()
    return raised.value


# -- sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world", "config", "match", "key"),
    [
        (
            LLAMA,
            6,
            {TENSOR: 2, PIPELINE: 2},
            r"size 6 is not a multiple of 4 \(tensor 2 x pipeline 2\)",
            TENSOR,
        ),
        (LLAMA, 1, {TENSOR: 2}, r"world size 1 is not a multiple of 2", TENSOR),
        (LLAMA, 4, {TENSOR: 4}, r"4, .* 6 attention heads", TENSOR),
        (LLAMA, 2, {TENSOR: 2}, r"2, .* 3 key/value heads", TENSOR),
        ({**LLAMA, "intermediate_size": 100}, 3, {TENSOR: 3}, r"3, .* 100 features", TENSOR),
        (LLAMA, 3, {PIPELINE: 3}, r"3, .* 4 layers", PIPELINE),
        (LLAMA, 8, {PIPELINE: 8}, r"8, .* 4 layers", PIPELINE),
        (EXPERTS, 4, {EXPERT: 4}, r"4, .* 6 experts", EXPERT),
        (EXPERTS, 4, {EXPERT: 3}, r"3, .* data-parallel size 4 .*world size 4", EXPERT),
        (
            EXPERTS,
            2,
            {EXPERT: 2, PIPELINE: 2},
            r"2, .* data-parallel size 1 .*world size 2",
            EXPERT,
        ),
        (LLAMA, 2, {EXPERT: 2}, r"is 2, but the model has no experts", EXPERT),
        (LLAMA, 2, {SEQUENCE: True}, r"but tensor_model_parallel_size is 1", SEQUENCE),
        (EXPERTS, 3, {TENSOR: 3}, r"only if sequence_parallel is set", SEQUENCE),
    ],
)
def test_sizes_that_do_not_divide_are_named(settings, world, config, match, key):
    with pytest.raises(ConfigError, match=match) as raised:
        Sizes.of(config, world, Architecture.of(settings, "m"))
    assert raised.value.details["key"] == key
    assert raised.value.fix


def test_sizes_that_divide():
    architecture = Architecture.of(LLAMA, "m")
    assert Sizes.of({TENSOR: 3, PIPELINE: 2}, 12, architecture) == Sizes(3, 2, 2, 1)
    experts = Architecture.of(EXPERTS, "m")
    config = {TENSOR: 3, EXPERT: 2, SEQUENCE: True}
    assert Sizes.of(config, 12, experts) == Sizes(3, 1, 4, 2)
    assert Sizes.of({}, 5, architecture) == Sizes(data=5)


# -- keys and checkpoints, before anything is built ------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({CONTEXT: 2}, CapabilityError, r"context_parallel_size is 2"),
        (
            {TENSOR: 2},
            ConfigError,
            r"world size 1 is not a multiple of 2 \(tensor 2 x pipeline 1\)",
        ),
        ({TENSOR: 0}, ConfigError, TENSOR),
        ({"tensor_parallel": 2}, ConfigError, "tensor_parallel"),
        ({"torch_dtype": "float16"}, ConfigError, "torch_dtype"),
        ({"activation_recompute": "some"}, ConfigError, "activation_recompute"),
        ({"refit_experts": "both"}, ConfigError, "refit_experts"),
        ({"rank_timeout_s": 0}, ConfigError, "rank_timeout_s"),
        ({"reference": "disk"}, ConfigError, "reference"),
        ({"generation": {"max_batch_size": 0}}, ConfigError, "max_batch_size"),
        ({"generation": {"beams": 2}}, ConfigError, "beams"),
        ({"architecture": "gpt2"}, ConfigError, r"'gpt2'; rl-megatron supports llama"),
        ({"temperature": 0.0}, ConfigError, "temperature"),
        (
            {"sequence_packing": {"enabled": True}, "dynamic_batching": {"enabled": True}},
            ConfigError,
            "packing",
        ),
    ],
    ids=str,
)
def test_keys_that_are_wrong_are_named(tiny, unbuilt, config, error, match):
    refused(tiny(), error, match, **config)


@pytest.mark.parametrize(
    ("family", "settings", "match"),
    [
        ("llama", {"attention_bias": True}, "biases in attention but not"),
        ("llama", {"mlp_bias": True}, "or the reverse"),
        ("qwen3", {"attention_bias": True}, "biases in attention"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
        (
            "qwen2",
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "max_window_layers": 1,
                "layer_types": None,
            },
            "sliding window",
        ),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8}, "sliding window"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "dynamic positions",
        ),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                    "rope_theta": 1e4,
                }
            },
            "part of each head",
        ),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "both layers with experts"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "both layers with experts"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "one expert for each token"),
    ],
    ids=str,
)
def test_what_is_not_built_is_named(changed, unbuilt, family, settings, match):
    error = refused(changed(family=family, **settings), CapabilityError, match)
    assert error.details["key"] == "model_name"


def test_an_architecture_without_a_mapping_names_those_that_have_one(changed, unbuilt):
    path = changed(model_type="gpt2")
    error = refused(
        path, ConfigError, r"'gpt2'; rl-megatron supports llama, qwen2, qwen3, qwen3_moe"
    )
    assert "set architecture" in error.fix
    (path / "config.json").write_text("{}")
    refused(path, ConfigError, "architecture ''")


def test_code_of_a_checkpoint_is_not_run_unless_trusted(changed, unbuilt):
    path = changed(auto_map={"AutoModelForCausalLM": "mine.Model"})
    error = refused(path, ConfigError, r"mine\.Model")
    assert error.details["key"] == "trust_remote_code"


def missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def surplus(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.mlp.up_proj.weight"] = torch.zeros(256, 128)


def other_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(64)


def many(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if ".layers." in name]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (missing, r"layers\.1\.mlp\.up_proj\.weight is missing"),
        (surplus, r"layers\.2\.mlp\.up_proj\.weight has no place"),
        (other_shape, r"model\.norm\.weight is \[64\], not \[128\]"),
        (many, r"is missing.*, and 13 more"),
    ],
)
def test_tensors_that_do_not_fit_are_named(changed, unbuilt, change, match):
    refused(changed(change), ConfigError, match)


def test_frequencies_of_old_checkpoints_are_no_surplus(changed, built):
    def old(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(16)

    built(MegatronPolicy(str(changed(old)))).shutdown()


def test_a_tied_output_that_is_stored_is_no_surplus(changed, built):
    def again(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    built(MegatronPolicy(str(changed(again, family="qwen2")))).shutdown()


def test_an_output_that_is_missing_and_not_tied_is_noticed(changed, unbuilt):
    refused(changed(family="qwen2", tie_word_embeddings=False), ConfigError, "lm_head")


def test_files_that_are_missing_or_cut_short_are_named(tiny, tmp_path, unbuilt):
    path = tmp_path / "m"
    shutil.copytree(tiny(), path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for size in (len(whole) - 4, 100, 3):
        file.write_bytes(whole[:size])
        refused(path, ConfigError, r"model\.safetensors .*(bytes|cut short)")
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refused(path, ConfigError, "Git LFS")
    file.unlink()
    refused(path, ConfigError, r"no weights")
    (path / "config.json").unlink()
    refused(path, ConfigError, r"no config\.json")
    refused(tmp_path / "none", ConfigError, "does not exist")


# -- several policies, and what fails late ---------------------------------------------------------


def test_a_worker_of_several_needs_a_port(tiny, unbuilt):
    worker = WorkerContext(rank=0, world_size=2, master_addr="127.0.0.1", master_port=0)
    refused(tiny(), ConfigError, "no port at which rank 0 listens", worker=worker, **{TENSOR: 2})


def test_peers_that_do_not_come_are_waited_for_no_longer_than_said(tiny, unbuilt, monkeypatch):
    monkeypatch.setattr(ranks, "MEETING_S", 0.5)
    worker = WorkerContext(rank=1, world_size=2, master_addr="127.0.0.1", master_port=1)
    error = refused(tiny(), DeadlineError, "rank 1 of 2", worker=worker, rank_timeout_s=1.0)
    assert error.details["seconds"] == 1.0


def test_a_second_policy_with_other_sizes_is_refused(tiny, built):
    first = built(MegatronPolicy(str(tiny())))
    worker = WorkerContext(rank=0, world_size=2, master_addr="127.0.0.1", master_port=1)
    with pytest.raises(ConfigError, match=r"tensor=1.*tensor=2") as raised:
        MegatronPolicy(str(tiny()), worker=worker, **{TENSOR: 2})
    assert raised.value.fix
    assert ParallelState._alive.users == 1
    assert first.get_logprobs(training_batch((5,)))["logprobs"].shape == (1, 5)
    first.shutdown()
    nothing_left()


def test_torch_distributed_of_other_ranks_is_named_and_left(tiny, unbuilt):
    worker = WorkerContext(rank=0, world_size=2, master_addr="127.0.0.1", master_port=1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(ConfigError, match=r"with world size 1, but the policy needs 2"):
            MegatronPolicy(str(tiny()), worker=worker, **{TENSOR: 2})
        assert dist.is_initialized()
        assert ParallelState._alive is None
    finally:
        dist.destroy_process_group()


def test_megatron_groups_of_somebody_else_are_left(tiny, unbuilt):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    try:
        with pytest.raises(ConfigError, match="already initialised megatron-core's process groups"):
            MegatronPolicy(str(tiny()))
        assert parallel_state.is_initialized()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.mark.parametrize("name", ["build_model", "load_weights", "owned_pieces", "make_reference"])
def test_whatever_fails_later_leaves_nothing(tiny, built, monkeypatch, name):
    def fail(*_: Any) -> None:
        raise MemoryError(name)

    with monkeypatch.context() as patched:
        patched.setattr(rl_megatron.policy, name, fail)
        with pytest.raises(MemoryError):
            MegatronPolicy(str(tiny()))
        nothing_left()
    policy = built(MegatronPolicy(str(tiny())))
    assert policy.train(training_batch((5, 3)), NegativeLogLikelihood())["grad_norm"] > 0


def test_shutdown_ends_the_threads_of_all_groups(tiny):
    def trained() -> MegatronPolicy:
        policy = MegatronPolicy(str(tiny()))
        policy.train(training_batch((5, 3)), NegativeLogLikelihood())
        policy.shutdown()
        return policy

    trained()  # gloo keeps a thread for the process from then on
    gc.collect()
    before = len(list(Path("/proc/self/task").iterdir()))
    policy = trained()
    assert len(list(Path("/proc/self/task").iterdir())) == before
    policy.shutdown()


def test_a_checkpoint_that_is_not_there_leaves_nothing(tiny, tmp_path):
    refused(tiny(), CheckpointError, "none", resume_from=str(tmp_path / "none"))


def test_a_megatron_of_other_parameters_is_named(tiny, built):
    policy = built(MegatronPolicy(str(tiny())))
    module, table, at = policy._module, policy.table, policy._at
    module.extra = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match="no tensor of the checkpoint fills: extra"):
        owned_pieces(table, at, module)
    del module.extra, module.decoder.layers[1].mlp.linear_fc2.weight
    with pytest.raises(ConfigError, match=r"no parameter for .*layers\.1\.mlp\.linear_fc2"):
        owned_pieces(table, at, module)


def test_a_rank_without_a_token_of_the_vocabulary_has_padding_alone(tiny, built):
    policy = built(MegatronPolicy(str(tiny())))
    few = replace(policy.table.architecture, vocabulary=5)
    table = type(policy.table)(few)
    at = Sizes(tensor=2, data=1).coordinates(1)
    assert not any("embed" in piece.name for piece in table.pieces(at))
    found = {one.name for one in owned_pieces(table, at, policy._module)}
    assert found.isdisjoint(table.padding(at))
