"""Engine arguments that results or refits depend on are refused by name; all were looked at."""

from __future__ import annotations

import ast
import importlib.util
from collections import Counter
from pathlib import Path

import pytest

from rl_core.errors import ConfigError
from rl_vllm import VllmGeneration
from rl_vllm.engine_args import ALLOWED, OWN_KEYS, REFUSED, WITHOUT_REFITS, check_engine_args


@pytest.mark.engine
def test_every_argument_of_the_installed_vllm_is_in_one_table():
    [package] = importlib.util.find_spec("vllm").submodule_search_locations
    source = ast.parse((Path(package) / "engine" / "arg_utils.py").read_text())
    known = {
        field.target.id
        for cls in source.body
        if isinstance(cls, ast.ClassDef) and cls.name in ("EngineArgs", "AsyncEngineArgs")
        for field in cls.body
        if isinstance(field, ast.AnnAssign)
    }
    assert len(known) > 200
    seen = Counter([*OWN_KEYS, *ALLOWED, *REFUSED, *WITHOUT_REFITS])
    assert not known - set(seen)
    assert max(seen.values()) == 1


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("logprobs_mode", "raw_logits", "set logprobs_mode"),
        ("model", "other", "set model_name"),
        ("seed", 3, "set vllm_cfg.seed"),
        ("tensor_parallel_size", 2, "set vllm_cfg.tensor_parallel_size"),
        ("worker_extension_cls", "a.B", "leave it out"),
        ("generation_config", "auto", "leave it out"),
        ("override_generation_config", {"temperature": 0.1}, "leave it out"),
        ("tokenizer", "other", "model_name"),
        ("hf_overrides", {"rope_theta": 1.0}, "model_name"),
        ("speculative_config", {}, "leave it out"),
        ("logits_processors", [], "leave it out"),
        ("enable_lora", True, "merged"),
        ("data_parallel_size", 2, "RayVirtualCluster"),
        ("kv_transfer_config", {}, "leave it out"),
        ("cpu_offload_gb", 4, "vllm_cfg.refit"),
        ("enable_chunked_prefill", True, "leave it out"),
        ("max_num_seq", 4, "write vllm_cfg.max_num_seqs"),
        ("block_sizes", 4, "write vllm_cfg.engine_args.block_size"),
        ("zzz", 4, "remove"),
    ],
)
def test_what_results_or_refits_depend_on_is_refused_by_name(name, value, fix, tiny):
    vllm_cfg = {"engine_args": {"block_size": 32, name: value}}
    with pytest.raises(ConfigError) as caught:
        VllmGeneration(None, {"model_name": str(tiny()), "vllm_cfg": vllm_cfg})
    assert caught.value.details["key"] == f"vllm_cfg.engine_args.{name}"
    assert fix in caught.value.fix


def test_without_refits_more_may_be_given_but_nothing_that_changes_results():
    check_engine_args({"refit": False, "engine_args": {"cpu_offload_gb": 4}}, "cuda")
    check_engine_args({"engine_args": {"enable_chunked_prefill": True}}, "cuda")
    with pytest.raises(ConfigError, match="logits_processors"):
        check_engine_args({"refit": False, "engine_args": {"logits_processors": []}}, "cuda")
