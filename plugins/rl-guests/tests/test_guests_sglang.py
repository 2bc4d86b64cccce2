"""Refits of a stock SGLang server by its own HTTP route, and what faults leave."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None, reason="SGLang is not installed here"
    ),
    pytest.mark.xdist_group("sglang_refits"),  # all look at one run of the scenarios
]
#: Of log-probs in float32.
CLOSE = 5e-5


@pytest.fixture(scope="module", params=[1, 2], ids=["one_rank", "two_ranks"])
def found(
    request: pytest.FixtureRequest, tiny: Callable[..., Path], tmp_path_factory: Any
) -> dict[str, Any]:
    """What the scenarios of ``sglang_refits`` came to."""
    command = [sys.executable, "-m", "sglang_refits", str(tiny("qwen2"))]
    command += [str(tmp_path_factory.mktemp("server")), str(request.param)]
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = dict(os.environ) | {"PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr[-4000:]
    return {**json.loads(done.stdout.splitlines()[-1]), "ranks": request.param}


def test_sglang_finds_the_plugin() -> None:
    assert "rl_core" in {one.name for one in entry_points(group="sglang.srt.plugins")}


def test_a_refit_brings_the_server_to_the_trainer(found):
    it = found["refit"]
    assert it["changed"]
    assert it["difference"] < CLOSE
    assert "26 tensors" in it["report"]
    assert f"{found['ranks']} receiver" in it["report"]
    assert max(found["more_refits"]) < CLOSE


def test_a_running_request_goes_on_with_the_new_weights(found):
    it = found["a_running_request"]
    assert (it["tokens"], it["end"]) == (200, "length")
    assert 0 < it["under_new_weights"] < 200


def test_a_pause_of_the_user_lasts(found):
    it = found["a_pause_of_the_user"]
    assert it["paused"]
    assert it["difference"] < CLOSE


def test_weights_whose_memory_is_released_are_not_written(found):
    it = found["released_memory"]
    assert "has released the memory of its weights" in it["error"]
    assert it["difference"] < CLOSE


def test_what_is_no_refit_is_answered_as_by_sglang(found):
    assert found["other_bodies"] == [[True], [False], [False], [False]]


def test_a_client_names_no_code_to_run(found):
    assert "takes refits from its clients, and no other calls" in found["code_of_a_client"]


def test_a_server_with_torn_weights_refuses_requests_until_a_refit(found):
    it = found["a_killed_trainer"]
    assert it["exit"] == -9
    for one in (it["refused"], *it["running"]):
        assert one["status"] == 503
        assert "the last refit failed, and left a part of the weights new" in one["text"]
    assert it["running"]
    assert it["other_bodies"] == [True]
    assert it["difference"] < CLOSE
