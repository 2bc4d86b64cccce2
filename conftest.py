"""What holds for all tests of the workspace."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that are marked ``full`` run only where ``-m`` speaks of them."""
    if "full" in config.getoption("markexpr"):
        return
    left = [item for item in items if item.get_closest_marker("full") is not None]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
