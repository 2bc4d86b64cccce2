"""All that needs a GPU, part by part: tests, conformance, the benchmark of refits.

::

    python tests/gpu_run.py --backend hf [--rehearse] [--again] [PART ...]

``nox -s gpu`` and ``nox -s conformance-gpu`` make an environment for each backend and call this in
it; where nothing can be installed, in the one that nox runs in, with the sources as they are here.
Reports, logs and ``summary.md`` are kept under ``out/gpu``, in one folder for each state of the
sources. No part takes more than ten minutes, and one that came to its end there is not run again,
so that a run that was interrupted goes on where it was. Of a part that lacks something it is said
what. ``--rehearse`` runs the same programs with tiny inputs on the CPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import signal
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu_environment import ROOT, folder_of, install_sources, missing
from gpu_plan import Part, plan
from nox_parts import Parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Result", "main", "run_parts", "summary"]

#: Seconds between the signal that asks a program to end, and the one that ends it.
GRACE_S = 10.0
#: How ``rl conformance run`` ends if nothing failed, and not all could run.
_INCOMPLETE = 3
#: What reading a report raises that is not there or not whole.
_UNREADABLE = (OSError, ValueError, KeyError, ET.ParseError)


@dataclass(frozen=True)
class Result:
    """What came of a part.

    Attributes:
        status: ``"ok"``, ``"incomplete"`` (some checks could not run, the others passed),
            ``"failed"`` or ``"not_run"``.
        said: Its figures in a line, or why it failed or did not run.
        seconds: How long it took.
        began: When, in UTC.
    """

    status: str
    said: str
    seconds: float = 0.0
    began: str = ""


def run_parts(
    parts: Sequence[Part],
    folder: Path,
    obstacles: Mapping[str, str],
    *,
    again: bool = False,
    progress: Parts | None = None,
) -> dict[str, Result]:
    """Runs parts, and after each of them writes what is known of all.

    Args:
        parts: What is asked for.
        folder: Where results are kept.
        obstacles: Why parts cannot run, by name.
        again: Also those that succeeded before.
        progress: Says what goes on.

    Returns:
        What came of each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    progress = progress or Parts({})
    kept = folder / "parts.json"
    results = _kept(kept)
    for part in parts:
        before = results.get(part.name)
        if before is not None and before.status in ("ok", "incomplete") and not again:
            print(f"{part.name}: done before, {before.said}", file=sys.stderr, flush=True)
        elif part.name in obstacles:
            results[part.name] = Result("not_run", obstacles[part.name])
            print(f"{part.name}: not_run: {obstacles[part.name]}", file=sys.stderr, flush=True)
        else:
            results[part.name] = _run(part, folder, progress)
        # Renamed over the old one: a run that is killed leaves what was known before.
        new = kept.with_suffix(".new")
        known = {name: asdict(result) for name, result in results.items()}
        new.write_text(json.dumps(known, indent=1), encoding="utf-8")
        new.replace(kept)
    return {part.name: results[part.name] for part in parts}


