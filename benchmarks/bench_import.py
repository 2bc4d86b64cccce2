"""What it costs to start: ``import rl_core`` and ``rl backends list`` over a bare interpreter.

Every sample is a fresh process; cases take turns, so that a busy machine slows all of them. The
target is a median of less than 150 ms over the bare interpreter; the best is shown beside it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

TARGET_MS = 150.0
CASES = {
    "python -c pass": ["-c", "pass"],
    "import rl_core": ["-c", "import rl_core"],
    "from rl_core import create_generation": ["-c", "from rl_core import create_generation"],
    "rl backends list --json": ["-m", "rl_cli", "backends", "list", "--json"],
    "rl backends list": ["-m", "rl_cli", "backends", "list"],
    "import torch (for comparison)": ["-c", "import torch"],
}
BARE, *_ = CASES


def milliseconds(arguments: list[str]) -> float:
    """Wall time of one fresh process."""
    start = time.perf_counter()
    command = [sys.executable, *arguments]
    result = subprocess.run(command, stdout=subprocess.DEVNULL, timeout=120, check=False)
    if result.returncode not in (0, 1):  # 1: a plugin of this environment is broken
        raise SystemExit(f"{arguments} exited with {result.returncode}")
    return (time.perf_counter() - start) * 1e3


def measure(repeats: int) -> list[dict[str, float | str | bool]]:
    """Medians of all cases, with what they cost over the bare interpreter."""
    for arguments in CASES.values():
        milliseconds(arguments)  # bytecode and page cache are warm, as on every run but the first
    rounds = [{name: milliseconds(CASES[name]) for name in CASES} for _ in range(repeats)]
    samples = {name: [times[name] for times in rounds] for name in CASES}
    bare = statistics.median(samples[BARE])
    return [
        {
            "case": name,
            "median_ms": statistics.median(times),
            "over_bare_ms": statistics.median(times) - bare,
            "best_over_bare_ms": min(times) - min(samples[BARE]),
            "within_target": statistics.median(times) - bare < TARGET_MS,
        }
        for name, times in samples.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, help="processes per case")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args()
    rows = measure(options.repeats)
    if options.json:
        figures = {"target_ms": TARGET_MS, "cases": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(f"{'case':38}{'median':>11}{'over bare':>11}{'best':>11}  target < {TARGET_MS:.0f} ms")
    for row in rows:
        times = (row["median_ms"], row["over_bare_ms"], row["best_over_bare_ms"])
        verdict = "met" if row["within_target"] else "missed"
        print(f"{row['case']:38}{''.join(f'{time:8.1f} ms' for time in times)}  {verdict}")


if __name__ == "__main__":
    main()
