"""What a run on a GPU plans, keeps from one call to the next, and says of what did not run."""

from __future__ import annotations

import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import gpu_environment
import pytest
from gpu_environment import missing
from gpu_plan import TESTS, Part, plan
from gpu_run import main, run_parts
from nox_parts import Parts

#: Counts in a file how often it ran; then does what the file "then" says.
COUNTS = "from pathlib import Path; f = Path({at!r}); f.write_text(f.read_text() + 'x'); {then}"


def counting(folder: Path, name: str, then: str = "pass") -> Part:
    at = folder / f"{name}.count"
    at.touch()
    return Part(name, "hf", "", ("-c", COUNTS.format(at=str(at), then=then)), 60.0)


def ran(folder: Path, name: str) -> int:
    return len((folder / f"{name}.count").read_text())


def quietly() -> Parts:
    return Parts({}, stream=io.StringIO())


def test_a_rehearsal_runs_the_same_programs_without_a_gpu(tmp_path: Path) -> None:
    real, rehearsed = plan(tmp_path), plan(tmp_path, rehearse=True)
    assert [part.name for part in rehearsed] == [part.name for part in real]
    assert [part.command[:3] for part in rehearsed] == [part.command[:3] for part in real]
    assert sum("cuda" in part.command for part in real) == 2 + sum(
        part.name.startswith("conformance") for part in real
    )
    assert not any("cuda" in part.command or part.gpu_gb for part in rehearsed)


def test_a_second_call_runs_what_did_not_succeed(tmp_path: Path) -> None:
    good, bad = counting(tmp_path, "good"), counting(tmp_path, "bad", "raise SystemExit(7)")
    for _ in range(2):
        results = run_parts([good, bad], tmp_path, {}, progress=quietly())
    assert (ran(tmp_path, "good"), ran(tmp_path, "bad")) == (1, 2)
    assert (results["good"].status, results["bad"].status) == ("ok", "failed")
    assert results["bad"].said == "exit status 7; see bad.log"
    run_parts([good], tmp_path, {}, again=True, progress=quietly())
    assert ran(tmp_path, "good") == 2


def test_what_takes_too_long_is_stopped_with_what_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    code = (
        "import subprocess, sys, time; from pathlib import Path\n"
        "sleeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"Path({str(child)!r}).write_text(str(sleeper.pid)); time.sleep(600)"
    )
    part = Part("slow", "hf", "", ("-c", code), 5.0)
    result = run_parts([part], tmp_path, {}, progress=quietly())["slow"]
    assert (result.status, result.said) == ("failed", "stopped after 5 s; see slow.log")
    until = time.monotonic() + 60
    while alive(int(child.read_text())):
        assert time.monotonic() < until
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.mark.parametrize(
    ("cases", "status", "said"),
    [
        ('tests="3" failures="0" errors="0" skipped="1"', "ok", "2 tests passed, 0 failed"),
        ('tests="3" failures="0" errors="0" skipped="3"', "failed", "no test ran, 3 were skipped"),
    ],
)
def test_tests_that_are_all_skipped_prove_nothing(
    tmp_path: Path, cases: str, status: str, said: str
) -> None:
    report = tmp_path / "tests.xml"
    code = f"open({str(report)!r}, 'w').write('<testsuites><testsuite {cases}/></testsuites>')"
    part = Part("tests", "hf", "", ("-c", code), 60.0, "tests.xml")
    result = run_parts([part], tmp_path, {}, progress=quietly())["tests"]
    assert result.status == status
    assert said in result.said


def test_without_a_gpu_every_part_is_not_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["--backend", "hf", "--out", str(tmp_path)]) == 3
    out, err = capsys.readouterr()
    for part in plan(tmp_path):
        if part.backend == "hf":
            assert f"{part.name}: not_run: torch " in err
        assert f"| {part.name} | not_run |" in out
    (path,) = tmp_path.glob("*/summary.md")
    assert path.read_text() in out


def test_what_is_not_installed_is_said_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look = gpu_environment._is_installed
    absent = ("vllm", "msgspec")
    monkeypatch.setattr(
        gpu_environment, "_is_installed", lambda one: not one.startswith(absent) and look(one)
    )
    assert missing("vllm")[-1].startswith("vllm>=")
    assert main(["conformance", "--backend", "vllm", "--rehearse", "--out", str(tmp_path)]) == 3
    said = r"\| conformance-vllm-refit-1 \| not_run \| 0 \|  \| not installed here: msgspec.*vllm>="
    assert re.search(said, capsys.readouterr().out)


def test_every_test_that_needs_a_gpu_is_in_a_file_that_is_run() -> None:
    root = gpu_environment.ROOT
    tests = [*(root / "core/tests").rglob("*.py"), *(root / "plugins").glob("*/tests/*.py")]
    marked = {path for path in tests if "mark.gpu" in path.read_text()}
    assert marked == {root / name for name in TESTS}


def test_what_could_not_all_run_is_incomplete_and_not_run_again(tmp_path: Path) -> None:
    part = counting(tmp_path, "some", "raise SystemExit(3)")
    part = replace(part, command=(*part.command, "conformance"))
    for _ in range(2):
        results = run_parts([part], tmp_path, {}, progress=quietly())
    assert (results["some"].status, ran(tmp_path, "some")) == ("incomplete", 1)
