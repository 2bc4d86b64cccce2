"""All that needs a GPU, part by part: tests, conformance, the benchmark of refits.

::

    python tests/gpu_run.py --backend hf [--rehearse] [--again] [PART ...]

``nox -s gpu`` makes an environment for each backend and calls this in it. Reports, logs and
``summary.md`` are kept under ``out/gpu``, in one folder for each state of the sources. A part that
succeeded there is not run again, so that a run that was interrupted goes on where it was.
``--rehearse`` runs the same programs with tiny inputs on the CPU.
"""

from __future__ import annotations

import argparse
import datetime as dt
import hashlib
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

from nox_parts import Parts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Part", "Result", "folder_of", "main", "plan", "run_parts", "summary"]

ROOT = Path(__file__).parent.parent
#: Seconds between the signal that asks a program to end, and the one that ends it.
GRACE_S = 10.0
#: What reading a report raises that is not there or not whole.
_UNREADABLE = (OSError, ValueError, KeyError, ET.ParseError)


@dataclass(frozen=True)
class Part:
    """One program, and what it writes.

    Attributes:
        name: What users call it by.
        backend: In whose environment it runs.
        what: What it does.
        command: After the name of the Python program.
        limit_s: Seconds after which it is stopped.
        report: The file that its figures are in.
        gpu_gb: Memory that the GPU must have, in 10^9 bytes.
    """

    name: str
    backend: str
    what: str
    command: Sequence[str]
    limit_s: float
    report: str = ""
    gpu_gb: int = 0


@dataclass(frozen=True)
class Result:
    """What came of a part.

    Attributes:
        status: ``"ok"``, ``"failed"`` or ``"not_run"``.
        said: Its figures in a line, or why it failed or did not run.
        seconds: How long it took.
        began: When, in UTC.
    """

    status: str
    said: str
    seconds: float = 0.0
    began: str = ""


def plan(folder: Path, *, rehearse: bool = False) -> list[Part]:
    """All parts, in the order in which they run.

    Args:
        folder: Where they write.
        rehearse: On the CPU, with tiny inputs, and with the tests of an emulated GPU.
    """
    rl, device = ("-m", "rl_core.cli"), "cpu" if rehearse else "cuda"

    def conformance(backend: str, limit_s: float) -> Part:
        stem = folder / f"conformance-{backend}"
        kinds = {"json": "json", "junit": "xml", "markdown": "md", "html": "html"}
        writes = [part for kind, end in kinds.items() for part in (f"--{kind}", f"{stem}.{end}")]
        some = ["-k", "R1 or R12"] if rehearse else []
        command = (*rl, "conformance", "run", backend, "--device", device, *writes, *some)
        what = f"the suite against {backend}"
        return Part(f"conformance-{backend}", backend, what, command, limit_s, f"{stem.name}.json")

    def bench(gigabytes: int, tensors: int, repeats: int, gpu_gb: int) -> Part:
        size = (gigabytes / 100, 10, 1) if rehearse else (gigabytes, tensors, repeats)
        options = zip(("--gb", "--tensors", "--repeats"), map(str, size), strict=True)
        command = [*rl, "refit", "bench", "--json", "--device", device]
        command += [part for option in options for part in option]
        name, what = f"bench-{gigabytes}gb", f"refits of {size[0]:g} GB next to plain copies"
        return Part(name, "hf", what, command, 1200, f"{name}.json", 0 if rehearse else gpu_gb)

    which = ("not gpu", "core/tests/refit/transports/test_cuda.py") if rehearse else ("gpu",)
    tests = ("-m", "pytest", "-q", "--junit-xml", str(folder / "tests.xml"), "-m", *which)
    return [
        Part("doctor", "hf", "what is installed", (*rl, "backends", "doctor", "hf"), 120),
        Part("tests", "hf", f"tests that are marked {which[0]}", tests, 900, "tests.xml"),
        conformance("hf", 3600),
        # A model at both ends, the memory of a bound, and buckets.
        bench(1, 200, 5, 6),
        bench(16, 340, 3, 80),
        conformance("megatron", 3600),
        conformance("vllm", 5400),
        conformance("sglang", 5400),
    ]


def folder_of(out: Path, *, rehearse: bool = False) -> Path:
    """Where a run writes: the folder of this state of the sources, or a new one of today."""
    git = ("git", "-C", str(ROOT))
    commit = subprocess.run(
        [*git, "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True
    )
    changes = subprocess.run([*git, "diff", "HEAD"], capture_output=True)
    tree = commit.stdout.strip() or "unversioned"
    if changes.stdout:
        tree += "-" + hashlib.sha256(changes.stdout).hexdigest()[:8]
    tree += "-rehearsal" * rehearse
    today = dt.datetime.now(dt.UTC).date().isoformat()
    found = sorted(out.glob(f"????-??-??-{tree}")) if tree != "unversioned" else []
    return found[-1] if found else out / f"{today}-{tree}"


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
        if before is not None and before.status == "ok" and not again:
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
        return f"{found['verdict']}: {counts}" + ", a part only" * bool(found["selection"])
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
    import torch

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
        0 if all of them succeeded, 1 if one failed, 3 if one could not run.
    """
    names = [part.name for part in plan(Path())]
    parser = argparse.ArgumentParser(description="All that needs a GPU, part by part.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--backend", required=True, help="whose parts, as the environment is its")
    parser.add_argument("--rehearse", action="store_true", help="tiny inputs on the CPU")
    parser.add_argument("--again", action="store_true", help="also what succeeded before")
    parser.add_argument("--not-run", metavar="WHY", help="write that its parts could not run")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="where to write")
    options = parser.parse_args(argv)
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    folder = folder_of(options.out, rehearse=options.rehearse)
    everything = plan(folder, rehearse=options.rehearse)
    asked = [
        part
        for part in everything
        if part.backend == options.backend and part.name in (options.parts or names)
    ]
    machine, obstacle, memory = _machine(options.rehearse)
    obstacle = options.not_run or obstacle
    obstacles = {part.name: obstacle for part in asked if obstacle}
    for part in asked:
        if not obstacle and memory < part.gpu_gb * 1e9:
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
    return 1 if "failed" in statuses else 3 if "not_run" in statuses else 0


if __name__ == "__main__":
    sys.exit(main())
