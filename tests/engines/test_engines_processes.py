"""Real engines: what is refused when one starts, and that all of it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from typing import Any

import psutil
import pytest
from real_engines import directories_in, processes_of, prompts, running, shared_by, sockets_in

from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError, WorkerDiedError

pytestmark = [pytest.mark.engine, pytest.mark.slow]

#: Within which what an engine leaves is removed.
SOON_S = 60.0


@pytest.mark.parametrize(
    ("kind", "key", "given"),
    [
        ("vllm", "vllm_cfg.engine_args.max_num_seq", {"engine_args": {"max_num_seq": 4}}),
        ("vllm", "vllm_cfg.pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("vllm", "vllm_cfg", {"max_model_len": 100_000}),
        ("sglang", "sglang_cfg.engine_args.page_sise", {"engine_args": {"page_sise": 4}}),
        ("sglang", "max_model_len", {"max_model_len": 100_000}),
        ("sglang", "sglang_cfg.max_total_tokens", {"max_total_tokens": 100}),
        ("sglang", "sglang_cfg", {"engine_args": {"schedule_policy": "no-such"}}),
    ],
    indirect=["kind"],
)
def test_what_an_engine_does_not_take_is_refused_with_the_key(kind, key, given, start):
    with pytest.raises(ConfigError) as caught:
        start("qwen2", given)
    assert caught.value.details["key"] == key
    assert caught.value.fix


#: What engines say of weights that are larger or smaller than the configuration's.
OF_OTHER_SIZES = {"vllm": "cannot load the weights", "sglang": "do not fit its config.json"}


@pytest.mark.parametrize(
    ("key", "changes", "words"),
    [
        ("model_name", {"intermediate_size": 1024}, ""),
        ("model_name", {"model_type": "no-such"}, r"config\.json of .* cannot be loaded"),
        ("model_name", {"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        (
            "trust_remote_code",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
            "Python code of the checkpoint",
        ),
    ],
)
def test_a_config_that_is_not_of_the_weights_is_refused(
    kind, key, changes, words, start, tiny, tmp_path
):
    path = tmp_path / "other"
    shutil.copytree(tiny("qwen2"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=words or OF_OTHER_SIZES[kind.name]) as caught:
        start("qwen2", model_name=str(path))
    assert caught.value.details["key"] == key
    assert caught.value.fix


def test_stop_strings_of_a_row_want_a_tokenizer(start, tiny, tmp_path):
    path = tmp_path / "bare"
    shutil.copytree(tiny("qwen2"), path, ignore=shutil.ignore_patterns("*token*"))
    engine = start(model_name=str(path), pad_token_id=0, max_new_tokens=3)
    assert engine.generate(prompts()).size == 4
    with pytest.raises(DataError, match="row 1"):
        engine.generate(BatchedDataDict({**prompts(), "stop_strings": [[], ["x"], [], []]}))


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "decoding"])
def test_an_engine_that_dies_is_named_with_its_last_words(idle, start):
    engine = start("qwen2")
    if idle:
        engine.generate(prompts())
    session = processes_of(engine.pid)
    shared = shared_by([engine.pid])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"exit status -9"):
        engine.generate(prompts())
    assert not [path for path in shared if path.exists()]
    end = time.monotonic() + SOON_S
    while left := [pid for pid in session if running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_engines_on_the_cpu_are_forked_from_one_process(start, imported):
    first, second = start("qwen2"), start("llama")
    assert psutil.Process(first.pid).ppid() == psutil.Process(second.pid).ppid() == imported()
    assert first.generate(prompts(), greedy=True).size == 4
    first.shutdown()
    assert second.generate(prompts(), greedy=True).size == 4


@pytest.mark.parametrize(
    ("kind", "given", "processes"),
    [
        pytest.param("vllm", {}, 1, marks=pytest.mark.full),
        ("vllm", {"tensor_parallel_size": 2}, 2),
        pytest.param("vllm", {"async_engine": True}, 2, marks=pytest.mark.full),
        ("sglang", {"tp_size": 2}, 3),
    ],
    indirect=["kind"],
)
def test_nothing_outlives_a_driver_that_is_killed(kind, given, processes, tiny, tmp_path):
    backend = kind.backend.__name__
    script = f"""
        import time
        from rl_{kind.name} import {backend}
        if __name__ == "__main__":
            engine = {backend}(None, {{
                "model_name": {str(tiny("qwen2"))!r},
                "{kind.section}": {kind.small | given!r},
            }})
            print(engine.pid, flush=True)
            time.sleep(600)
    """
    path = tmp_path / "driver.py"
    path.write_text(textwrap.dedent(script))
    with tempfile.TemporaryDirectory(prefix="t") as temporary:  # short enough for a socket
        environment = {**os.environ, "TMPDIR": temporary}
        with subprocess.Popen(
            [sys.executable, str(path)], stdout=subprocess.PIPE, text=True, env=environment
        ) as driver:
            try:
                engine = int(driver.stdout.readline())
                session = processes_of(engine)
                assert directories_in(temporary)
                assert len(session) >= processes
                sockets = sockets_in(temporary)
                assert bool(sockets) == (processes > 1)
                assert {path.parent.stat().st_mode & 0o777 for path in sockets} <= {0o700}
                shared = shared_by(session)
                assert shared or given.get(kind.backend.workers_key, 1) == 1
            finally:
                driver.kill()

        def left() -> list[Any]:
            alive = [pid for pid in session if running(pid)]
            found = [*sockets_in(temporary), *directories_in(temporary)]
            return [*alive, *found, *[path for path in shared if path.exists()]]

        end = time.monotonic() + SOON_S
        while left():
            assert time.monotonic() < end, f"left of {session}: {left()}"
            time.sleep(0.1)
