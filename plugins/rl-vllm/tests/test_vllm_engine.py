"""Real engines: what they generate, what refits bring them to, and that they end."""

from __future__ import annotations

import asyncio
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
import torch
from real_engines import (
    difference,
    directories_in,
    hf_policy,
    processes_of,
    prompts,
    running,
    shake,
    shared_by,
    sockets_in,
)

from rl_backends import Row, SamplingParams
from rl_conformance.batches import generated, pad_rows
from rl_conformance.models import make_reciting_model, make_tokenizer
from rl_conformance.weights import engine_weights, policy_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    ConfigError,
    DataError,
    DeadlineError,
    ManifestMismatchError,
    RefitError,
    WorkerDiedError,
)
from rl_core.weights import refit
from rl_vllm import VllmGeneration, VllmGenerationWorker

pytestmark = [pytest.mark.engine, pytest.mark.slow]


CASES = {
    "tied, fused bias": ("qwen2", {}),
    "untied": ("llama", {}),
    "two workers": ("qwen3", {"tensor_parallel_size": 2}),
    "asynchronous, dummy weights": ("qwen2", {"async_engine": True, "load_format": "dummy"}),
}


@pytest.mark.parametrize("case", list(CASES))
def test_refits_bring_the_engine_to_the_policy(case, start, tiny):
    family, cfg = CASES[case]
    engine, policy = start(family, cfg, torch_dtype="float32"), hf_policy(tiny(family))
    if cfg.get("load_format") != "dummy":
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    for seed, options in enumerate(
        ({"verify": "installed"}, {"mode": "packed", "bucket_bytes": 20_000}, {"delta": True}), 1
    ):
        shake(policy, seed)
        refit(policy, engine, deadline_s=60.0, **options)
        assert (engine.weights_version, engine.weights_origin) == (seed, policy.weights_origin)
        for greedy in (True, False):
            assert difference(policy, engine.generate(prompts(), greedy=greedy)) < 1e-4
    policy.shutdown()


def test_an_engine_in_bfloat16_has_what_was_sent(start, tiny):
    engine = start("qwen2", torch_dtype="bfloat16")
    policy = hf_policy(tiny("qwen2"), torch_dtype="bfloat16")
    for seed, options in enumerate(({"verify": "installed"}, {"isolation": "staged"}), 1):
        shake(policy, seed)
        refit(policy, engine, deadline_s=60.0, **options)
        installed = engine_weights(engine)
        for name, weight in policy_weights(policy).items():
            assert torch.equal(installed[name], weight), name
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 0.2
    policy.shutdown()


def test_every_way_of_the_bytes_reaches_every_worker(start, tiny):
    engine = start("qwen2", {"tensor_parallel_size": 2}, torch_dtype="float32")
    policy = hf_policy(tiny("qwen2"))
    shake(policy, 1)
    report = refit(policy, engine, transport="collective", verify="installed", deadline_s=60.0)
    assert report.receivers == engine.receiver_count == 2
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    shake(policy, 2)
    [keys] = policy.prepare_weights_for_ipc()
    assert engine.update_weights(policy.get_weights_ipc_handles(keys, receivers=2)) is True
    assert engine.weights_version == 2
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    policy.shutdown()


