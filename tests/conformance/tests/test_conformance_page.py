"""The HTML page in a real browser: what it shows, filters and opens, and for whom."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_conformance.catalogue import CLAUSES
from rl_conformance.figures import Figure, Histogram, Timeline
from rl_conformance.outcome import Measure, Outcome, RunReport, Status
from rl_conformance.reports import Matrix, to_html

sync_api: Any = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install playwright"
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from playwright.sync_api import Browser, Locator, Page

_BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TRACEBACK = "Traceback (most recent call last):\n  File 'engine.py'\nKeyError: <script>x</script>"
#: What a clause comes to in the second run, where that is not a pass.
_TROUBLE = {
    "B2": Outcome("B2/x", "Breaks", Status.FAILED, 0.1, "row 1 is wrong"),
    "D3": Outcome("D3/x", "Stumbles", Status.ERROR, 0.1, _TRACEBACK),
    "G4": Outcome("G4/x", "Known", Status.KNOWN_FAILURE, 0.1, "see the tracker: wrong"),
    "G5": Outcome("G5/x", "Unexpected", Status.UNEXPECTED_PASS, 0.1, "it is listed as failing"),
    "G16": Outcome("G16/x", "Refuses", Status.UNSUPPORTED, 0.1, "declared, and refused"),
    "G17": Outcome("G17/x", "Refuses", Status.NOT_IMPLEMENTED, 0.1, "declared, and refused"),
    "P1": Outcome("P1/x", "Absent", Status.NOT_RUN, 0.0, "the backend offers no policy", (), True),
    "R3": Outcome("R3/x", "Blocked", Status.NOT_RUN, 0.0, "ray is not installed"),
}
_ERRORS = [0.0, 0.0, 1e-7, 3e-7, 1e-6, 1.1e-6, 2e-6, 4e-5]
_PHASES = {
    "DISCOVER": 0.006,
    "PREPARE": 0.004,
    "TRANSFER": 0.012,
    "SEAL": 3e-4,
    "INSTALL": 1e-4,
    "COMMIT": 2e-4,
}
_FIGURES: dict[str, tuple[Figure, ...]] = {
    "G11": tuple(
        Histogram.of("Log-prob error", family, _ERRORS, tolerance=1e-3, unit="nats")
        for family in ("llama", "qwen2")
    ),
    "R1": tuple(Timeline.of("Phases of a refit", m, _PHASES) for m in ("direct", "packed")),
}


def _passed(id_: str) -> Outcome:
    measure = Measure("mean_abs_error", 1.2e-6, 1e-4)
    title = f"A check of {id_}"
    return Outcome(
        f"{id_}/holds", title, Status.PASSED, 0.02, "", (measure,), False, _FIGURES.get(id_, ())
    )


def _run(backend: str, trouble: dict[str, Outcome], **here: str) -> RunReport:
    environment = {
        "suite": "0.1.0",
        "contract": "1.0",
        "plugin": f"rl-{backend} 0.1.0",
        "engine": "an-engine-with-a-long-name 12.34.56",
        "device": "cpu",
        "dtype": "float32",
        "date": "2026-11-21T17:19:48+00:00",
        **here,
    }
    outcomes = tuple(trouble.get(id_, _passed(id_)) for id_ in CLAUSES)
    return RunReport(backend, outcomes, environment, seconds=150.0)


GOOD = _run("mine", {})
MIXED = _run("theirs", _TROUBLE, suite="0.2.0", device="cuda")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = next(filter(None, map(shutil.which, _BROWSERS)), None)
    with sync_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        if found is None and not own.exists():
            pytest.skip(
                "there is no browser: install Chromium, or run `playwright install chromium`"
            )
        launched = playwright.chromium.launch(executable_path=None if own.exists() else found)
        yield launched
        launched.close()


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Callable[..., Page]]:
    """Opens the page of some runs; in the end nothing may have gone wrong or been fetched."""
    complaints: list[str] = []
    requests: list[str] = []
    contexts = []

    def opened(*runs: RunReport, width: int = 1200, **options: Any) -> Page:
        file = tmp_path / "report.html"
        file.write_text(to_html(Matrix.of(runs or (GOOD, MIXED))), encoding="utf-8")
        context = browser.new_context(viewport={"width": width, "height": 800}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert [url for url in requests if not url.endswith("/report.html")] == []


def _shown(page: Page) -> list[str]:
    rows = page.locator("tbody.clause:visible")
    return [str(id_) for id_ in rows.evaluate_all("rows => rows.map(row => row.id)")]


def _toggle(page: Page, clause: str) -> Locator:
    return page.locator(f"tbody#{clause} button")


# -- filters ---------------------------------------------------------------------------------------


def test_every_clause_is_shown_at_first(show: Callable[..., Page]) -> None:
    page = show()
    assert _shown(page) == list(CLAUSES)
    assert page.locator("#shown").inner_text() == f"{len(CLAUSES)} of {len(CLAUSES)} clauses"


def test_text_filters_by_title_check_and_reason(show: Callable[..., Page]) -> None:
    page = show()
    text = page.get_by_label("Text")
    text.fill("ROW wrong")
    assert _shown(page) == ["B2"]
    text.fill("G11/holds")
    assert _shown(page) == ["G11"]
    assert page.locator("tbody.chapter:visible").inner_text().strip() == "Generation"
    text.fill("nothing is called so")
    assert _shown(page) == []
    assert page.get_by_text("No clause matches").is_visible()


# -- checks ----------------------------------------------------------------------------------------


def test_a_click_on_a_cell_shows_the_checks(show: Callable[..., Page]) -> None:
    page = show()
    check = page.locator("tbody#B2 tr.check", has_text="Breaks")
    assert not check.is_visible()
    page.locator("tbody#B2 tr.summary td").nth(1).click()
    assert check.is_visible()
    assert "row 1 is wrong" in check.inner_text()
    assert _toggle(page, "B2").get_attribute("aria-expanded") == "true"
    _toggle(page, "B2").click()
    assert not check.is_visible()


def test_without_scripts_everything_can_be_read(show: Callable[..., Page]) -> None:
    page = show(java_script_enabled=False)
    assert page.locator("tr.check:visible").count() == page.locator("tr.check").count()
    assert not page.locator("#filters").is_visible()


# -- for everyone ----------------------------------------------------------------------------------


def test_the_keyboard_reaches_and_opens_everything(show: Callable[..., Page]) -> None:
    page = show()
    reached = []
    for _ in range(12):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "(e => (e.closest('label') ?? e).innerText.trim())(document.activeElement)"
            )
        )
    for name in ("Skip to the matrix", "Text", "Only failures", "Show all checks", "Reset"):
        assert any(text.startswith(name) for text in reached), (name, reached)
    assert any(text.startswith("B1") for text in reached)
    _toggle(page, "B2").focus()
    page.keyboard.press("Enter")
    assert page.locator("tbody#B2 tr.check").first.is_visible()
    page.keyboard.press("Space")
    assert not page.locator("tbody#B2 tr.check").first.is_visible()
