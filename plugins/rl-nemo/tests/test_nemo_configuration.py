"""Their keys as ours: those that have a place, and the list of those that do not."""

from __future__ import annotations

from typing import Any

import pytest

import rl_nemo
from rl_core.config import check_config
from rl_core.errors import CapabilityError, ConfigError
from rl_hf.config import HuggingFacePolicyConfig
from rl_megatron.config import MegatronPolicyConfig
from rl_sglang.config import SglangConfig
from rl_vllm.config import VllmConfig

#: As their configuration of GRPO has it, shortened.
POLICY: dict[str, Any] = {
    "model_name": "Qwen/Qwen2.5-1.5B",
    "tokenizer": {"name": "Qwen/Qwen2.5-1.5B", "chat_template_kwargs": None},
    "hf_config_overrides": {},
    "train_global_batch_size": 512,
    "train_micro_batch_size": 4,
    "logprob_batch_size": 4,
    "max_total_sequence_length": 512,
    "precision": "bfloat16",
    "dtensor_cfg": {
        "_v2": True,
        "enabled": True,
        "cpu_offload": False,
        "activation_checkpointing": True,
        "tensor_parallel_size": 1,
        "lora_cfg": {
            "enabled": True,
            "target_modules": [],
            "match_all_linear": True,
            "dim": 8,
            "alpha": 32,
            "dropout": 0.0,
            "use_triton": True,
        },
    },
    "megatron_cfg": {
        "enabled": False,
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "activation_checkpointing": True,
        "optimizer": {"optimizer": "adam", "lr": 5.0e-6, "weight_decay": 0.01, "adam_eps": 1e-8},
    },
    "dynamic_batching": {"enabled": False, "train_mb_tokens": 2048, "sequence_length_round": 64},
    "sequence_packing": {
        "enabled": True,
        "train_mb_tokens": 2048,
        "logprob_mb_tokens": 2048,
        "algorithm": "modified_first_fit_decreasing",
        "microbatch_order": "packer",
    },
    "max_grad_norm": 1.0,
    "optimizer": {
        "name": "torch.optim.AdamW",
        "kwargs": {"lr": 5.0e-6, "weight_decay": 0.01, "betas": [0.9, 0.999], "eps": 1e-8},
    },
    "scheduler": [{"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"total_iters": 50}}],
    "generation": {
        "backend": "vllm",
        "max_new_tokens": 512,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": None,
        "val_temperature": 0.8,
        "val_top_p": 1.0,
        "val_top_k": None,
        "bad_words": [],
        "port_range_low": 3000,
        "port_range_high": 4999,
        "use_async_rollouts": True,
        "stop_token_ids": None,
        "stop_strings": ["</s>"],
        "_pad_token_id": 0,
        "colocated": {"enabled": True, "resources": {"gpus_per_node": None, "num_nodes": None}},
        "vllm_cfg": {
            "async_engine": True,
            "precision": "bfloat16",
            "kv_cache_dtype": "auto",
            "logprobs_mode": "processed_logprobs",
            "tensor_parallel_size": 1,
            "gpu_memory_utilization": 0.6,
            "max_model_len": 512,
            "enforce_eager": False,
            "use_tqdm": True,
        },
        "vllm_kwargs": {},
    },
}


def test_a_policy() -> None:
    made = rl_nemo.policy_config(POLICY, reference="none")
    checked = check_config(HuggingFacePolicyConfig, made.config, what="policy")
    assert checked["backend"] == "hf"
    assert checked["optimizer"] == {
        "lr": 5.0e-6,
        "weight_decay": 0.01,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    }
    assert checked["temperature"] == 0.8
    assert checked["torch_dtype"] == "bfloat16"
    assert checked["gradient_checkpointing"]
    assert checked["lora"] == {
        "r": 8,
        "alpha": 32.0,
        "dropout": 0.0,
        "target_modules": "all-linear",
    }
    assert checked["sequence_packing"]["train_mb_tokens"] == 2048
    assert checked["reference"] == "none"
    assert set(made.dropped) == {
        "tokenizer.name",
        "max_total_sequence_length",
        "dtensor_cfg._v2",
        "dtensor_cfg.tensor_parallel_size",
        "sequence_packing.microbatch_order",
        "scheduler",
    }
    assert "scheduler: [{" in str(made)
    packing = {**POLICY["sequence_packing"], "microbatch_order": "largest_first"}
    made = rl_nemo.policy_config({**POLICY, "sequence_packing": packing})
    assert "sequence_packing.microbatch_order" not in made.dropped  # it is the order here


def test_a_policy_on_megatron() -> None:
    section = {
        **POLICY,
        "dtensor_cfg": {"enabled": False, "_v2": True},
        "megatron_cfg": {**POLICY["megatron_cfg"], "enabled": True},
    }
    made = rl_nemo.policy_config(section)
    checked = check_config(MegatronPolicyConfig, made.config, what="policy")
    assert checked["backend"] == "megatron"
    assert checked["tensor_model_parallel_size"] == 2
    assert checked["sequence_parallel"]
    assert checked["activation_recompute"] == "full"
    assert checked["optimizer"] == {"lr": 5.0e-6, "weight_decay": 0.01, "eps": 1e-8}
    assert not any(name.startswith("dtensor_cfg") for name in made.dropped)
    assert "optimizer.name" in made.dropped


def test_an_engine() -> None:
    made = rl_nemo.generation_config(POLICY["generation"], model_name="Qwen/Qwen2.5-1.5B")
    checked = check_config(VllmConfig, made.config, what="generation")
    assert checked["vllm_cfg"] == {
        "async_engine": True,
        "dtype": "bfloat16",
        "tensor_parallel_size": 1,
        "gpu_memory_utilization": 0.6,
        "enforce_eager": False,
        "engine_args": {},
    }
    assert checked["max_model_len"] == 512
    assert checked["logprobs_mode"] == "processed"
    assert checked["pad_token_id"] == 0
    assert checked["colocated"] == {"enabled": True}
    assert set(made.dropped) == {"port_range_low", "port_range_high", "vllm_cfg.use_tqdm"}


def test_sglang() -> None:
    own = {
        "tp_size": 2,
        "context_length": 512,
        "kv_cache_dtype": "auto",
        "mem_fraction_static": 0.7,
        "disable_piecewise_cuda_graph": True,
        "sglang_server_config": {"needs_offload": True, "pause_generation_mode": "retract"},
    }
    section = {**POLICY["generation"], "backend": "sglang", "sglang_cfg": own}
    made = rl_nemo.generation_config(section, model_name="m")
    checked = check_config(SglangConfig, made.config, what="generation")
    assert checked["sglang_cfg"] == {"tp_size": 2, "mem_fraction_static": 0.7}
    assert checked["max_model_len"] == 512
    assert made.dropped["sglang_cfg.sglang_server_config.pause_generation_mode"] == "retract"
    assert made.dropped["sglang_cfg.disable_piecewise_cuda_graph"] is True


def test_an_engine_in_an_environment_of_its_own() -> None:
    given = POLICY["generation"]
    plain = rl_nemo.generation_config(given, model_name="m").config
    made = rl_nemo.generation_config(given, model_name="m", vllm_cfg={"python": "/e/bin/python"})
    expected = {**plain, "vllm_cfg": {**plain["vllm_cfg"], "python": "/e/bin/python"}}
    assert made.config == expected


def test_another_engine_in_its_place() -> None:
    made = rl_nemo.generation_config(POLICY["generation"], model_name="m", backend="hf")
    assert made.config["backend"] == "hf"
    assert "vllm_cfg" not in made.config
    assert made.dropped["vllm_cfg.gpu_memory_utilization"] == 0.6


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"exactly one of .* must be enabled"):
        rl_nemo.policy_config({**POLICY, "dtensor_cfg": {"enabled": False}})
    with pytest.raises(CapabilityError, match=r"^router_replay is not supported"):
        rl_nemo.policy_config({**POLICY, "router_replay": {"enabled": True}})
    for key, value in (("bad_words", ["x"]), ("val_temperature", 0.1), ("val_top_k", 5)):
        with pytest.raises(CapabilityError, match=f"^{key} is not supported"):
            rl_nemo.generation_config({**POLICY["generation"], key: value})
    with pytest.raises(ConfigError, match="SGD"):
        rl_nemo.policy_config({**POLICY, "optimizer": {"name": "torch.optim.SGD"}})