def _kept(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    known = json.loads(path.read_text(encoding="utf-8"))
    return {name: Result(**result) for name, result in known.items()}


def _run(part: Part, folder: Path, progress: Parts) -> Result:
    began, clock = dt.datetime.now(dt.UTC).isoformat(timespec="seconds"), time.monotonic()
    report = folder / part.report if part.report else None
    if report is not None:
        report.unlink(missing_ok=True)
    log = folder / f"{part.name}.log"
    try:
        with progress.part(
            "gpu", part.name, report if report and report.suffix == ".xml" else None
        ):
            _call(part, log, report)
            said = "" if report is None else _figures(report)
        status = "ok"
    except (subprocess.SubprocessError, *_UNREADABLE) as error:
        status, said = "failed", f"{_why(error)}; see {log.name}"
        if getattr(error, "returncode", 0) == _INCOMPLETE and "conformance" in part.command:
            status = "incomplete"
        if report is not None and isinstance(error, subprocess.SubprocessError):
            with suppress(*_UNREADABLE):
                said += f"; {_figures(report)}"
    return Result(status, said, round(time.monotonic() - clock, 1), began)


def _call(part: Part, log: Path, report: Path | None) -> None:
    """Runs a program; shows and keeps what it says.

    Raises:
        CalledProcessError: It failed.
        TimeoutExpired: It took too long and was stopped, with all processes that it started.
    """
    command = [sys.executable, *part.command]
    # The benchmark prints its result; other programs are told where to write theirs.
    prints = report is not None and str(report) not in " ".join(command)
    with open(report if prints else os.devnull, "w") as to:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "150"},
            stdin=subprocess.DEVNULL,
            stdout=to if prints else subprocess.PIPE,
            stderr=subprocess.PIPE if prints else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        lines = process.stderr if prints else process.stdout
        assert lines is not None

        def show() -> None:
            with lines, log.open("w", encoding="utf-8") as kept:
                kept.write(f"$ {' '.join(command)}\n")
                for line in lines:
                    kept.write(line)
                    kept.flush()
                    print(line, end="", file=sys.stderr, flush=True)

        showing = threading.Thread(target=show, daemon=True)
        showing.start()
        try:
            code = process.wait(part.limit_s)
        finally:
            _end(process)
            showing.join(GRACE_S)
    if code:
        raise subprocess.CalledProcessError(code, command)


