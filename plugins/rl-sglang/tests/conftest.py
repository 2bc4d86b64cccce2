"""Tiny checkpoints and engines, and a double of a server with clients of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from engines.kinds import KINDS, Kind, imported, skip_without_engine, start

from rl_core import create_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fake_sglang_server import FakeSglangServer

    from rl_sglang import SglangServerGeneration

__all__ = ["imported", "start"]


@pytest.fixture(scope="session")
def kind() -> Kind:
    """The engine."""
    return KINDS["sglang"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    skip_without_engine(item, KINDS["sglang"])


@pytest.fixture
def fake(tiny: Callable[..., Path]) -> Iterator[FakeSglangServer]:
    pytest.importorskip("aiohttp")
    from fake_sglang_server import FakeSglangServer

    server = FakeSglangServer(tiny()).start()
    yield server
    server.stop()


@pytest.fixture
def connect(fake: FakeSglangServer) -> Iterator[Callable[..., SglangServerGeneration]]:
    made: list[SglangServerGeneration] = []

    def connected(**config: Any) -> SglangServerGeneration:
        base = {"backend": "sglang-server", "model_name": str(fake.model), "url": fake.url}
        generation = create_generation(base | {"connect_timeout_s": 5.0} | config)
        made.append(generation)
        generation.prepare_for_generation()
        return generation

    yield connected
    for one in made:
        one.shutdown()
