"""Every public name of rl_core is there, and type checkers see the same names."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import rl_core
from rl_core import errors


def type_checked_names() -> set[str]:
    """What type checkers see: the imports below ``if TYPE_CHECKING``."""
    tree = ast.parse(Path(rl_core.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = (node for node in block.body if isinstance(node, ast.ImportFrom))
    return {alias.name for node in imports for alias in node.names} | set(errors.__all__)


@pytest.mark.parametrize("name", rl_core.__all__)
def test_name_can_be_imported(name: str) -> None:
    assert getattr(rl_core, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    assert type_checked_names() == set(rl_core.__all__) - {"__version__"}


def test_dir_lists_names_that_are_not_imported_yet() -> None:
    assert set(rl_core.__all__) <= set(dir(rl_core))


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'rl_core' has no attribute 'nothing'"):
        _ = rl_core.nothing
