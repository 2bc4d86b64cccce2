"""A tiny checkpoint, a double of a server of it, and clients of that."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from rl_conformance.models import make_tiny_model
from rl_core import create_generation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fake_sglang_server import FakeSglangServer

    from rl_sglang import SglangServerGeneration


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def make(family: str = "qwen2", **overrides: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides)

    return make


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
        base = {"backend": "sglang-server", "model_name": str(fake.model), "server_url": fake.url}
        generation = create_generation(base | {"connect_timeout_s": 5.0} | config)
        made.append(generation)
        generation.prepare_for_generation()
        return generation

    yield connected
    for one in made:
        one.shutdown()
