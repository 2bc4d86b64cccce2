"""The plugin without its engine: what it declares, refuses and sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_core import create_generation
from rl_core.errors import ConfigError, IncompatiblePluginError
from rl_sglang.environment import VARIABLES, engine_environment
from rl_sglang.generation import SglangGeneration
from rl_sglang.private import PRIVATE, check_version


def test_the_manifest_and_the_backend_import_no_engine():
    code = (
        "import sys; import rl_sglang.manifest, rl_sglang.config; "
        "assert not {'torch', 'sglang', 'ray', 'transformers'} & set(sys.modules); "
        "import rl_sglang.generation; assert 'sglang' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("key", "config"),
    [
        ("sglang_cfg.tp_sise", {"sglang_cfg": {"tp_sise": 2}}),
        ("sglang_cfg.tp_size", {"sglang_cfg": {"tp_size": 0}}),
        ("sglang_cfg.dtype", {"sglang_cfg": {"dtype": "float64"}}),
        ("torch_dtype", {"torch_dtype": "float32", "sglang_cfg": {"dtype": "bfloat16"}}),
        ("max_model_len", {"max_model_len": 64, "sglang_cfg": {"max_model_len": 32}}),
        ("model_name", {"model_name": "./nowhere"}),
    ],
)
def test_wrong_keys_are_refused_before_anything_starts(key, config, tmp_path):
    with pytest.raises(ConfigError) as caught:
        SglangGeneration(None, {"model_name": str(tmp_path), **config})
    assert caught.value.details["key"] == key


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        SglangGeneration(None, {"model_name": str(tmp_path)})


def test_without_the_engine_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr("rl_core.plugins.discovery.engine_version", lambda engine: None)
    with pytest.raises(Exception, match=r"pip install.*rl-sglang\[engine\]"):
        create_generation({"backend": "sglang", "model_name": str(tmp_path)})


def test_another_sglang_is_refused_with_all_that_is_touched(monkeypatch):
    found = ("sglang", "0.99.0")
    monkeypatch.setattr("rl_core.plugins.discovery.engine_version", lambda engine: found)
    with pytest.raises(IncompatiblePluginError, match=r"0\.99\.0 is outside") as caught:
        check_version()
    assert all(name in str(caught.value) for name in PRIVATE)


def test_the_engine_gets_variables_that_this_process_does_not(monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    before = dict(os.environ)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    before.pop("OMP_NUM_THREADS", None)
    given = engine_environment("cpu", workers=2)
    assert (given["TORCHDYNAMO_DISABLE"], given["OMP_NUM_THREADS"]) == ("1", "4")
    assert set(given) - set(before) <= {*VARIABLES["any"], *VARIABLES["cpu"]}
    assert dict(os.environ) == before


def test_what_is_exported_wins(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert engine_environment("cpu")["OMP_NUM_THREADS"] == "7"
    assert "SGLANG_USE_CPU_ENGINE" not in engine_environment("cuda")
