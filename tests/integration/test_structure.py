"""What the figures of the structure are, on a package that breaks every rule of it once."""

from __future__ import annotations

from pathlib import Path

import pytest
import structure

CUT = '''__all__ = ["shown"]


def shown():
    """Says it."""
    return _once() + _twice() + _twice()


def _once():
    return 1


def _twice():
    return 2
'''
FILES = {
    "__init__.py": '"""A package."""\n',
    "first.py": "import crooked.second\n",
    "second.py": "# Why it is so.\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n"
    "    from crooked.first import anything\n",
    "long.py": "x = 1\n" * (structure.FILE_LINES + 1),
    "cut.py": CUT,
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "plugins" / "rl-crooked" / "src" / "crooked"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    project = '[project]\nname = "crooked"\n'
    (tmp_path / "plugins" / "rl-crooked" / "pyproject.toml").write_text(project)
    (tmp_path / "mine").mkdir()  # a user's own, which is not looked at
    (tmp_path / "mine" / "pyproject.toml").write_text(project)
    monkeypatch.syspath_prepend(folder.parent)
    monkeypatch.setattr(structure, "ROOT", tmp_path)
    return folder


def test_lines_are_counted_by_what_is_on_them(package: Path) -> None:
    m = structure.measure(package)
    where = "plugins/rl-crooked/src/crooked"
    assert (m.folder, m.files, m.lines) == (where, 5, 1 + 1 + 5 + 701 + 14)
    assert (m.imports, m.docstrings, m.comments) == (4, 2, 1)
    assert m.code == 701 + 1 + 6


def test_a_private_function_with_one_caller_is_named(package: Path) -> None:
    m = structure.measure(package)
    assert (m.functions, m.single) == (3, ["_once"])


@pytest.mark.parametrize(("callers", "single"), [(1, ["_helper"]), (2, [])])
def test_callers_are_looked_for_in_the_whole_distribution(
    package: Path, callers: int, single: list[str]
) -> None:
    (package / "inner").mkdir()
    (package / "inner" / "part.py").write_text("def _helper():\n    return 1\n")
    (package / "user.py").write_text("_helper()\n" * callers)
    assert structure.measure(package / "inner", package).single == single


def test_a_circle_through_an_import_for_type_checkers_is_one(package: Path) -> None:
    assert structure.circles("crooked") == [["crooked.first", "crooked.second"]]


def test_a_circle_and_a_long_file_fail(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert structure.main() == 1
    out = capsys.readouterr().out
    assert "crooked: long.py has 701 lines, 700 at most" in out
    assert "in circles of imports: crooked.first, crooked.second" in out


def test_figures_above_their_bars_fail(
    package: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "second.py").write_text("")
    (package / "long.py").write_text("")
    monkeypatch.setitem(structure.BARS, "plugins/rl-crooked/src/crooked", 10)
    assert structure.main() == 1
    out = capsys.readouterr().out
    assert "plugins/rl-crooked/src/crooked: 16 lines, 10 at most" in out
    assert "crooked: 33.3% of the functions are private and called once, 6.0% at most" in out


def test_what_keeps_the_rules_does_not_fail(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (package / "second.py").write_text("")
    (package / "long.py").write_text("x = 1\n" * structure.FILE_LINES)
    (package / "cut.py").write_text("")
    assert structure.main() == 0
    assert "crooked" in capsys.readouterr().out
