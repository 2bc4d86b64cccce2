"""Builds for CUDA beside a torch for CPUs are left out, in an engine's process and its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SHOW = """
import importlib.util, subprocess, sys
import rl_vllm.cpu_torch
find = "import importlib.util as u; print(u.find_spec('torchvision'), u.find_spec('torchaudio'))"
exec(find)
sys.stdout.flush()
subprocess.run([sys.executable, "-c", find], check=True)
"""


@pytest.mark.skipif(torch.version.cuda is not None, reason="builds for CUDA load beside this torch")
def test_companions_that_do_not_load_look_like_ones_that_are_not_installed(tmp_path: Path) -> None:
    for name in ("torchvision", "torchaudio"):
        (tmp_path / name).mkdir()
        raised = f"raise RuntimeError('operator {name}::nms does not exist')\n"
        (tmp_path / name / "__init__.py").write_text(raised)
    path = os.pathsep.join([str(tmp_path), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SHOW],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["None None"] * 2
