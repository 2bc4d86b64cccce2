"""Turns the Sphinx roles of docstrings into what MkDocs shows: links, code and formulas.

Griffe loads this extension, as ``mkdocs.yml`` asks. The sources keep Sphinx's spelling, which editors
know; without this the site would print it as it stands.
"""

from __future__ import annotations

import re
from html import escape
from typing import Any

from griffe import Extension, GriffeLoader, Module, Object

__all__ = ["Roles", "formula"]

_ROLE = re.compile(r":(class|func|meth|mod|attr|data|exc|obj):`(~?)([\w.]+)`")
_TITLED = re.compile(r":(\w+):`[^`<]+\s<([\w.]+)>`")
_MATH = re.compile(r"(?:(?<=\n)[ \t]*\.\. math::((?:[^\n]+\n?)+)|:math:`([^`]+)`)")
_LITERAL = re.compile(r"(?m)^([^\n]*?)::[ \t]*$")
_SYMBOLS = {
    "alpha": "α", "beta": "β", "epsilon": "ε", "lambda": "λ", "pi": "π", "rho": "ρ",
    "sigma": "σ", "sum": "Σ", "in": "∈", "log": "log ", "exp": "exp", "min": "min",
    "big": "", "bigl": "", "bigr": "", "left": "", "right": "", "cdot": "·",
}  # fmt: skip


class Roles(Extension):
    """Rewrites the docstrings of a package once all of its modules are loaded."""

    def on_package(self, *, pkg: Module, loader: GriffeLoader, **kwargs: Any) -> None:
        """Called by Griffe with each package that a page names."""
        del kwargs
        seen: set[str] = set()
        _rewrite(pkg, loader, seen)


def _rewrite(owner: Object, loader: GriffeLoader, seen: set[str]) -> None:
    if owner.path in seen:
        return
    seen.add(owner.path)
    if owner.docstring is not None:
        text = _MATH.sub(lambda found: formula(found[1] or found[2]), owner.docstring.value)
        text = _TITLED.sub(r":\1:`~\2`", text)
        text = _ROLE.sub(lambda found: _link(found, owner, loader), text)
        owner.docstring.value = _LITERAL.sub(
            lambda found: f"{found[1]}:" if found[1].strip() else "", text
        )
    for member in owner.members.values():
        if not member.is_alias:
            _rewrite(member, loader, seen)


def _link(found: re.Match[str], owner: Object, loader: GriffeLoader) -> str:
    """A link to the documentation of a name, or the name where the site has none."""
    kind, short, name = found.groups()
    shown = name.rpartition(".")[2] if short else name
    try:
        path = owner.resolve(name)
    except Exception:  # names of other packages, and of members that are made at run time
        path = name
    try:
        path = loader.modules_collection[path].canonical_path
    except Exception:  # not loaded: another package's, for which the site may still have a page
        path = path or name
    call = "()" if kind in {"func", "meth"} else ""
    code = f"<code>{escape(shown)}{call}</code>"
    return f'<autoref identifier="{path}" optional>{code}</autoref>'


def formula(tex: str) -> str:
    """The few commands of TeX that docstrings use, as HTML."""
    text = escape(" ".join(tex.split()))
    text = re.sub(r"\\frac\{1\}\{([^{}]*)\}", r"1/\1 ", text)
    text = re.sub(r"\\frac\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}",
                  r"(\1 / \2)", text)  # fmt: skip
    text = re.sub(r"\\mathrm\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\([a-zA-Z]+)", lambda found: _SYMBOLS.get(found[1], found[1]), text)
    text = text.replace("\\,", " ").replace("\\;", " ").replace("|", "&#124;")
    for mark, tag in (("_", "sub"), ("\\^", "sup")):
        text = re.sub(mark + r"\{([^{}]*(?:\{[^{}]*\}[^{}]*)*)\}", rf"<{tag}>\1</{tag}>", text)
        text = re.sub(mark + r"(\w)", rf"<{tag}>\1</{tag}>", text)
    return f"<i>{text.strip()}</i>"
