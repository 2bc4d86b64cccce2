"""Real engines: what they generate, what refits bring them to, and that they end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time

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
from safetensors.torch import load_file, save_file

from rl_backends import Row, SamplingParams
from rl_conformance.weights import engine_weights, policy_weights
from rl_core.batch import BatchedDataDict
from rl_core.errors import (
    ConfigError,
    DataError,
    ManifestMismatchError,
    RefitError,
    WorkerDiedError,
)
from rl_core.weights import refit
from rl_sglang import SglangGeneration

pytestmark = [pytest.mark.engine, pytest.mark.slow]


CASES = {
    "tied, fused bias": ("qwen2", {}),
    "untied": ("llama", {}),
    "two schedulers": ("qwen3", {"tp_size": 2}),
    "dummy weights": ("qwen2", {"load_format": "dummy"}),
    "experts": ("qwen3", {"tp_size": 2}),
}
SIZES = {
    "experts": {
        "model_type": "qwen3_moe",
        "tie_word_embeddings": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    }
}


@pytest.mark.parametrize("case", list(CASES))
def test_refits_bring_the_engine_to_the_policy(case, start, tiny):
    family, cfg = CASES[case]
    path = tiny(family, **SIZES.get(case, {}))
    engine = start(family, cfg, torch_dtype="float32", model_name=str(path))
    policy = hf_policy(path)
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
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 0.3
    policy.shutdown()


def test_every_way_of_the_bytes_reaches_every_scheduler(start, tiny):
    engine = start("qwen2", {"tp_size": 2}, torch_dtype="float32")
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
    shake(policy, 3)
    refit(policy, engine, isolation="staged", deadline_s=60.0)
    assert difference(policy, engine.generate(prompts())) < 1e-4
    policy.shutdown()


@pytest.fixture
def same_environment():
    """Takes back what a test exports, as Ray does: engines of another environment share nothing."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_replicas_on_a_cluster_share_the_rows_and_a_refit(tiny, same_environment):
    from rl_hosting import LocalCluster

    config = {"model_name": str(tiny("qwen2")), "torch_dtype": "float32", "max_new_tokens": 6}
    policy = hf_policy(tiny("qwen2"))
    shake(policy)
    with LocalCluster(2) as cluster:
        given = {**config, "sglang_cfg": {"max_total_tokens": 4096}, "num_samples": 2}
        engine = SglangGeneration(cluster, given)
        engine.prepare_for_generation()
        refit(policy, engine, deadline_s=60.0)
        output = engine.generate(prompts(5))
        assert output.size == 10
        assert difference(policy, output) < 1e-4
        engine.shutdown()
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


@pytest.mark.parametrize(
    ("key", "cfg"),
    [
        ("sglang_cfg.engine_args.page_sise", {"engine_args": {"page_sise": 4}}),
        ("max_model_len", {"max_model_len": 100_000}),
        ("sglang_cfg.max_total_tokens", {"max_total_tokens": 100}),
        ("sglang_cfg", {"engine_args": {"schedule_policy": "no-such"}}),
    ],
)
def test_what_sglang_does_not_take_is_refused_with_the_key(key, cfg, start):
    with pytest.raises(ConfigError) as caught:
        start("qwen2", cfg)
    assert caught.value.details["key"] == key
    assert caught.value.fix


