"""The page about TRL: what it shows works."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"


@pytest.mark.full
@pytest.mark.slow
def test_the_quick_start_runs_and_prints_what_the_page_says(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"(?ms)^```python\n(.*?)^```$", page)[0:1])
    (tmp_path / "with_trl.py").write_text(program)
    done = subprocess.run(
        [sys.executable, "with_trl.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.search(r"reward 0\.(\d+) to 0\.(\d+), (\d+) refits", done.stdout)
    assert said is not None, done.stdout
    assert float(f"0.{said[1]}") + 0.1 < float(f"0.{said[2]}")
    assert said[3] == "20"
