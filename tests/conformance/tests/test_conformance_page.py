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


def test_chapter_and_status_filter_together(show: Callable[..., Page]) -> None:
    page = show()
    page.get_by_label("Chapter").select_option("generation")
    assert all(id_.startswith("G") for id_ in _shown(page))
    page.get_by_label("Status").select_option("known_failure")
    assert _shown(page) == ["G4"]
    page.get_by_role("button", name="Reset").click()
    page.wait_for_function(
        f"document.querySelectorAll('tbody.clause:not([hidden])').length == {len(CLAUSES)}"
    )


def test_only_differences_and_only_failures(show: Callable[..., Page]) -> None:
    page = show()
    page.get_by_label("Only differences").check()
    assert _shown(page) == list(_TROUBLE)
    page.get_by_label("Only failures").check()
    assert _shown(page) == ["B2", "D3", "G5", "R3"]


def test_one_run_has_no_differences_to_filter_by(show: Callable[..., Page]) -> None:
    assert show(GOOD).get_by_label("Only differences").count() == 0


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


def test_all_checks_open_at_once(show: Callable[..., Page]) -> None:
    page = show()
    page.get_by_role("button", name="Show all checks").click()
    assert (
        page.locator("tr.check:visible").count() == page.locator("tr.check").count() > len(CLAUSES)
    )


def test_an_address_with_a_clause_opens_it(show: Callable[..., Page]) -> None:
    page = show()
    page.evaluate("location.hash = 'G4'")
    page.locator("tbody#G4 tr.check").first.wait_for()


def test_a_traceback_is_text_that_can_be_opened(show: Callable[..., Page]) -> None:
    page = show()
    _toggle(page, "D3").click()
    page.get_by_text("KeyError: <script>x</script>").first.click()
    assert "engine.py" in page.locator("tbody#D3 pre").inner_text()


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


def test_every_control_has_a_name(show: Callable[..., Page]) -> None:
    page = show()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('input, select')].filter(e => !e.labels.length).length"
    )
    assert unnamed == 0
    assert page.get_by_role("region", name="Matrix").count() == 1
    assert page.get_by_role("search").count() == 1
    assert page.get_by_role("rowheader", name="B1").first.is_visible()
    assert page.get_by_role("columnheader", name="theirs").is_visible()


_CONTRAST = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b]
    .map((c) => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const found = channels(getComputedStyle(e).backgroundColor);
      if (found[3] !== 0) return found;
    }
  };
  const found = [];
  const texts = "h1, h2, h3, p, li, dt, dd, th, td, button, label, option, summary, code, span";
  for (const e of document.querySelectorAll(`${texts}, svg text`)) {
    if (!e.textContent.trim()) continue;
    const style = getComputedStyle(e);
    const colour = channels(e.closest("svg") ? style.fill : style.color);
    const [a, b] = [luminance(colour), luminance(behind(e))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) found.push(`${e.tagName}.${e.getAttribute("class")} ${ratio.toFixed(2)}`);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(show: Callable[..., Page], scheme: str) -> None:
    page = show(color_scheme=scheme)
    page.get_by_role("button", name="Show all checks").click()
    assert page.evaluate(_CONTRAST) == []


@pytest.mark.parametrize("width", [400, 800, 1600])
@pytest.mark.parametrize("count", [1, 2, 6])
def test_only_the_matrix_scrolls_sideways(
    show: Callable[..., Page], width: int, count: int
) -> None:
    runs = [_run(f"backend-{n}", _TROUBLE if n % 2 else {}) for n in range(count)]
    page = show(*runs, width=width)
    page.get_by_role("button", name="Show all checks").click()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate("document.querySelector('.scroll').getBoundingClientRect().right") <= width


def test_heading_and_first_column_stay_in_sight(show: Callable[..., Page]) -> None:
    page = show(GOOD, MIXED, _run("third", {}), width=400)
    page.evaluate("document.querySelector('.scroll').scrollTo(200, 900)")
    box = page.locator(".scroll").bounding_box()
    corner = page.locator("thead th").first.bounding_box()
    clause = page.locator("tbody#G4 tr.summary th").bounding_box()
    assert box
    assert corner
    assert clause
    assert (corner["x"], corner["y"]) == pytest.approx((box["x"] + 1, box["y"] + 1), abs=1)
    assert clause["x"] == pytest.approx(corner["x"], abs=1)


def test_on_a_wide_screen_the_heading_stays_while_the_page_scrolls(
    show: Callable[..., Page],
) -> None:
    page = show(width=1600)
    page.locator("tbody#S3").scroll_into_view_if_needed()
    box = page.locator("thead th").nth(1).bounding_box()
    assert box
    assert box["y"] == pytest.approx(0, abs=1)


# -- plots -----------------------------------------------------------------------------------------


def test_plots_have_names_and_labelled_axes(show: Callable[..., Page]) -> None:
    page = show()
    histograms = page.get_by_role("img", name="Log-prob error, ")
    timelines = page.get_by_role("img", name="Phases of a refit, ")
    assert (histograms.count(), timelines.count()) == (2, 2)
    assert "mine (cpu" in str(histograms.first.get_attribute("aria-label"))
    words = histograms.first.locator("text").all_text_contents()
    assert "absolute error (nats, logarithmic scale)" in words
    assert {"count", "at most 0.001", "llama", "qwen2", "0", "10⁻⁶"} <= set(words)
    words = timelines.first.locator("text").all_text_contents()
    assert "time since the first message (ms)" in words
    assert {"direct", "packed", "0", "10", "20"} <= set(words)
    legend = page.locator("figure").filter(has=timelines.first).first.locator(".counts")
    assert legend.inner_text().split() == [phase.lower() for phase in _PHASES]


@pytest.mark.parametrize("width", [400, 1600])
def test_everything_in_a_plot_is_inside_its_card(show: Callable[..., Page], width: int) -> None:
    outside = show(width=width).evaluate(
        """() => [...document.querySelectorAll("figure")].flatMap((figure) => {
          const card = figure.getBoundingClientRect();
          return [...figure.querySelectorAll("svg *:not(title)")].filter((e) => {
            const box = e.getBoundingClientRect();
            return box.left < card.left || box.right > card.right || box.bottom > card.bottom;
          }).map((e) => e.outerHTML);
        })"""
    )
    assert outside == []


def test_plots_follow_the_filters(show: Callable[..., Page]) -> None:
    page = show(GOOD)
    assert page.locator("figure:visible").count() == 2
    page.get_by_label("Text").fill("G11")
    assert page.locator("figure:visible").get_attribute("data-clause") == "G11"
    page.get_by_label("Text").fill("G12")
    assert page.get_by_text("have no figures").is_visible()


def test_numbers_of_a_plot_can_be_read(show: Callable[..., Page]) -> None:
    page = show(GOOD)
    figure = page.locator("figure").filter(has_text="Phases of a refit")
    figure.locator("summary").click()
    assert "TRANSFER: 12 ms" in figure.locator(".numbers").inner_text()
