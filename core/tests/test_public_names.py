"""Every public name of rl_core is there, and type checkers see the same names."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rl_core


def type_checked_names() -> set[str]:
    """What is imported when it is first used: the imports below ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(rl_core.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names}


@pytest.mark.parametrize("name", rl_core.__all__)
def test_name_can_be_imported(name: str) -> None:
    assert getattr(rl_core, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    code = "import json, rl_core; print(json.dumps(list(vars(rl_core))))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    at_once, late = set(json.loads(run.stdout)), type_checked_names()
    assert not at_once & late
    assert set(rl_core.__all__) <= at_once | late | {"__version__"}


def test_dir_lists_names_that_are_not_imported_yet() -> None:
    assert set(rl_core.__all__) <= set(dir(rl_core))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rl_core' has no attribute 'nothing'"):
        _ = rl_core.nothing
