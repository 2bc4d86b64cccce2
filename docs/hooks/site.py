"""What MkDocs calls while it builds the site: diagrams, and the clauses of the contract.

Diagrams are written as Mermaid, which GitHub draws; here they become pictures that no other host
has to serve. Every clause of the contract gets an anchor: ``contract.md#g7``.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

__all__ = ["clauses", "diagram", "on_files", "on_page_markdown"]

ROOT = Path(__file__).parents[2]

_CLAUSE = re.compile(r"(?m)^- ([A-Z]\d+) ")
_WHY = re.compile(r" *\*(Why|Example):\* ")
_MERMAID = re.compile(r"(?ms)^```mermaid\nsequenceDiagram\n(.*?)^```$")
_STEP = re.compile(r"^(\w+)\s*(--?>>)\s*(\w+)\s*:\s*(.*)$")
_NOTE = re.compile(r"^Note over ([\w, ]+):\s*(.*)$")
#: Links between READMEs, from one to the pages, and to what is not on the site.
_README = re.compile(r"\]\((?:\.\./)+(?:plugins/)?(rl-\w+)(?:/README\.md)?(#[^)]*)?\)")
_PAGE = re.compile(r"\]\(\.\./\.\./docs/([^)]*)\)")
_ELSEWHERE = re.compile(r"\[([^\]]*)\]\((?:\.\./|src/|tests/)[^)]*\)")
_COLUMN, _ROW, _MARGIN = 230, 34, 24


def on_files(files: Files, *, config: Any) -> Files:
    """Puts the README of each plugin on the site, as ``packages/NAME.md``."""
    for readme in sorted(ROOT.glob("plugins/*/README.md")):
        text = _README.sub(r"](\1.md\2)", readme.read_text(encoding="utf-8"))
        kept = _PAGE.sub(r"](<PAGES>/\1)", text)
        text = _ELSEWHERE.sub(r"\1", kept).replace("](<PAGES>/", "](../")
        name = f"packages/{readme.parent.name}.md"
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Any, **kwargs: Any) -> str:
    """Draws diagrams, and gives the clauses of the contract anchors."""
    del kwargs
    if page.file.src_uri == "contract.md":
        markdown = clauses(markdown)
    if not page.file.src_uri.startswith("packages/"):
        up = "../" * page.file.src_uri.count("/")
        markdown = _README.sub(rf"]({up}packages/\1.md\2)", markdown)
    return _MERMAID.sub(lambda found: diagram(found[1]), markdown)


def clauses(markdown: str) -> str:
    """Adds an anchor before each clause, and sets its reason apart from what it demands."""
    anchor = r'- <a id="{0}" href="#{0}" class="clause">{1}</a> '
    text = _CLAUSE.sub(lambda found: anchor.format(found[1].lower(), found[1]), markdown)
    return _WHY.sub(r'<br><span class="why">\1.</span> ', text)


def diagram(source: str) -> str:
    """Draws a sequence diagram as SVG: participants, messages, notes and loops."""
    names: dict[str, str] = {}
    drawn: list[str] = []
    loops: list[int] = []
    y = 78
    for line in (line.strip() for line in source.splitlines()):
        if line.startswith("participant "):
            key, _, shown = line.removeprefix("participant ").partition(" as ")
            names[key] = shown or key
        elif line.startswith("loop "):
            y += 22
            loops.append(y)
            drawn.append(_text(_MARGIN + 4, y + 14, line.removeprefix("loop "), "start", "italic"))
            y += 22
        elif line == "end":
            top, width = loops.pop(), _MARGIN * 2 + _COLUMN * (len(names) - 1) + _COLUMN - 68
            drawn.append(f'<rect x="{_MARGIN / 2}" y="{top}" width="{width}" height="{y - top + 8}"'
                         ' fill="none" stroke="currentColor" stroke-dasharray="4 3"/>')  # fmt: skip
            y += 16
        elif note := _NOTE.match(line):
            over = [_x(names, key.strip()) for key in note[1].split(",")]
            drawn.append(_text(sum(over) / len(over), y + 12, note[2], "middle", "italic"))
            y += _ROW - 6
        elif step := _STEP.match(line):
            y += _ROW
            drawn += _arrow(_x(names, step[1]), _x(names, step[3]), y, step[4], "--" in step[2])
    heads = []
    for key, shown in names.items():
        x, lines = _x(names, key), re.split(r"<br/?>| over (?=rl)", shown)
        heads.append(f'<line x1="{x}" y1="56" x2="{x}" y2="{y + 16}" stroke="currentColor"'
                     f' opacity=".35"/><rect x="{x - 100}" y="14" width="200" height="42" rx="6"'
                     ' class="actor"/>')  # fmt: skip
        heads.append(_text(x, 40, " / ".join(lines), "middle", "bold"))
    width = _MARGIN * 2 + _COLUMN * len(names) - 20
    return (
        f'<div class="diagram"><svg viewBox="0 0 {width} {y + 28}" style="max-width:{width}px"'
        f' role="img">{"".join(heads + drawn)}</svg></div>'
    )


def _x(names: dict[str, str], key: str) -> int:
    return _MARGIN + 100 + _COLUMN * list(names).index(key)


def _arrow(start: int, end: int, y: int, text: str, dashed: bool) -> list[str]:
    tip = 8 if start < end else -8
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    head = f"{end},{y} {end - tip},{y - 4} {end - tip},{y + 4}"
    span = f'<line x1="{start}" y1="{y}" x2="{end}" y2="{y}" stroke="currentColor"{dash}/>'
    label = _text((start + end) / 2, y - 6, text, "middle")
    return [span, f'<polygon points="{head}" fill="currentColor"/>', label]


def _text(x: float, y: float, text: str, anchor: str, style: str = "") -> str:
    how = {"italic": ' font-style="italic"', "bold": ' font-weight="600"'}.get(style, "")
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{how}>{escape(text)}</text>'
