"""What a wheel lacks of that which a plugin imports is found by reading it."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from newest_apis import ENGINES, ROOT, Engine, differences

PLUGIN = """
import engine.here
from engine.here import function, late, reexported, gone
from engine import sub

def inside():
    from engine.lazy import anything
    from engine.missing import thing
"""
WHEEL = {
    "engine/__init__.py": "",
    "engine/sub.py": "",
    "engine/here.py": "from x import y as reexported\nlate = 1\nif 1:\n    def function(): pass\n",
    "engine/lazy.py": "def __getattr__(name): return name\n",
}


@pytest.fixture
def wheel(tmp_path: Path) -> zipfile.ZipFile:
    with zipfile.ZipFile(tmp_path / "engine.whl", "w") as written:
        for name, text in WHEEL.items():
            written.writestr(name, text)
    return zipfile.ZipFile(tmp_path / "engine.whl")


def test_names_and_modules_that_are_not_there_are_found(
    tmp_path: Path, wheel: zipfile.ZipFile
) -> None:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    with wheel:
        assert differences(Engine("engine", "engine"), tmp_path, wheel) == [
            "plugin.py: engine.here has no gone",
            "plugin.py: there is no module engine.missing",
        ]


def test_arguments_that_no_table_has_are_found(tmp_path: Path) -> None:
    plugin = ROOT / "plugins/rl-vllm/src/rl_vllm"
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as written:
        text = "class EngineArgs:\n    model: str\n    of_tomorrow: int = 0\n"
        written.writestr("vllm/engine/arg_utils.py", text)
    with zipfile.ZipFile(tmp_path / "vllm.whl") as opened:
        found = differences(ENGINES["vllm"], plugin, opened)
    assert [one for one in found if "argument" in one] == ["a new argument: of_tomorrow"]
