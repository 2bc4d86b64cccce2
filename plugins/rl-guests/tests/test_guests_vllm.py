"""Updates of a real vLLM through its own weight-transfer API, and what faults leave."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_core.errors import ConfigError
from rl_vllm.environment import engine_environment

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"
    ),
    pytest.mark.xdist_group("vllm_updates"),  # all look at one run of the scenarios
]
#: Of log-probs in float32.
CLOSE = 5e-5


@pytest.fixture(scope="module")
def found(tiny) -> dict[str, Any]:
    """What the scenarios of ``vllm_updates`` came to."""
    command = [sys.executable, "-m", "vllm_updates", str(tiny("qwen2")), str(tiny("llama"))]
    environment = engine_environment("cpu", workers=2)  # in one process, and quiet
    environment |= {"PYTHONPATH": str(Path(__file__).parent), "VLLM_PLUGINS": "rl_core"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_updates_bring_the_engine_to_the_trainer(found):
    it = found["updates"]
    assert max(it["differences"]) < CLOSE
    assert it["changed"]
    assert it["called"] == ["init", "start", "update", "finish"]
    assert "26 tensors" in it["report"]
    assert not it["paused"]


def test_a_stream_of_tensors_may_be_sent(found):
    assert found["a_stream"]["difference"] < CLOSE


@pytest.mark.parametrize(
    ("scenario", "error"),
    [
        ("flipped_bytes", "RefitCorrupted"),
        ("a_step_meanwhile", "LifecycleError"),
        ("a_killed_trainer", "RefitPeerError"),
    ],
)
def test_an_engine_with_torn_weights_stays_paused_and_says_why(scenario, error, found):
    it = found[scenario]
    assert it["error"].startswith(error)
    assert it["paused"]
    for refused in (it["request"], it["resume"]):
        assert refused.startswith("WeightsTornError: vLLM ")
        assert "the last update failed" in refused
    assert not it["paused_after"]
    assert it["difference"] < CLOSE


def test_a_trainer_of_another_model_is_refused_and_the_engine_goes_on(found):
    it = found["another_model"]
    assert it["error"].startswith("ManifestMismatchError")
    assert it["same"]
    assert not it["paused"]


def test_a_trainer_that_does_not_send_is_noticed_at_the_deadline(found):
    it = found["no_trainer"]
    assert it["error"].startswith("RefitPeerError")
    assert it["difference"] < CLOSE


def test_calls_out_of_order_are_refused(found):
    it = found["calls_out_of_order"]
    assert "finish_weight_update called without" in it["finish"]
    assert "must be called before update_weights" in it["update"]
    assert "no update that was committed" in it["no_update"]
    assert it["difference"] < CLOSE
    assert not it["paused"]


@pytest.mark.parametrize("scenario", ["two_trainers", "a_trainer_that_stops", "tried_again"])
def test_what_failed_before_does_not_disturb(scenario, found):
    it = found[scenario]
    assert it["error"] == ""
    assert not it.get("paused")
    assert it["difference"] < CLOSE


def test_nothing_cached_is_used_after_an_update_that_nobody_finished(found):
    it = found["left_before_finish"]
    assert "ended" in it["error"]
    assert it["paused"]
    assert it["difference"] < CLOSE


def test_a_pause_of_the_user_lasts(found):
    it = found["a_pause_of_the_user_lasts"]
    assert it["paused"]
    assert it["difference"] < CLOSE


def test_a_client_that_does_not_count_workers_is_refused():
    from rl_guests.vllm.trainer import count_workers

    with pytest.raises(ConfigError) as caught:
        count_workers(SimpleNamespace())
    assert caught.value.details["key"] == "receivers"
    assert "receivers=" in caught.value.fix
