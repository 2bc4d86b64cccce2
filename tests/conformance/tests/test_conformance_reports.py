"""Every format of a report, the matrix of several, and the figures in them."""

from __future__ import annotations

import html
import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_conformance.catalogue import CLAUSES
from rl_conformance.cli import app
from rl_conformance.context import Context
from rl_conformance.figures import Figure, Histogram, Span, Timeline, figures_from
from rl_conformance.outcome import Measure, Outcome, RunReport, Status, Verdict
from rl_conformance.reports import (
    Matrix,
    ReportFiles,
    from_json,
    matrix_to_markdown,
    read_report,
    to_badge,
    to_endpoint,
    to_html,
    to_json,
    to_junit,
    to_markdown,
)
from rl_conformance.reports.files import write_text
from rl_conformance.reports.plots import LEFT, RIGHT, charts
from rl_conformance.reports.summary import reason, tally
from rl_core.errors import ConfigError

ERRORS = Histogram.of("Log-prob error", "llama", [0.0, 1e-6, 2e-6, 3e-4], tolerance=1e-3)
PHASES = Timeline.of("Phases of a refit", "direct", {"DISCOVER": 0.01, "TRANSFER": 0.04})
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


# -- figures ---------------------------------------------------------------------------------------


@given(st.lists(errors))
def test_a_histogram_loses_no_value(values: list[float]) -> None:
    histogram = Histogram.of("errors", "all", values)
    assert histogram.total == len(values)
    assert histogram.zeros == values.count(0.0)
    assert len(histogram.counts) <= 40
    assert len(histogram.edges) == (len(histogram.counts) + 1 if histogram.counts else 0)
    assert all(low < high for low, high in pairwise(histogram.edges))
    assert all(histogram.counts[:1] + histogram.counts[-1:])


@given(st.floats(1e-9, 9.999))
def test_a_value_lies_in_its_bin(value: float) -> None:
    histogram = Histogram.of("errors", "one", [value])
    low, high = histogram.edges
    assert low <= value < high


def test_what_is_not_a_number_counts_as_the_largest() -> None:
    assert Histogram.of("errors", "bad", [math.nan, math.inf]).counts == (2,)
    assert Histogram.of("errors", "bad", [math.nan]).edges[-1] == 10.0


def test_a_kind_of_a_later_suite_is_left_out() -> None:
    assert figures_from([{"kind": "heat map", "title": "t"}]) == ()


def _context() -> Context:
    return Context(None, None)  # type: ignore[arg-type]  # neither is used to record


def test_a_check_records_the_distribution_of_its_errors() -> None:
    ctx = _context()
    ctx.record_errors("errors", "all", torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.001]), 0.1)
    (figure,) = ctx.figures
    assert isinstance(figure, Histogram)
    assert (figure.zeros, figure.total, figure.tolerance) == (1, 2, 0.1)


def test_nothing_is_recorded_of_what_cannot_be_compared() -> None:
    ctx = _context()
    ctx.record_errors("errors", "all", torch.zeros(2), torch.zeros(3))
    assert ctx.figures == []


# -- JSON ------------------------------------------------------------------------------------------


@given(reports())
def test_json_survives_a_round_trip(report: RunReport) -> None:
    assert from_json(to_json(report)) == report


def test_json_from_before_there_were_figures_is_read() -> None:
    report = _report(GOOD, BAD)
    data = json.loads(to_json(report))
    for clause in data["clauses"]:
        for check in clause["checks"]:
            del check["figures"]
    bare = tuple(replace(o, figures=()) for o in report.outcomes)
    assert from_json(json.dumps(data)) == replace(report, outcomes=bare)


def test_reports_that_were_kept_are_read() -> None:
    folder = Path(__file__).parents[3] / "docs" / "reports"
    kept = [p for p in folder.glob("*.json") if "clauses" in json.loads(p.read_text())]
    assert kept
    assert {read_report(path).verdict for path in kept} == {Verdict.CONFORMANT}


