"""What a run of nox says of its parts, and that its table comes however it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import nox_parts
import pytest
from nox_parts import Parts, join_parts

LEFT_OUT = {"rest": "most mutants", "oldest": "an old engine"}
SHORT = ["lint", "tests", "wheels"]

REPORT = """<?xml version="1.0" encoding="utf-8"?><testsuites><testsuite>
<testcase classname="some.test_file" name="test_a"><failure message="assert 1 == 2&#10;more"/>
</testcase><testcase classname="some.test_file" name="test_c"/>
<testcase classname="some.test_file" name="test_b"><error message="RuntimeError: at setup"/>
</testcase></testsuite></testsuites>"""


def run_of(*sessions: str, fails: str = "") -> tuple[Parts, io.StringIO]:
    said = io.StringIO()
    parts = Parts({"lint: ruff": 90}, stream=said)
    for session in sessions:
        try:
            with parts.part(session, "ruff"):
                assert session != fails
        except AssertionError:
            pass
    return parts, said


def test_the_table_has_every_part_and_names_what_failed() -> None:
    parts, _ = run_of(*SHORT, fails="tests")
    heading, lint, tests, wheels, total, *others = parts.table(SHORT, LEFT_OUT)
    assert heading.split() == ["part", "seconds", "usually"]
    assert lint.split() == ["lint:", "ruff", "0", "90"]
    assert tests.split() == ["tests:", "ruff", "0", "FAILED"]
    assert wheels.split() == ["wheels:", "ruff", "0"]
    assert total.split() == ["all", "0"]
    assert others == [
        "Left out: most mutants (rest)",
        "Left out: an old engine (oldest)",
        "`nox -s full` runs everything.",
    ]


def test_what_a_change_does_not_concern_is_listed() -> None:
    parts, _ = run_of("lint")
    parts.leave_out("conformance(vllm)", "suite: no change since 1a2b")
    expected = "Left out: conformance(vllm): suite: no change since 1a2b"
    assert parts.table(SHORT, LEFT_OUT)[3:] == [expected]


def test_parts_of_several_runs_make_one_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, record = tmp_path / "report.xml", tmp_path / "parts.jsonl"

    def run(commit: str, session: str, fails: bool) -> None:
        monkeypatch.setattr(nox_parts, "_commit", lambda: commit)
        parts = Parts({}, stream=io.StringIO(), record=record)
        with suppress(OSError), parts.part(session, "pytest", report):
            report.write_text(REPORT)
            if fails:
                raise OSError

    run("before", "wheels", fails=False)
    run("now", "tests", fails=True)
    run("now", "tests", fails=False)
    run("now", "lint", fails=False)
    joined = join_parts(record, ["lint", "tests", "wheels"])
    assert not joined.whole
    assert "- did not run: wheels" in joined.text
    assert "| tests: pytest | 0 | 3 | passed |" in joined.text
    again = joined.text.partition("## Failed once, and passed")[2]
    assert "- tests: pytest: some.test_file::test_a: assert 1 == 2" in again
    run("now", "wheels", fails=True)
    failed = join_parts(record, ["lint", "tests", "wheels"]).text.partition("## Failed once")[0]
    assert "- wheels: pytest: some.test_file::test_b: RuntimeError: at setup" in failed
    run("now", "wheels", fails=False)
    assert join_parts(record, ["lint", "tests", "wheels"]).whole


NOXFILE = """
import atexit, sys
import nox
sys.path.insert(0, {tests!r})
import nox_parts
import pytest
from nox_parts import Parts, join_parts

PARTS = Parts({{}})
atexit.register(lambda: PARTS.print_table(["bad", "good"], {{"rest": "most mutants"}}))

@nox.session(venv_backend="none")
def bad(session):
    with PARTS.part(session.name, "no"):
        session.run(sys.executable, "-c", "raise SystemExit(3)")

@nox.session(venv_backend="none")
def good(session):
    with PARTS.part(session.name, "yes"):
        session.run(sys.executable, "-c", "")
"""


def test_nox_ends_with_the_table_and_fails_where_a_part_did(tmp_path: Path) -> None:
    tests = str(Path(__file__).resolve().parents[1])
    (tmp_path / "noxfile.py").write_text(NOXFILE.format(tests=tests))
    done = subprocess.run(
        [sys.executable, "-m", "nox"], cwd=tmp_path, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 1
    *_, bad, good, total, left_out, hint = done.stderr.splitlines()
    assert bad.split()[:2] + bad.split()[3:] == ["bad:", "no", "FAILED"]
    assert good.split()[:2] == ["good:", "yes"]
    assert total.startswith("all")
    assert left_out == "Left out: most mutants (rest)"
    assert hint == "`nox -s full` runs everything."
