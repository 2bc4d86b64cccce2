"""Two processes of accelerate, with gloo: one engine serves the rows of both."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = str(Path(__file__).parent / "each_process.py")


def of_each(folder: Path) -> list[dict]:
    """What each process kept of its run."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("[01].json"))]


@pytest.mark.full
def test_two_processes_do_what_one_does(model, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    # accelerate launch starts several processes with this where there are GPUs.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *launch, SCRIPT, str(model), str(two)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    runpy.run_path(SCRIPT)["main"](str(model), str(one))
    (alone,), both = of_each(one), of_each(two)
    assert len(both) == 2
    assert len({one for each in both for one in each["answered"][0]["weights_origin"]}) == 1
    for key in ("prompts", "prompt_ids", "completion_ids", "truncated", "weights_version"):
        step = [row for each in both for row in each["answered"][0][key]]
        assert step == alone["answered"][0][key], key  # of the same weights and seed
    assert [len(each["answered"][0]["prompts"]) for each in both] == [4, 4]
    assert both[0]["weights"] == both[1]["weights"] == pytest.approx(alone["weights"], rel=1e-4)
    logs = [entry for entry in both[0]["log"] if "loss" in entry]
    assert [entry["sampling/sampling_logp_difference/max"] < 1e-4 for entry in logs] == [True] * 2
    rewards = [entry["reward"] for entry in alone["log"] if "loss" in entry]
    assert logs[0]["reward"] == pytest.approx(rewards[0])

    # What one process finds, or suffers, ends the rollout of all.
    apart, ended = zip(*(each["said"] for each in both), strict=True)
    assert [name for name, _, _ in apart] == ["DisagreementError"] * 2
    assert apart[0] == apart[1]
    assert apart[0][2]["row"] in (2, 3)  # of process 1
    assert [name for name, _, _ in ended] == ["LifecycleError", "RemoteError"]
    assert "LifecycleError: HuggingFaceGeneration" in ended[1][1]