def test_reports_from_before_a_clause_was_numbered_anew_are_read_under_its_number() -> None:
    report = _report(replace(GOOD, check="R17/good"), clauses=("R17",))
    data = json.loads(to_json(report).replace("R17", "R16"))
    assert from_json(json.dumps(data)).clauses == ("R16",)
    assert from_json(json.dumps(data | {"schema": 1})) == report


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


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_junit_is_xml_whatever_the_message(message: str) -> None:
    (suite,) = ET.fromstring(to_junit(_report(replace(BAD, message=f"\x1b[31m{message}"))))
    assert suite.get("failures") == "1"


def test_the_pages_show_a_failure_as_the_command_does() -> None:
    message = "did:       refit()\nexpected:  version: 1\ngot:       0"
    bad = replace(BAD, message=message, where="checks/x.py:1", command="rl conformance run mine")
    report = _report(GOOD, bad)
    page = html.unescape(to_html(Matrix.of([report])))
    assert f"<summary>{reason(bad)}</summary><pre>{bad.story}</pre>" in page
    assert indent(bad.story, "  ") in to_markdown(report)
    assert reason(bad) == "did: refit(); expected: version: 1; got: 0"


def test_markdown_has_a_row_for_each_clause_and_the_reasons() -> None:
    text = to_markdown(_report(GOOD, BAD))
    assert "| B1 | " in text
    assert "| error 0.5 | 1 |" in text
    assert "B2/bad: failed: <broken> & sad" in text


@given(reports())
def test_a_badge_is_a_picture_with_the_verdict(report: RunReport) -> None:
    report = replace(report, environment=HERE)
    root = ET.fromstring(to_badge(report))
    title = root.find("{http://www.w3.org/2000/svg}title")
    assert title is not None
    assert title.text == root.get("aria-label")
    assert f"{report.backend}: RL contract 1.0: {report.headline} on cpu" in str(title.text)
    assert ("(part: " in str(title.text)) == bool(report.selection)


def test_a_badge_escapes_the_name() -> None:
    badge = to_badge(replace(_report(GOOD), backend='<b> & "c"'))
    assert str(ET.fromstring(badge).get("aria-label")).startswith('<b> & "c"')


def test_a_part_of_the_suite_has_another_colour_than_the_whole() -> None:
    whole = _report(GOOD, clauses=("B1",))
    part = replace(whole, selection="B1")
    assert (whole.verdict, part.verdict) == (Verdict.CONFORMANT, Verdict.PASSED)
    assert json.loads(to_endpoint(whole))["color"] != json.loads(to_endpoint(part))["color"]


def test_an_endpoint_counts_known_failures() -> None:
    known = replace(GOOD, check="B1/known", status=Status.KNOWN_FAILURE)
    badge = json.loads(to_endpoint(_report(GOOD, known, clauses=("B1",))))
    assert badge["message"] == "conformant on cpu, 1 known failure"
    assert json.loads(to_endpoint(_report(BAD)))["isError"] is True


def test_the_suffix_of_a_badge_says_what_it_is(tmp_path: Path) -> None:
    for name in ("badge.svg", "badge.json"):
        ReportFiles(badge=tmp_path / "new" / name).write(_report(GOOD))
    assert (tmp_path / "new" / "badge.svg").read_text().startswith("<svg")
    assert json.loads((tmp_path / "new" / "badge.json").read_text())["schemaVersion"] == 1


def test_a_badge_of_another_kind_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match=r"badge\.png"):
        ReportFiles(badge=Path("badge.png"))


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


@given(st.lists(reports(), min_size=1, max_size=3))
def test_html_can_be_made_of_any_runs(runs: list[RunReport]) -> None:
    matrix = Matrix.of(runs)
    page = to_html(matrix)
    assert page.count('<tbody class="clause"') == len(matrix.rows)
    assert page.count("<svg") == len(charts(matrix))


