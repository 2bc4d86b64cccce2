"""Real engines: what they generate, what refits bring them to, and that they end."""

from __future__ import annotations

import os
import shutil
import socket

import psutil
import pytest
from real_engines import (
    processes_of,
    prompts,
    shared_by,
)
from safetensors.torch import load_file, save_file

from rl_backends import Row, SamplingParams
from rl_core.errors import (
    ConfigError,
    WorkerDiedError,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_port_that_is_in_use_is_named(start):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            start("qwen2", {"engine_args": {"nccl_port": port}})
    assert caught.value.details["key"] == "sglang_cfg.engine_args.nccl_port"


@pytest.mark.parametrize("lost", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_a_checkpoint_that_lacks_a_tensor_is_refused(lost, start, tiny, tmp_path):
    """SGLang leaves what it finds no weights for as it was in memory, and says nothing."""
    path = tmp_path / "less"
    shutil.copytree(tiny("qwen2"), path)
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: one for name, one in tensors.items() if name != lost}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match="no tensor in") as caught:
        start("qwen2", model_name=str(path))
    assert lost.rpartition(".")[0].split(".")[-1].removeprefix("up_") in str(caught.value)


def test_an_engine_that_is_refused_leaves_no_shared_memory(start):
    start("llama").shutdown()  # what others leave is not counted
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(ConfigError):
        start("qwen2", {"max_total_tokens": 100})
    assert {name for name in set(os.listdir("/dev/shm")) - before if "sglang" in name} == set()


def test_rows_are_aborted_by_their_whole_names(start):
    """SGLang aborts all requests whose names begin with the given one."""
    engine = start("qwen2", torch_dtype="float32", max_new_tokens=200)
    how = SamplingParams(greedy=True)
    first = (1 << 40) + 1
    rows = [Row(first, 0, 0, [5, 6], 150, 0, False, (), how)]
    rows += [Row(first * 10 + k, 0, 1 + k, [5, 6], 20, 0, False, (), how) for k in range(3)]
    engine._process.submit(rows)
    engine._process.cancel([first])
    found = {}
    while len(found) < 3:
        progress = engine._process.progress(20.0)
        found |= {done.row: done for done in (progress.rows if progress else [])}
    assert all(len(done.token_ids) == 20 for done in found.values())
    assert first not in found
    assert engine.generate(prompts(), greedy=True).size == 4


def test_a_scheduler_that_fails_ends_the_engine_and_not_the_user(start):
    """SGLang kills its whole tree; the error has its last words, and another can start."""
    engine = start("qwen2")
    shared = shared_by(processes_of(engine.pid))
    [scheduler] = psutil.Process(engine.pid).children()
    scheduler.kill()
    with pytest.raises(WorkerDiedError) as caught:
        engine.generate(prompts())
    assert caught.value.details["log"]
    assert not [path for path in shared if path.exists()]
    another = start("qwen2")
    assert another.generate(prompts(), greedy=True).size == 4