@pytest.fixture
def same_environment():
    """Takes back what a test exports, as Ray does: engines of another environment share nothing."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_replicas_on_a_cluster_share_the_rows_and_a_refit(tiny, same_environment):
    from rl_ray import RayVirtualCluster

    engine_config = {"max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}
    config = {"model_name": str(tiny("qwen2")), "torch_dtype": "float32", "max_new_tokens": 6}
    policy = hf_policy(tiny("qwen2"))
    shake(policy)
    with RayVirtualCluster([2], name="vllm-replicas") as cluster:
        engine = VllmGeneration(cluster, {**config, "vllm_cfg": engine_config, "num_samples": 2})
        engine.prepare_for_generation()
        refit(policy, engine, deadline_s=60.0)
        output = engine.generate(prompts(5))
        assert output.size == 10
        assert difference(policy, output) < 1e-4
        engine.shutdown()
    policy.shutdown()


def test_a_staged_refit_exchanges_the_weights(start, tiny):
    engine, policy = start("qwen2", torch_dtype="float32"), hf_policy(tiny("qwen2"))
    before = engine.generate(prompts(), greedy=True)
    shake(policy)
    refit(policy, engine, isolation="staged", verify="installed", deadline_s=60.0)
    after = engine.generate(prompts(), greedy=True)
    assert not torch.equal(before["logprobs"], after["logprobs"])
    assert difference(policy, after) < 1e-4
    policy.shutdown()


def test_another_model_is_refused_and_the_old_one_serves(start, tiny):
    engine = start("qwen2", torch_dtype="float32")
    other = hf_policy(tiny("llama"))
    before = engine.generate(prompts(), greedy=True)
    with pytest.raises(ManifestMismatchError, match="nothing was written"):
        engine.prepare_refit_info(other.prepare_refit_info())  # before any training step
    with pytest.raises(ManifestMismatchError) as caught:
        refit(other, engine, deadline_s=30.0)
    assert "model.layers.0.self_attn.q_proj.bias" in caught.value.details["missing"]
    assert torch.equal(engine.generate(prompts(), greedy=True)["output_ids"], before["output_ids"])
    other.shutdown()


def test_rows_come_as_they_finish_and_may_be_left(start):
    engine = start("qwen2", {"async_engine": True}, torch_dtype="float32")
    whole = engine.generate(prompts(8), greedy=True)

    async def stream(count: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        rows = engine.generate_async(prompts(8), greedy=True)
        async for row, output in rows:
            found[row] = output["output_ids"][0].tolist()
            if len(found) == count:
                break
        await rows.aclose()
        return found

    everything = asyncio.run(stream(8))
    for row, ids in everything.items():
        assert whole["output_ids"][row, : len(ids)].tolist() == ids
    assert len(asyncio.run(stream(2))) == 2
    assert torch.equal(engine.generate(prompts(8), greedy=True)["output_ids"], whole["output_ids"])


@pytest.mark.parametrize(
    ("key", "cfg"),
    [
        ("vllm_cfg.engine_args.max_num_seq", {"engine_args": {"max_num_seq": 4}}),
        ("vllm_cfg.pipeline_parallel_size", {"pipeline_parallel_size": 2}),
        ("vllm_cfg", {"max_model_len": 100_000}),
    ],
)
def test_what_vllm_does_not_take_is_refused_with_the_key(key, cfg, start):
    with pytest.raises(ConfigError) as caught:
        start("qwen2", cfg)
    assert caught.value.details["key"] == key


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        ("model_name", {"intermediate_size": 1024}, "cannot load the weights"),
        ("model_name", {"model_type": "no-such"}, r"config\.json of .* cannot be loaded"),
        ("model_name", {"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        (
            "trust_remote_code",
            {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig"}},
            "Python that comes with the checkpoint",
        ),
    ],
)
def test_a_config_that_is_not_of_the_weights_is_refused(key, changes, says, start, tiny, tmp_path):
    path = tmp_path / "other"
    shutil.copytree(tiny("qwen2"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(ConfigError, match=says) as caught:
        start("qwen2", model_name=str(path))
    assert caught.value.details["key"] == key
    assert caught.value.fix


def test_a_model_that_vllm_loads_and_cannot_compute_is_refused_when_it_is_built(start, tiny):
    path = str(tiny("llama", hidden_size=64))  # heads of 16
    with pytest.raises(ConfigError, match=r"loads .* and cannot compute with it") as raised:
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


def test_stop_strings_of_a_row_want_a_tokenizer(imported, tiny, tmp_path):
    path = tmp_path / "bare"
    shutil.copytree(tiny("qwen2"), path, ignore=shutil.ignore_patterns("*token*"))
    config = {"model_name": str(path), "pad_token_id": 0, "max_new_tokens": 3}
    engine = VllmGeneration(None, {**config, "vllm_cfg": {"kv_cache_memory_bytes": 64 << 20}})
    engine.prepare_for_generation()
    assert engine.generate(prompts()).size == 4
    with pytest.raises(DataError, match="row 1"):
        engine.generate(BatchedDataDict({**prompts(), "stop_strings": [[], ["x"], [], []]}))
    engine.shutdown()


@pytest.mark.parametrize("async_engine", [False, True], ids=["sync", "async"])
def test_a_stop_string_is_one_of_the_generated_text(async_engine, start, tmp_path):
    face = make_tokenizer().encode("\N{HUGGING FACE}")
    path = make_reciting_model(tmp_path / "reciter", face)
    engine = start(vllm_cfg={"async_engine": async_engine}, model_name=str(path))
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


def test_a_refit_that_waits_for_a_long_generation_leaves_the_engine_whole(start, tiny):
    engine, policy = start("qwen2", torch_dtype="float32"), hf_policy(tiny("qwen2"))
    refit(policy, engine, deadline_s=60.0)
    with engine._lock, pytest.raises(RefitError):  # something holds generation up
        refit(policy, engine, deadline_s=1.0)
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    refit(policy, engine, deadline_s=60.0)
    policy.shutdown()


def test_a_row_that_vllm_refuses_fails_alone(start):
    engine = start("qwen2", torch_dtype="float32")
    whole = engine.generate(prompts(), greedy=True)
    how = SamplingParams(greedy=True)
    sound = Row(1 << 40, 0, 0, [5, 6, 7], 9, 0, False, (), how)
    beyond = Row((1 << 40) + 1, 0, 1, [10**6], 9, 0, False, (), how)  # no token of the model
    engine._process.submit([sound, beyond])
    done, failed = [], {}
    while not (done and failed):
        if (progress := engine._process.progress(20.0)) is not None:
            done += progress.rows
            failed |= progress.failed
    assert [(one.row, len(one.token_ids)) for one in done] == [(sound.key, 9)]
    assert "vocabulary" in str(failed[beyond.key])
    assert torch.equal(engine.generate(prompts(), greedy=True)["output_ids"], whole["output_ids"])


def test_an_engine_that_dies_is_told_with_its_last_words(start):
    engine = start("qwen2")
    shared = shared_by([engine.pid])
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"exit status -9"):
        engine.generate(prompts())
    assert not [path for path in shared if path.exists()]


@pytest.fixture
def own_server(monkeypatch):
    """Engines of this test are forked from a process of their own."""
    monkeypatch.setenv("RL_VLLM_TEST", "own")


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


def test_an_engine_does_not_import_vllm_where_another_has(start, imported):
    assert psutil.Process(start("qwen2").pid).ppid() == imported


def test_engines_end_with_the_process_that_forked_them_and_the_next_has_another(start, own_server):
    engine = start("qwen2")
    process = psutil.Process(engine.pid)
    process.parent().kill()
    process.wait(20)
    with pytest.raises(WorkerDiedError):
        engine.generate(prompts())
    another = start("qwen2")
    assert another.generate(prompts(), greedy=True).size == 4


def test_a_refit_to_a_dead_engine_fails_soon(start, tiny):
    engine, policy = start("qwen2", torch_dtype="float32"), hf_policy(tiny("qwen2"))
    refit(policy, engine, deadline_s=60.0)
    os.kill(engine.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises((WorkerDiedError, RefitError)):
        refit(policy, engine, deadline_s=60.0)
    assert time.monotonic() - began < 30
    policy.shutdown()


@pytest.mark.parametrize(
    ("workers", "asynchronous"),
    [(1, False), (2, False), pytest.param(1, True, marks=pytest.mark.full)],
    ids=["1", "2", "async"],
)
def test_nothing_outlives_a_driver_that_is_killed(workers, asynchronous, tiny, tmp_path):
    script = f"""
        import sys, time
        from rl_vllm import VllmGeneration
        if __name__ == "__main__":
            engine = VllmGeneration(None, {{"model_name": {str(tiny("qwen2"))!r}, "vllm_cfg": {{
                "tensor_parallel_size": {workers}, "async_engine": {asynchronous},
                "kv_cache_memory_bytes": 64 << 20}}}})
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
                assert len(session) >= workers + asynchronous
                assert bool(sockets_in(temporary)) == (workers + asynchronous > 1)
                shared = shared_by(session)
                assert shared or workers == 1
            finally:
                driver.kill()

        def left() -> list[Any]:
            alive = [pid for pid in session if running(pid)]
            found = [*sockets_in(temporary), *directories_in(temporary)]
            return [*alive, *found, *[path for path in shared if path.exists()]]

        end = time.monotonic() + 20
        while left():
            assert time.monotonic() < end, f"left of {session}: {left()}"
            time.sleep(0.1)


@pytest.mark.parametrize(
    "cfg",
    [pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.full), {"async_engine": True}],
    ids=str,
)
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
        end = time.monotonic() + 20
        while directories_in(temporary):
            assert time.monotonic() < end, "nobody removed it"
            time.sleep(0.1)


def test_the_shared_memory_of_a_killed_engine_is_removed(start):
    engine = start("qwen2", {"tensor_parallel_size": 2})
    shared = shared_by(processes_of(engine.pid))
    assert shared
    for pid in processes_of(engine.pid):
        os.kill(pid, signal.SIGKILL)
    engine.shutdown()
    assert not [path for path in shared if path.exists()]
