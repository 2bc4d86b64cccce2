"""JUnit XML: for CI systems that show test results."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

from rl_conformance.outcome import Status

if TYPE_CHECKING:
    from rl_conformance.outcome import RunReport

__all__ = ["to_junit"]

#: Characters that XML cannot hold, such as the escapes of coloured tracebacks.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(report: RunReport) -> str:
    """A test suite with one case per check; what is not bad and not passed is skipped."""
    suite = ET.Element("testsuite", name=f"rl-conformance {report.backend}")
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for outcome in report.outcomes:
        counts["tests"] += 1
        case = ET.SubElement(
            suite,
            "testcase",
            classname=f"{report.backend}.{outcome.clause}",
            name=outcome.check,
            time=f"{outcome.seconds:.4f}",
        )
        if outcome.status is Status.PASSED:
            continue
        tag = {Status.ERROR: "error"}.get(
            outcome.status, "failure" if outcome.status.bad else "skipped"
        )
        counts[{"error": "errors", "failure": "failures", "skipped": "skipped"}[tag]] += 1
        text = _NOT_XML.sub("\N{REPLACEMENT CHARACTER}", f"{outcome.status}: {outcome.story}")
        ET.SubElement(case, tag, message=text.splitlines()[0]).text = text
    for missing in report.missing:
        counts["tests"] += 1
        counts["errors"] += 1
        case = ET.SubElement(suite, "testcase", classname=report.backend, name=f"{missing} ran")
        ET.SubElement(case, "error", message=f"incomplete: {missing} has no result")
    suite.attrib |= {key: str(value) for key, value in counts.items()}
    suite.set("time", f"{report.seconds:.3f}")
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"
