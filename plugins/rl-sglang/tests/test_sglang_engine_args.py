"""Server arguments that results or refits depend on are refused by name; all were looked at."""

from __future__ import annotations

from collections import Counter

import pytest

from rl_core.errors import ConfigError
from rl_sglang import SglangGeneration
from rl_sglang.cpu import stand_in
from rl_sglang.engine_args import ALLOWED, OWN_KEYS, REFUSED, WITHOUT_REFITS, check_engine_args


def test_no_argument_is_in_two_tables():
    seen = Counter([*OWN_KEYS, *ALLOWED, *REFUSED, *WITHOUT_REFITS])
    assert [name for name, count in seen.items() if count > 1] == []


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_every_argument_of_the_installed_sglang_is_in_one_table(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    stand_in()
    from sglang.srt.server_args import ServerArgs

    known = set(ServerArgs.__struct_fields__)
    assert len(known) > 400
    assert sorted(known - {*OWN_KEYS, *ALLOWED, *REFUSED, *WITHOUT_REFITS}) == []


@pytest.mark.parametrize(
    ("name", "value", "fix"),
    [
        ("model_path", "other", "set model_name"),
        ("context_length", 99, "set max_model_len"),
        ("random_seed", 3, "set sglang_cfg.random_seed"),
        ("tp_size", 2, "set sglang_cfg.tp_size"),
        ("sampling_backend", "flashinfer", "leave it out"),
        ("skip_tokenizer_init", False, "leave it out"),
        ("preferred_sampling_params", {"temperature": 0.1}, "leave it out"),
        ("tokenizer_path", "other", "model_name"),
        ("json_model_override_args", "{}", "model_name"),
        ("speculative_algorithm", "EAGLE", "leave it out"),
        ("enable_lora", True, "merged"),
        ("dp_size", 2, "RayVirtualCluster"),
        ("enable_hierarchical_cache", True, "leave it out"),
        ("api_key", "secret", "leave it out"),
        ("quantization", "fp8", "sglang_cfg.refit"),
        ("max_running_request", 4, "write sglang_cfg.max_running_requests"),
        ("page_sizes", 4, "write sglang_cfg.engine_args.page_size"),
        ("zzz", 4, "remove"),
    ],
)
def test_what_results_or_refits_depend_on_is_refused_by_name(name, value, fix, tiny):
    given = {"engine_args": {"page_size": 1, name: value}}
    with pytest.raises(ConfigError) as caught:
        SglangGeneration(None, {"model_name": str(tiny()), "sglang_cfg": given})
    assert caught.value.details["key"] == f"sglang_cfg.engine_args.{name}"
    assert fix in caught.value.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention_backend", "triton"),
        ("kv_cache_dtype", "fp8_e4m3"),
        ("disable_cuda_graph", False),
    ],
)
def test_what_the_cpu_lacks_is_refused_there_alone(key, value):
    with pytest.raises(ConfigError) as caught:
        check_engine_args({key: value}, "cpu")
    assert caught.value.details["key"] == f"sglang_cfg.{key}"
    check_engine_args({key: value}, "cuda")


def test_without_refits_more_may_be_given_but_nothing_that_changes_results():
    check_engine_args({"refit": False, "engine_args": {"quantization": "fp8"}}, "cuda")
    given = {"refit": False, "engine_args": {"speculative_algorithm": "EAGLE"}}
    with pytest.raises(ConfigError, match="speculative_algorithm"):
        check_engine_args(given, "cuda")


@pytest.mark.parametrize(
    ("key", "value"), [("temperature", 1e-7), ("repetition_penalty", 1.2)], ids=str
)
def test_what_sglang_would_take_for_something_else_is_refused(key, value, tiny):
    with pytest.raises(ConfigError) as caught:
        SglangGeneration(None, {"model_name": str(tiny()), key: value})
    assert caught.value.details["key"] == key
