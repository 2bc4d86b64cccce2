"""The documentation lists what authors derive from, by names that exist."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = [path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md"))]
LISTED = re.findall(r"(?m)^::: (\S+)$", "\n".join(PAGES))


@pytest.mark.parametrize("name", LISTED)
def test_what_is_listed_is_there(name: str) -> None:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        module, _, member = name.rpartition(".")
        assert getattr(importlib.import_module(module), member) is not None
