"""A plugin without its engine: what it declares, refuses and sets."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from rl_core import create_generation
from rl_core.errors import ConfigError, IncompatiblePluginError
from rl_core.install import engine_extra


def test_the_manifest_and_the_backend_import_no_engine(kind):
    code = (
        f"import sys; import rl_{kind.name}.manifest, rl_{kind.name}.config; "
        f"assert not {{'torch', '{kind.name}', 'ray', 'transformers'}} & set(sys.modules); "
        f"import rl_{kind.name}.generation; assert '{kind.name}' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("key", "config", "engine"),
    [
        ("{section}.{workers}s", {}, {"{workers}s": 2}),
        ("{section}.{workers}", {}, {"{workers}": 0}),
        ("{section}.dtype", {}, {"dtype": "float64"}),
        ("torch_dtype", {"torch_dtype": "float32"}, {"dtype": "bfloat16"}),
        ("max_model_len", {"max_model_len": 64}, {"max_model_len": 32}),
        ("model_name", {"model_name": "./nowhere"}, {}),
    ],
)
def test_wrong_keys_are_refused_before_anything_starts(key, config, engine, kind, tmp_path):
    names = {"section": kind.section, "workers": kind.backend.workers_key}
    given = {name.format(**names): value for name, value in engine.items()}
    with pytest.raises(ConfigError) as caught:
        kind.build({"model_name": str(tmp_path), **config}, given)
    assert caught.value.details["key"] == key.format(**names)


def test_a_directory_without_a_model_is_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        kind.build({"model_name": str(tmp_path)})


def test_without_the_engine_the_error_says_how_to_get_it(kind, monkeypatch, tmp_path):
    monkeypatch.setattr("rl_core.plugins.discovery.engine_version", lambda engine: None)
    extra = engine_extra(f"rl-{kind.name}", "engine")
    with pytest.raises(Exception, match=rf"pip install.*rl-{kind.name}\[{extra}\]"):
        create_generation({"backend": kind.name, "model_name": str(tmp_path)})


def test_another_release_is_refused_with_all_that_is_touched(kind, monkeypatch):
    found = (kind.name, "0.99.0")
    monkeypatch.setattr("rl_core.plugins.discovery.engine_version", lambda engine: found)
    private = kind.module("private")
    with pytest.raises(IncompatiblePluginError, match=r"0\.99\.0 is outside") as caught:
        private.check_version()
    assert all(name in str(caught.value) for name in private.PRIVATE)


def test_the_engine_gets_variables_that_this_process_does_not(kind, monkeypatch):
    parts = kind.module("environment")
    for name in parts.VARIABLES["cpu"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    before = dict(os.environ)
    given = parts.engine_environment("cpu", workers=2)
    assert (given["TORCHDYNAMO_DISABLE"], given["OMP_NUM_THREADS"]) == ("1", "4")
    assert set(given) - set(before) <= {*parts.VARIABLES["any"], *parts.VARIABLES["cpu"]}
    assert not set(parts.engine_environment("cuda")) & set(parts.VARIABLES["cpu"])
    assert dict(os.environ) == before


def test_what_is_exported_wins(kind, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert kind.module("environment").engine_environment("cpu")["OMP_NUM_THREADS"] == "7"
