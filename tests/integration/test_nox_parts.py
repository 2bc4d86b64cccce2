"""What a run of nox says of its parts, and that its table comes however it ends."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from nox_parts import Parts

LEFT_OUT = {"rest": "most mutants", "oldest": "an old engine"}
SHORT = ["lint", "tests", "wheels"]


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


NOXFILE = """
import atexit, sys
import nox
sys.path.insert(0, {tests!r})
from nox_parts import Parts

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
