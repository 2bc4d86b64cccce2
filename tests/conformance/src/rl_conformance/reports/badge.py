"""A badge: the verdict of a run in a line, as SVG or as an endpoint for shields.io."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from rl_conformance.outcome import Status, Verdict

if TYPE_CHECKING:
    from rl_conformance.outcome import RunReport

__all__ = ["to_badge", "to_endpoint"]

_COLOURS = {
    Verdict.CONFORMANT: "#1a7f37",
    Verdict.PASSED: "#4a5a78",
    Verdict.FAILED: "#c62828",
    Verdict.INCOMPLETE: "#6e5a00",
}
_NARROW, _WIDE = set("fijltrI.,:;|!'()- 1"), set("mwMW")

_SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img" aria-label="{all}">
  <title>{all}</title>
  <rect width="{width}" height="20" rx="3" fill="{colour}"/>
  <path d="M{left} 0v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#3b3f46"/>
  <g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" aria-hidden="true">
    <text x="6" y="14" textLength="{label_width}">{label}</text>
    <text x="{message_x}" y="14" textLength="{message_width}">{message}</text>
  </g>
</svg>
"""


def to_badge(report: RunReport) -> str:
    """An SVG picture that needs nothing else."""
    label, message, colour = _texts(report)
    widths = _width(label), _width(message)
    left, right = (width + 12 for width in widths)
    return _SVG.format(
        all=escape(f"{label}: {message}", {'"': "&quot;"}),
        label=escape(label),
        message=escape(message),
        colour=colour,
        left=left,
        width=left + right,
        label_width=widths[0],
        message_width=widths[1],
        message_x=left + 6,
    )


def to_endpoint(report: RunReport) -> str:
    """What shields.io makes a badge from, see its "endpoint" badge."""
    label, message, colour = _texts(report)
    badge = {"schemaVersion": 1, "label": label, "message": message, "color": colour}
    if report.verdict is Verdict.FAILED:
        badge["isError"] = True
    return json.dumps(badge, indent=2) + "\n"


def _texts(report: RunReport) -> tuple[str, str, str]:
    """Label, message and colour. A part of the suite never reads as the whole."""
    contract = report.environment.get("contract", "")
    label = f"{report.backend}: RL contract {contract}".rstrip()
    known = sum(o.status is Status.KNOWN_FAILURE for o in report.outcomes)
    parts = [
        " on ".join(filter(None, [report.headline, report.environment.get("device", "")])),
        f"{known} known failure{'s' * (known > 1)}" if known else "",
    ]
    return label, ", ".join(filter(None, parts)), _COLOURS[report.verdict]


def _width(text: str) -> int:
    """About its pixels in 11 px Verdana; ``textLength`` makes it exact whatever the font."""
    return round(sum(4.2 if c in _NARROW else 9.8 if c in _WIDE else 7.0 for c in text))
