"""What ``bench_refit.py`` measures besides the peers: each step in a process of its own.

A step starts engines, takes bounds and refits in turns, compares all bytes at the end, and returns
plain values. :func:`apart` runs one where nothing of the steps before is left.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from refit_bench.bench import Bench, Row
from refit_report import add_ratios, seconds_of

from rl_core.weights import DEFAULT_BUCKET_BYTES
from rl_core.weights.data.plan import SLOTS

__all__ = ["apart", "delta", "growth", "lack_of_memory", "memory", "pace"]

T = TypeVar("T")

#: Times that bounds and refits are taken in turns; the fastest counts.
PASSES = 2
#: Trainer, engine, and either the memory of a bound or what the heap has not given back.
COPIES_HELD = 4
SPARE_BYTES = 2 << 30
#: After which sockets that were closed are gone, and threads that ended.
SETTLED_S = 1.0


def apart(step: Callable[..., T], *args: Any) -> T:
    """Runs a step in a new process.

    Raises:
        BrokenProcessPool: The process died.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context) as pool:
        return pool.submit(step, *args).result()


def lack_of_memory(nbytes: int, receivers: int = 1) -> str | None:
    """Why a model is too large for this machine as it is now; None if it is not."""
    needed = (COPIES_HELD - 1 + receivers) * nbytes + SPARE_BYTES
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    if needed <= free:
        return None
    return f"needs {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"


def pace(nbytes: int, count: int, receivers: int, repeats: int) -> dict[str, Any]:
    """Direct and packed refits next to their bounds: a document, as README.md describes it."""
    with Bench(nbytes, count, receivers, repeats) as bench:
        passes = [list(_turn(bench)) for _ in range(PASSES)]
        bench.check()
    rows = [min(runs, key=seconds_of) for runs in zip(*passes, strict=True)]
    add_ratios(rows, [row for row in rows if row["kind"] == "bound"])
    size = {"bytes": bench.nbytes, "tensors": count, "receivers": receivers}
    return {**size, "dtype": "bfloat16", "repeats": PASSES * repeats, "rows": rows}


def _turn(bench: Bench) -> Iterator[dict[str, Any]]:
    for copies, bound, mode in ((1, bench.one_copy, "direct"), (2, bench.two_copies, "packed")):
        yield _row(bound(), "bound", copies)
        for verify in ("none", "wire"):
            yield _row(bench.refit(mode=mode, verify=verify), "ours", copies) | {
                "what": f"{mode}, verify={verify}",
                "report": bench.reports[-1].as_dict(),
            }


def _row(row: Row, kind: str, copies: int) -> dict[str, Any]:
    figures = {"seconds": row.seconds, "median_seconds": row.median_seconds}
    return {"what": row.what, "kind": kind, "copies": copies, "gb_per_s": row.gb_per_s, **figures}


def delta(nbytes: int, count: int, fractions: Sequence[float], repeats: int) -> dict[str, Any]:
    """What a refit takes that sends only what changed, next to one that sends everything."""
    modes: dict[str, Any] = {}
    with Bench(nbytes, count, repeats=repeats) as bench:
        for mode in ("direct", "packed"):
            before = bench.refit(mode=mode, verify="wire").seconds
            times = {
                part: bench.refit(mode=mode, delta=True, changed=part).seconds for part in fractions
            }
            full = min(before, bench.refit(mode=mode, verify="wire").seconds)
            modes[mode] = {
                "full_seconds": full,
                "seconds": [[part, seconds] for part, seconds in times.items()],
                "break_even": break_even(times, full),
            }
            bench.check()
    return {"bytes": bench.nbytes, "tensors": count, "repeats": repeats, "modes": modes}


def break_even(times: Mapping[float, float], full: float) -> float:
    """The fraction of tensors changed from which a delta is slower; 1 if it never is."""
    for (left, before), (right, after) in pairwise(sorted(times.items())):
        if before <= full < after:
            return left + (right - left) * (full - before) / (after - before)
    return 0.0 if times[min(times)] > full else 1.0


def growth(mode: str, nbytes: int, count: int, tens: int) -> dict[str, Any]:
    """What trainer and engine hold after ten refits, and after so many tens more."""
    with Bench(nbytes, count, repeats=9) as bench:
        seen = []
        for _ in range(1 + tens):
            bench.refit(mode=mode)
            time.sleep(SETTLED_S)
            seen.append([_held(pid) for pid in bench.pids])
        bench.check()
    sides = zip(("trainer", "engine"), seen[0], seen[-1], strict=True)
    return {
        "mode": mode,
        "bytes": bench.nbytes,
        "refits": 10 * tens,
        "grown": {
            side: {key: after[key] - before[key] for key in before} for side, before, after in sides
        },
        "rss_bytes": [[one["rss_bytes"] for one in both] for both in seen],
    }


def memory(mode: str, nbytes: int, count: int) -> dict[str, Any]:
    """What refits hold besides the model: as reported, and as the peak of resident memory."""
    with Bench(nbytes, count, repeats=1) as bench:
        first = _peaks(bench, mode)
        later = _peaks(bench, mode)
        bench.check()
    return {
        "mode": mode,
        "bytes": bench.nbytes,
        "allowed_bytes": 0 if mode == "direct" else SLOTS * DEFAULT_BUCKET_BYTES,
        "extra_memory_bytes": bench.reports[-1].extra_memory_bytes,
        "peak_rss_growth_first": first,
        "peak_rss_growth": later,
    }


def _peaks(bench: Bench, mode: str) -> dict[str, int]:
    """By how much the peaks of trainer and engine exceed what they had before."""
    before = []
    for pid in bench.pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        before.append(_status(pid)["VmRSS"])
    bench.refit(mode=mode)
    after = [_status(pid)["VmHWM"] for pid in bench.pids]
    sides = zip(("trainer", "engine"), before, after, strict=True)
    return {side: (peak - rss) << 10 for side, rss, peak in sides}


def _held(pid: int) -> dict[str, int]:
    status = _status(pid)
    return {
        "rss_bytes": status["VmRSS"] << 10,
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": status["Threads"],
        "shm_entries": len(os.listdir("/dev/shm")),
    }


def _status(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {
        key: int(value.split()[0]) for key, value in pairs if key in ("VmRSS", "VmHWM", "Threads")
    }
