"""Every format of a report, the matrix of several, and the figures in them."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_conformance.catalogue import CLAUSES
from rl_conformance.cli import app
from rl_conformance.figures import Figure, Histogram, Span, Timeline
from rl_conformance.outcome import Measure, Outcome, RunReport, Status, Verdict
from rl_conformance.reports import (
    Matrix,
    from_json,
    read_report,
    to_badge,
    to_html,
    to_json,
    to_junit,
    to_markdown,
)
from rl_conformance.reports.files import write_text
from rl_core.errors import ConfigError

ERRORS = Histogram.of("Log-prob error", "llama", [0.0, 1e-6, 2e-6, 3e-4], tolerance=1e-3)
GOOD = Outcome(
    "B1/good", "Good", Status.PASSED, 0.125, "", (Measure("error", 0.5, 1.0),), figures=(ERRORS,)
)
BAD = Outcome("B2/bad", "Bad", Status.FAILED, 0.125, "<broken> & sad")
SKIPPED = Outcome("B2/skipped", "Skipped", Status.NOT_RUN, message="no GPU")
HERE = {
    "suite": "0.1.0",
    "contract": "1.0",
    "device": "cpu",
    "dtype": "float32",
    "date": "2026-11-21T17:19:48+00:00",
}


def _report(*outcomes: Outcome, clauses: tuple[str, ...] = ("B1", "B2"), **here: Any) -> RunReport:
    return RunReport("mine", outcomes, {**HERE, **here}, clauses, seconds=1.0)


# -- shapes ----------------------------------------------------------------------------------------

lengths = st.integers(0, 2**20).map(lambda n: n / 8)  # survive being rounded to three digits
names = st.text(max_size=12)
seconds = st.floats(1e-7, 1e4)
errors = st.one_of(st.just(0.0), st.floats(1e-12, 100.0), st.just(math.inf), st.just(math.nan))
histograms = st.builds(
    Histogram.of,
    names,
    names,
    st.lists(errors, max_size=30),
    tolerance=st.none() | st.floats(1e-6, 1.0),
    unit=names,
)
spans = st.lists(st.builds(Span, names, seconds), max_size=6).map(tuple)
figures: st.SearchStrategy[Figure] = histograms | st.builds(Timeline, names, names, spans)
measures = st.builds(Measure, names, st.floats(0, 10), st.floats(0, 10), names)
outcomes = st.builds(
    Outcome,
    st.sampled_from(sorted(CLAUSES)).map(lambda id_: f"{id_}/a_check"),
    names,
    st.sampled_from(Status),
    lengths,
    names,
    st.lists(measures, max_size=2).map(tuple),
    st.booleans(),
    st.lists(figures, max_size=3).map(tuple),
)


@st.composite
def reports(draw: st.DrawFn) -> RunReport:
    """A run of some clauses; each outcome belongs to one of them."""
    order = {id_: n for n, id_ in enumerate(CLAUSES)}
    found = draw(st.lists(outcomes, max_size=5, unique_by=lambda o: o.check))
    found.sort(key=lambda o: order[o.clause])
    clauses = sorted({o.clause for o in found} | draw(st.sets(st.sampled_from(sorted(CLAUSES)))))
    return RunReport(
        draw(st.sampled_from(["mine", "theirs"])),
        tuple(found),
        draw(st.dictionaries(st.sampled_from(sorted(HERE)), names)),
        tuple(sorted(clauses, key=order.__getitem__)),
        draw(names),
        draw(lengths),
        draw(st.integers(0, 999)),
    )


# -- JSON ------------------------------------------------------------------------------------------


@given(reports())
def test_json_survives_a_round_trip(report: RunReport) -> None:
    assert from_json(to_json(report)) == report


def test_reports_that_were_kept_are_read() -> None:
    folder = Path(__file__).parents[3] / "docs" / "reports"
    kept = [p for p in folder.glob("*.json") if "clauses" in json.loads(p.read_text())]
    assert kept
    assert {read_report(path).verdict for path in kept} == {Verdict.CONFORMANT}


@pytest.mark.parametrize(
    ("key", "value"),
    [("seconds", "long"), ("status", "fine"), ("measures", [{}]), ("figures", [{"name": "x"}])],
)
def test_a_damaged_report_is_said_to_be_one_and_where(key: str, value: object) -> None:
    data = json.loads(to_json(_report(GOOD, BAD)))
    data["clauses"][0]["checks"][0][key] = value
    where = "kind" if key == "figures" else f"clauses[0].checks[0].{key}"
    with pytest.raises(ValueError, match=f"a damaged report: .*{re.escape(where)}"):
        from_json(json.dumps(data))


def test_json_of_another_schema_is_refused() -> None:
    with pytest.raises(ValueError, match="schema 99"):
        from_json(json.dumps({"schema": 99}))


# -- JUnit, Markdown and the badge -----------------------------------------------------------------


def test_junit_counts_what_is_missing_as_an_error() -> None:
    report = _report(BAD, replace(SKIPPED, check="B1/x"), clauses=("B1", "B2", "B3"))
    (suite,) = ET.fromstring(to_junit(report))
    counts = {key: suite.get(key) for key in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "4", "failures": "1", "errors": "2", "skipped": "1"}


def test_markdown_has_a_row_for_each_clause_and_the_reasons() -> None:
    text = to_markdown(_report(GOOD, BAD))
    assert "| B1 | " in text
    assert "| error 0.5 | 1 |" in text
    assert "B2/bad: failed: <broken> & sad" in text


def test_a_badge_escapes_the_name() -> None:
    badge = to_badge(replace(_report(GOOD), backend='<b> & "c"'))
    assert str(ET.fromstring(badge).get("aria-label")).startswith('<b> & "c"')


# -- the page --------------------------------------------------------------------------------------


def test_html_is_one_page_without_references() -> None:
    page = to_html(Matrix.of([_report(GOOD, BAD)]))
    assert "&lt;broken&gt; &amp; sad" in page
    assert not any(word in page for word in ("http:", "https:", "src=", "<link", "url(", "@import"))


def test_the_page_begins_with_the_result_its_scope_and_the_command() -> None:
    here = {"command": "rl conformance run mine -k B1", "revision": "abc123", "plugin": "rl-mine 1"}
    tiny = {"settings": '{"generation": {"vllm_cfg": {"kv_cache_memory_bytes": 64}}}'}
    excused = replace(SKIPPED, excused=True)
    run = replace(_report(GOOD, excused, **here, **tiny), selection="B1", total=9)
    page = re.sub(r"\s+", " ", re.sub("<[^>]+>", "", to_html(Matrix.of([run]))))
    assert (
        "mine: passed (part: 1 of 9 checks). 1 of the 1 checks that ran passed, 1 not run" in page
    )
    assert "Revision abc123. Command: rl conformance run mine -k B1" in page
    assert "nothing here was tried on a GPU" in page
    assert "generation: vllm_cfg.kv_cache_memory_bytes = 64" in page
    assert "Why 1 checks did not run 1: no GPU" in page
    assert "not run No check of the clause ran" in page
    assert "GPU." not in to_html(Matrix.of([_report(GOOD, device="cuda", model="/m")]))


# -- several runs ----------------------------------------------------------------------------------


def _write(path: Path, report: RunReport) -> Path:
    path.write_text(to_json(report))
    return path


def test_the_command_merges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine = _write(tmp_path / "mine.json", _report(GOOD, BAD))
    theirs = _write(tmp_path / "theirs.json", replace(_report(GOOD), backend="theirs"))
    html, markdown = tmp_path / "out" / "m.html", tmp_path / "out" / "m.md"
    options = [str(mine), str(theirs), "--html", str(html), "--markdown", str(markdown)]
    assert app(["merge", *options]) == 0
    assert "theirs (cpu, float32, 2026-11-21): incomplete" in capsys.readouterr().out
    assert html.read_text().startswith("<!doctype html>")
    row = "| clause | | mine (cpu, float32, 2026-11-21) | theirs (cpu, float32, 2026-11-21) |"
    assert row in markdown.read_text()


def test_the_same_run_twice_is_refused(tmp_path: Path) -> None:
    files = [_write(tmp_path / name, _report(GOOD)) for name in ("a.json", "b.json")]
    with pytest.raises(ConfigError, match=r"b\.json and .*a\.json are the same run") as caught:
        Matrix.read(files)
    assert caught.value.fix


def _foreign(**changes: Any) -> str:
    return json.dumps(json.loads(to_json(_report(GOOD))) | changes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '"text"',
        "{}",
        _foreign(schema=3),
        _foreign(clauses=[{"id": "G99", "checks": []}]),
        _foreign(clauses=[{"id": "B1", "checks": [{"check": "B1/x"}]}]),
        _foreign(clauses=3),
        _foreign(environment=None),
        '{"schema": 1}',
        '{"schema": 2}',
    ],
)
def test_what_is_no_report_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "strange.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"strange\.json") as caught:
        read_report(path)
    assert "rl conformance run" in str(caught.value.fix)


@pytest.mark.parametrize("name", ["missing.json", "."])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="is not a report"):
        read_report(tmp_path / name)


def test_a_report_that_cannot_be_written_is_named_and_spares_the_one_before(tmp_path, monkeypatch):
    file = tmp_path / "report.md"
    write_text(file, "whole")

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", full)
        with pytest.raises(ConfigError, match=f"{file} cannot be written: No space"):
            write_text(file, "half")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(file / "below a file", "half")
    assert file.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [file]