@pytest.mark.parametrize(
    ("key", "changes", "says"),
    [
        ("model_name", {"intermediate_size": 1024}, "has other shapes"),
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


def test_a_row_that_sglang_refuses_fails_alone(start):
    engine = start("qwen2", torch_dtype="float32")
    whole = engine.generate(prompts(), greedy=True)
    how = SamplingParams(greedy=True)
    sound = Row(1 << 40, 0, 0, [5, 6, 7], 9, 0, False, (), how)
    beyond = Row((1 << 40) + 1, 0, 1, [5] * 5000, 9, 0, False, (), how)  # no context is that long
    engine._process.submit([sound, beyond])
    done, failed = [], {}
    while not (done and failed):
        if (progress := engine._process.progress(20.0)) is not None:
            done += progress.rows
            failed |= progress.failed
    assert [(one.row, len(one.token_ids)) for one in done] == [(sound.key, 9)]
    assert "context length" in str(failed[beyond.key])
    assert torch.equal(engine.generate(prompts(), greedy=True)["output_ids"], whole["output_ids"])


def test_stop_strings_of_a_row_want_a_tokenizer(imported, tiny, tmp_path):
    path = tmp_path / "bare"
    shutil.copytree(tiny("qwen2"), path, ignore=shutil.ignore_patterns("*token*"))
    config = {"model_name": str(path), "pad_token_id": 0, "max_new_tokens": 3}
    engine = SglangGeneration(None, {**config, "sglang_cfg": {"max_total_tokens": 4096}})
    engine.prepare_for_generation()
    assert engine.generate(prompts()).size == 4
    with pytest.raises(DataError, match="row 1"):
        engine.generate(BatchedDataDict({**prompts(), "stop_strings": [[], ["x"], [], []]}))
    engine.shutdown()


def test_a_refit_that_waits_for_a_long_generation_leaves_the_engine_whole(start, tiny):
    engine, policy = start("qwen2", torch_dtype="float32"), hf_policy(tiny("qwen2"))
    refit(policy, engine, deadline_s=60.0)
    with engine._lock, pytest.raises(RefitError):  # something holds generation up
        refit(policy, engine, deadline_s=1.0)
    assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4
    refit(policy, engine, deadline_s=60.0)
    policy.shutdown()


def schedulers_of(engine: SglangGeneration) -> list[psutil.Process]:
    return psutil.Process(engine.pid).children()


def test_a_scheduler_that_fails_ends_the_engine_and_not_the_user(start):
    """SGLang kills its whole tree; the error has its last words, and another can start."""
    engine = start("qwen2")
    shared = shared_by(processes_of(engine.pid))
    [scheduler] = schedulers_of(engine)
    scheduler.kill()
    with pytest.raises(WorkerDiedError) as caught:
        engine.generate(prompts())
    assert caught.value.details["log"]
    assert not [path for path in shared if path.exists()]
    another = start("qwen2")
    assert another.generate(prompts(), greedy=True).size == 4


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "decoding"])
def test_an_engine_that_dies_is_told_with_its_last_words(idle, start):
    engine = start("qwen2")
    if idle:
        engine.generate(prompts())
    session = processes_of(engine.pid)
    os.kill(engine.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=r"exit status -9"):
        engine.generate(prompts())
    end = time.monotonic() + 20
    while left := [pid for pid in session if running(pid)]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


def test_engines_on_the_cpu_are_forked_from_one_process(start, imported):
    first, second = start("qwen2"), start("llama")
    assert psutil.Process(first.pid).ppid() == psutil.Process(second.pid).ppid() == imported
    assert first.generate(prompts(), greedy=True).size == 4
    first.shutdown()
    assert second.generate(prompts(), greedy=True).size == 4


def test_nothing_outlives_a_driver_that_is_killed(tiny, tmp_path):
    script = f"""
        import time
        from rl_sglang import SglangGeneration
        if __name__ == "__main__":
            engine = SglangGeneration(None, {{"model_name": {str(tiny("qwen2"))!r}, "sglang_cfg": {{
                "tp_size": 2, "max_total_tokens": 4096}}}})
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
                assert len(session) >= 3
                assert sockets_in(temporary)
                assert {path.parent.stat().st_mode & 0o777 for path in sockets_in(temporary)} == {
                    0o700
                }
                shared = shared_by(session)
            finally:
                driver.kill()

        def left() -> list[object]:
            alive = [pid for pid in session if running(pid)]
            found = [*sockets_in(temporary), *directories_in(temporary)]
            return [*alive, *found, *[path for path in shared if path.exists()]]

        end = time.monotonic() + 20
        while left():
            assert time.monotonic() < end, f"left of {session}: {left()}"
            time.sleep(0.1)