def _end(process: subprocess.Popen[str]) -> None:
    """Ends what is left of a program: all processes of its session."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _figures(report: Path) -> str:
    """The figures of a report in a line.

    Raises:
        ValueError: It has no JSON, or no test of it passed.
        KeyError: It lacks something.
        OSError: It was not written.
    """
    if report.suffix == ".xml":
        return _tests(report)
    found = json.loads(report.read_text(encoding="utf-8"))
    if "rows" not in found:
        counts = ", ".join(f"{n} {status}" for status, n in found["counts"].items() if n)
        lacking = f", without a result: {', '.join(found['missing'])}" * bool(found["missing"])
        return (
            f"{found['verdict']}: {counts}" + ", a part only" * bool(found["selection"]) + lacking
        )
    rows = [row for row in found["rows"] if row["of_bound"] is not None]
    best = max(rows, key=lambda row: row["gb_per_s"])
    lowest = min(rows, key=lambda row: row["of_bound"])
    return (
        f"{best['gb_per_s']:.1f} GB/s ({best['what']}); least of its bound: "
        f"{lowest['of_bound']:.2f} ({lowest['what']})"
    )


def _tests(report: Path) -> str:
    suites, keys = (
        list(ET.parse(report).iter("testsuite")),
        ("tests", "failures", "errors", "skipped"),
    )
    ran, failed, errors, skipped = (sum(int(s.get(key, 0)) for s in suites) for key in keys)
    if ran == skipped:
        raise ValueError(f"no test ran, {skipped} were skipped")
    passed = ran - failed - errors - skipped
    return f"{passed} tests passed, {failed + errors} failed, {skipped} skipped"


def _why(error: Exception) -> str:
    if isinstance(error, subprocess.TimeoutExpired):
        return f"stopped after {error.timeout:g} s"
    if isinstance(error, subprocess.CalledProcessError):
        return f"exit status {error.returncode}"
    return f"{type(error).__name__}: {error}"


def summary(parts: Sequence[Part], folder: Path, machine: Mapping[str, Any]) -> str:
    """What ran, what failed and what did not run, as Markdown.

    Args:
        parts: All that there are, also those that were not asked for.
        folder: With the results.
        machine: What it ran on.
    """
    results = _kept(folder / "parts.json")
    lines = [f"# GPU run {folder.name}", "", *(f"- {k}: {v}" for k, v in machine.items()), ""]
    lines += ["| part | status | seconds | began | result |", "|---|---|---|---|---|"]
    for part in parts:
        result = results.get(part.name, Result("not_run", "not asked for yet"))
        said = result.said.replace("|", "\\|").replace("\n", " ")
        cells = (part.name, result.status, f"{result.seconds:g}", result.began, said)
        lines.append(f"| {' | '.join(cells)} |")
    for part in parts:
        if part.name.startswith("bench") and getattr(results.get(part.name), "status", "") == "ok":
            lines += ["", f"## {part.name}: {part.what}", "", "| what | ms | GB/s | of its bound |"]
            lines += ["|---|---|---|---|"]
            for row in json.loads((folder / part.report).read_text(encoding="utf-8"))["rows"]:
                of = f"{row['of_bound']:.2f} of {row['bound']}" if row["of_bound"] else ""
                figures = f"{row['seconds'] * 1e3:.1f} | {row['gb_per_s']:.2f} | {of}"
                lines.append(f"| {row['what']} | {figures} |")
    return "\n".join(lines) + "\n"


def _machine(rehearse: bool) -> tuple[dict[str, Any], str, int]:
    """What this machine is, why it cannot be used, and its GPU's memory in bytes."""
    try:
        import torch
    except ImportError as error:
        return {"python": platform.python_version(), "torch": "none"}, str(error), 0
    facts = {"python": platform.python_version(), "torch": torch.__version__}
    if rehearse:
        return {**facts, "device": "the CPU, a rehearsal: no figure means anything"}, "", 0
    if not torch.cuda.is_available():
        cause = "sees no CUDA device" if torch.version.cuda else "is built without CUDA"
        obstacle = f"torch {torch.__version__} {cause} on this machine"
        return {**facts, "device": "none"}, obstacle, 0
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    names = ", ".join(f"{gpu.name} ({gpu.total_memory / 1e9:.0f} GB)" for gpu in gpus)
    return {**facts, "cuda": torch.version.cuda, "device": names}, "", gpus[0].total_memory


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the parts that are asked for, and writes the summary.

    Returns:
        0 if all of them succeeded, 1 if one failed, 3 if one, or a check of one, could not run.
    """
    names = [part.name for part in plan(Path())]
    parser = argparse.ArgumentParser(description="All that needs a GPU, part by part.")
    parts = f"of {', '.join(names)}; or how some of them begin, such as conformance"
    parser.add_argument("parts", nargs="*", metavar="PART", help=parts)
    parser.add_argument("--backend", required=True, help="whose parts, as the environment is its")
    parser.add_argument("--rehearse", action="store_true", help="tiny inputs on the CPU")
    parser.add_argument("--again", action="store_true", help="also what succeeded before")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="where to write")
    options = parser.parse_args(argv)
    begun = {
        one: [n for n in names if n == one or n.startswith(f"{one}-")] for one in options.parts
    }
    if unknown := {one for one, found in begun.items() if not found}:
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    folder = folder_of(options.out, rehearse=options.rehearse)
    everything = plan(folder, rehearse=options.rehearse)
    asked = [
        part
        for part in everything
        if part.backend == options.backend
        and (not begun or any(part.name in found for found in begun.values()))
    ]
    machine, obstacle, memory = _machine(options.rehearse)
    paths = [*install_sources(folder / "installed"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    obstacles = {}
    for part in asked:
        if lacking := missing(part.backend, part.needs):
            obstacles[part.name] = f"not installed here: {', '.join(lacking)}"
        elif obstacle:
            obstacles[part.name] = obstacle
        elif memory < part.gpu_gb * 1e9:
            has = f"the GPU has {memory / 1e9:.0f} GB"
            obstacles[part.name] = f"needs {part.gpu_gb} GB of its memory, {has}"
    progress = Parts({})
    results = run_parts(asked, folder, obstacles, again=options.again, progress=progress)
    text = summary(everything, folder, machine)
    (folder / "summary.md").write_text(text, encoding="utf-8")
    if progress.done:
        progress.print_table([], {})
    print(f"\n{text}\n{folder / 'summary.md'}")
    statuses = {result.status for result in results.values()}
    return 1 if "failed" in statuses else 3 if statuses & {"not_run", "incomplete"} else 0


if __name__ == "__main__":
    sys.exit(main())