@given(st.lists(reports(), min_size=1, max_size=3))
def test_everything_in_a_plot_lies_within_its_axes(runs: list[RunReport]) -> None:
    matrix = Matrix.of(runs)
    drawn = charts(matrix)
    given_figures = [f for run in runs for o in run.outcomes for f in o.figures]
    assert sum(len(chart.strips) for chart in drawn) == len(given_figures)
    for chart in drawn:
        places = [tick.x for tick in chart.ticks]
        assert places == sorted(places)
        assert len({tick.text for tick in chart.ticks}) == len(chart.ticks) >= 2
        for bar in (bar for strip in chart.strips for bar in strip.bars):
            assert LEFT - 1e-6 <= bar.x <= bar.x + bar.width <= RIGHT + 1e-6
            assert 0 <= bar.height <= 1


def test_a_tally_says_how_many_ran_or_how_many_failed() -> None:
    half = _report(replace(GOOD, check="B2/good"), replace(SKIPPED, excused=True), clauses=("B2",))
    failed = _report(replace(GOOD, check="B2/good"), BAD, SKIPPED, clauses=("B2",))
    assert [tally(*report.results()) for report in (half, failed)] == ["1/2", "1/3"]


# -- several runs ----------------------------------------------------------------------------------


def test_headings_say_as_much_as_it_takes() -> None:
    other = {"date": "2026-11-21T18:00:00+00:00"}
    runs = [_report(GOOD), _report(GOOD, **other), _report(GOOD, device="cuda")]
    assert [column.label for column in Matrix.of(runs).columns] == [
        "mine (cpu, float32, 2026-11-21T17:19:48+00:00)",
        "mine (cpu, float32, 2026-11-21T18:00:00+00:00)",
        "mine (cuda, float32, 2026-11-21)",
    ]


_HEADINGS = st.tuples(
    st.sampled_from(["mine", "theirs"]),
    st.sampled_from(["cpu", "cuda"]),
    st.sampled_from(["float32", "bfloat16"]),
    st.datetimes().map(lambda moment: moment.isoformat()),
)


@given(st.lists(_HEADINGS, unique=True, max_size=8))
def test_every_column_has_a_heading_of_its_own(
    headings: list[tuple[str, str, str, str]],
) -> None:
    runs = [
        replace(_report(device=device, dtype=dtype, date=date), backend=backend)
        for backend, device, dtype, date in headings
    ]
    labels = [column.label for column in Matrix.of(runs).columns]
    assert len(set(labels)) == len(labels)


def test_a_clause_that_the_first_run_lacks_is_shown() -> None:
    matrix = Matrix.of([_report(GOOD, clauses=("B1",)), _report(BAD, clauses=("B2",))])
    assert [row.clause.id for row in matrix.rows] == ["B1", "B2"]
    assert [row.statuses for row in matrix.rows] == [("passed", "absent"), ("absent", "failed")]
    assert [row.differs for row in matrix.rows] == [True, True]
    assert [row.bad for row in matrix.rows] == [False, True]
    assert "not in this run" in to_html(matrix)
    assert "| passed 1/1, error 0.5 ≤ 1 | not in this run |" in matrix_to_markdown(matrix)


def test_runs_of_different_suites_are_marked() -> None:
    matrix = Matrix.of([_report(GOOD), replace(_report(GOOD, suite="0.2.0"), backend="theirs")])
    for text in (to_html(matrix), matrix_to_markdown(matrix)):
        assert "cannot be compared in full" in text
        assert "suite: 0.1.0 for mine (cpu, float32, 2026-11-21); 0.2.0 for theirs" in text
    assert "contract:" not in to_html(matrix)


def test_reasons_that_many_checks_share_are_said_once() -> None:
    text = matrix_to_markdown(Matrix.of([_report(replace(SKIPPED, check="B1/x"), SKIPPED)]))
    assert "- B1, B2: not_run: no GPU" in text


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
