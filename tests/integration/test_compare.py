"""The arithmetic of ``benchmarks/compare.py``, which runs of it rest on."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def compare():
    path = Path(__file__).parents[2] / "benchmarks" / "compare.py"
    spec = importlib.util.spec_from_file_location("compare", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sides_take_turns_so_that_neither_is_always_first(compare):
    assert list(compare.in_turns(3)) == [0, 1, 1, 0, 0, 1]


def test_the_least_seconds_are_compared_and_what_one_side_lacks_is_left_out(compare):
    found = compare.ratios(
        {"a": [2.0, 4.0, 9.0], "old": [1.0]}, {"a": [5.0, 3.0, 6.0], "new": [1.0]}
    )
    assert found == {"a": {"before_s": 2.0, "now_s": 3.0, "ratio": 1.5, "median_ratio": 1.25}}


def test_a_section_that_fails_is_said_and_the_others_are_compared(compare, monkeypatch):
    def sample(_python, sources, section, _quick, _threads):
        if section == "refits":
            raise RuntimeError("no memory")
        return {"step": [2.0 if sources == Path("now") else 1.0]}

    monkeypatch.setattr(compare, "sample", sample)
    sides = [(Path("python"), Path("before")), (Path("python"), Path("now"))]
    found = compare.compare(sides, ["refits", "quickstart"], 2, False, 1)
    assert found["refits"] == {"failed": "no memory"}
    assert found["quickstart"]["step"]["ratio"] == 2.0
