"""Real engines: what they generate, what refits bring them to, and that they end."""

from __future__ import annotations

import os
import signal
import tempfile
import time

import psutil
import pytest
import torch
from real_engines import (
    directories_in,
    processes_of,
    prompts,
    shared_by,
    sockets_in,
)

from rl_conformance.batches import generated, pad_rows
from rl_conformance.models import make_reciting_model, make_tokenizer
from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    ConfigError,
    DeadlineError,
    WorkerDiedError,
)
from rl_vllm import VllmGenerationWorker

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_a_model_that_vllm_loads_and_cannot_compute_is_refused_when_it_is_built(start, tiny):
    path = str(tiny("llama", hidden_size=64))  # heads of 16
    with pytest.raises(ConfigError, match=r"loaded .*, but cannot compute with it") as raised:
        start(model_name=path)
    assert "sizes" in raised.value.fix


def test_a_seed_of_minus_one_is_a_seed(start):
    engine = start("qwen2")
    data = BatchedDataDict({**prompts(), "seed": torch.full((4,), -1)})
    drawn = [engine.generate(data)["output_ids"] for _ in range(2)]
    assert torch.equal(*drawn)


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(temperature, start):
    with pytest.raises(ConfigError) as caught:
        start("qwen2", temperature=temperature)
    assert caught.value.details["key"] == "temperature"


@pytest.mark.parametrize(
    "async_engine", [False, pytest.param(True, marks=pytest.mark.full)], ids=["sync", "async"]
)
def test_a_stop_string_is_one_of_the_generated_text(async_engine, start, tmp_path):
    face = make_tokenizer().encode("\N{HUGGING FACE}")
    path = make_reciting_model(tmp_path / "reciter", face)
    engine = start(engine={"async_engine": async_engine}, model_name=str(path))
    rows = [face[:count] for count in (1, 2, 3, 4)]  # all but the last end within the character
    data = pad_rows(rows, stop_strings=[["\N{HUGGING FACE}"]] * 4)
    output = engine.generate(data, greedy=True)
    rest = [face[count:] for count in (1, 2, 3, 4)]
    assert generated(data, output) == [[*tokens, *face] for tokens in rest]
    assert not output["truncated"].any()


def test_the_worker_class_of_the_documents(imported, tiny):
    worker = VllmGenerationWorker(
        str(tiny("qwen2")), max_new_tokens=3, vllm_cfg={"kv_cache_memory_bytes": 64 << 20}
    )
    output = worker.generate(torch.tensor([[5, 6, 7]]), greedy=True)
    assert output["output_ids"][0, :3].tolist() == [5, 6, 7]
    assert worker.shutdown()


def test_a_call_that_was_given_up_does_not_answer_the_next(start):
    engine = start("qwen2")
    process = engine._process
    os.kill(process.pid, signal.SIGSTOP)
    try:
        with pytest.raises(DeadlineError):
            process.call("reset_caches", 0.2)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    assert process.call("sleep", 20.0, tags=[], level=1) is None
    assert process.call("reset_caches", 20.0) is True


@pytest.fixture
def own_server(monkeypatch):
    """Engines of this test are forked from a process of their own."""
    monkeypatch.setenv("RL_VLLM_TEST", "own")


@pytest.mark.full
def test_engines_on_the_cpu_are_forked_from_one_process_that_ends_with_the_last(start, own_server):
    children = psutil.Process().children()
    first, second = start("qwen2"), start("llama")
    server = psutil.Process(first.pid).parent()
    assert server.parent() == psutil.Process()
    assert psutil.Process(second.pid).parent() == server
    assert first.generate(prompts(), greedy=True).size == 4
    first.shutdown()
    assert second.generate(prompts(), greedy=True).size == 4
    second.shutdown()
    assert not server.is_running()
    assert psutil.Process().children() == children


@pytest.mark.full
def test_engines_end_with_the_process_that_forked_them_and_the_next_has_another(start, own_server):
    engine = start("qwen2")
    process = psutil.Process(engine.pid)
    process.parent().kill()
    process.wait(20)
    with pytest.raises(WorkerDiedError):
        engine.generate(prompts())
    another = start("qwen2")
    assert another.generate(prompts(), greedy=True).size == 4


@pytest.mark.full
@pytest.mark.parametrize("cfg", [{"tensor_parallel_size": 2}, {"async_engine": True}], ids=str)
def test_vllms_sockets_are_private_and_go_with_the_engine(cfg, start, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        engine = start("qwen2", cfg)
        found = sockets_in(temporary)
        assert found
        assert directories_in(temporary)
        assert {path.parent.stat().st_mode & 0o777 for path in found} == {0o700}
        engine.shutdown()
        assert not directories_in(temporary)


def test_the_directory_of_a_killed_engine_does_not_wait_for_its_driver(start, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="t") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        engine = start("qwen2")
        assert directories_in(temporary)
        os.kill(engine.pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while directories_in(temporary):
            assert time.monotonic() < end, "nobody removed it"
            time.sleep(0.1)


@pytest.mark.full
def test_the_shared_memory_of_a_killed_engine_is_removed(start):
    engine = start("qwen2", {"tensor_parallel_size": 2})
    shared = shared_by(processes_of(engine.pid))
    assert shared
    for pid in processes_of(engine.pid):
        os.kill(pid, signal.SIGKILL)
    engine.shutdown()
    assert not [path for path in shared if path.exists()]
