"""A clause and a check in a few words, the same in every format."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from rl_conformance.outcome import Status

if TYPE_CHECKING:
    from rl_conformance.outcome import ClauseResult, Measure, Outcome, RunReport

__all__ = [
    "checks_passed",
    "not_run_because",
    "reason",
    "scope",
    "settings_lines",
    "status_text",
    "tally",
    "worst_measure",
]


def status_text(result: ClauseResult) -> str:
    """The status of a clause in one word; ``incomplete`` if it has none."""
    return str(result.status) if result.status else "incomplete"


def tally(result: ClauseResult) -> str:
    """Of its checks, how many ran if it passed, and else how many have its status."""
    passed = result.status is Status.PASSED
    same = result.ran if passed else sum(o.status is result.status for o in result.outcomes)
    return f"{same}/{len(result.outcomes)}"


def worst_measure(result: ClauseResult) -> Measure | None:
    """The measure of a clause that comes nearest to its tolerance."""
    measures = [m for o in result.outcomes for m in o.measures if m.tolerance > 0]
    return max(measures, key=lambda m: m.value / m.tolerance, default=None)


def reason(outcome: Outcome) -> str:
    """A message in one line: what was done, expected and got, or the end of a traceback."""
    lines = re.sub(r"\n {11}", " ", outcome.message.strip()).splitlines() or [""]
    if lines[0].startswith("did:"):
        return "; ".join(" ".join(line.split()) for line in lines[:3])
    return lines[-1] if lines[0].startswith("Traceback") else lines[0]


def checks_passed(report: RunReport) -> str:
    """How many checks passed, how many have another status, and where they ran, in a sentence."""
    counts = Counter(o.status for o in report.outcomes)
    ran = len(report.outcomes) - counts[Status.NOT_RUN]
    others = [
        f"{counts[status]} {status.replace('_', ' ')}"
        for status in Status
        if status is not Status.PASSED and counts[status]
    ]
    facts = {key: report.environment.get(key) for key in ("device", "dtype", "plugin", "engine")}
    where = f"on {facts['device']} in {facts['dtype']}" if facts["device"] else ""
    what = ", ".join(str(facts[key]) for key in ("plugin", "engine") if facts[key])
    of = f"{counts[Status.PASSED]} of the {ran} checks that ran passed"
    return "; ".join(filter(None, [", ".join([of, *others]), where, what])) + "."


def not_run_because(report: RunReport) -> list[tuple[str, int]]:
    """The reasons of checks that did not run, the most frequent first, with their numbers."""
    left_out = (o.message for o in report.outcomes if o.status is Status.NOT_RUN)
    return Counter(left_out).most_common()


def scope(reports: list[RunReport]) -> str:
    """What runs such as these cannot show."""
    environments = [report.environment for report in reports]
    notes = []
    if not any(here.get("device") == "cuda" for here in environments):
        notes.append("Everything ran on a CPU; nothing here was tried on a GPU.")
    if all("tiny" in str(here.get("model", "tiny")) for here in environments):
        notes.append(
            "The models are tiny and have random weights: the page shows whether a backend keeps "
            "the contract, not how fast it is or how it behaves with a large model."
        )
    return " ".join(notes)


def settings_lines(text: str) -> list[str]:
    """What a plugin sets for the suite, a line for each kind of backend."""
    kinds: dict[str, Any] = json.loads(text)
    return [f"{kind}: {', '.join(_flat(each))}" for kind, each in kinds.items()]


def _flat(value: Any, key: str = "") -> list[str]:
    """A nested configuration as ``a.b = 1``."""
    if not isinstance(value, dict):
        return [f"{key} = {value}"]
    return [line for k, each in value.items() for line in _flat(each, f"{key}.{k}" if key else k)]
