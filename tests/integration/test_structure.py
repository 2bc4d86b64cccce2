"""The figures of the structure, on a package that breaks every rule of it once."""

from __future__ import annotations

from pathlib import Path

import pytest
import structure

CUT = '''__all__ = ["shown"]


def shown():
    """Says it."""
    return _once() + _twice() + _twice()


def _once():
    return f"{_twice()!r:>{10}} and more"


def _twice():
    return 2
'''
FILES = {
    "__init__.py": '"""A package."""\n',
    "first.py": "import crooked.second\n",
    "second.py": "# Why it is so.\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    "    from crooked.first import anything\n",
    "cut.py": CUT,
}
#: An f-string is one token on every version of Python.
TOKENS = 4 + (4 + 3 + 6) + (5 + (5 + 12) + (5 + 2) + (5 + 2))


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugins" / "rl-crooked" / "src" / "crooked"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    monkeypatch.setitem(structure.TOKENS, "crooked", TOKENS)
    return folder


def test_code_is_counted_without_comments_and_docstrings(package: Path) -> None:
    measured = structure.measure(package)
    assert (measured.files, measured.tokens) == (4, TOKENS)
    assert (measured.statements, measured.functions, measured.single) == (11, 3, ["_once"])


def test_a_circle_through_an_import_for_type_checkers_counts(package: Path) -> None:
    assert structure.circles("crooked") == [["crooked.first", "crooked.second"]]


def test_figures_above_their_bars_fail(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(structure.TOKENS, "crooked", TOKENS - 1)
    monkeypatch.setattr(structure, "TEST_TOKENS", 2)
    (package.parents[1] / "tests").mkdir()
    (package.parents[1] / "tests" / "test_it.py").write_text("x = 1\n")
    assert structure.main() == 1
    out = capsys.readouterr().out
    assert "in circles of imports: crooked.first, crooked.second" in out
    assert f"crooked: {TOKENS} tokens, {TOKENS - 1} at most" in out
    assert "33.3% of the functions are private and called once, 6.0% at most: _once" in out
    assert "tests and suite: 3 tokens, 2 at most" in out


def test_a_package_without_a_bar_fails(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(structure.TOKENS, "crooked")
    assert structure.main() == 1
    assert "crooked: has no bar in TOKENS" in capsys.readouterr().out


def test_a_package_that_keeps_the_rules_does_not_fail(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "second.py").write_text("")
    (package / "cut.py").write_text("")
    assert structure.main() == 0
    assert "crooked" in capsys.readouterr().out
