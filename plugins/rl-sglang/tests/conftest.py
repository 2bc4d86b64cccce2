"""Tiny checkpoints and engines, and a double of a server with clients of it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from rl_conformance.models import make_tiny_model
from rl_core import create_generation
from rl_hosting._fork_client import ForkServer
from rl_sglang.environment import PRELOAD, engine_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from fake_sglang_server import FakeSglangServer

    from rl_sglang import SglangServerGeneration
    from rl_sglang.generation import SglangGeneration


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if importlib.util.find_spec("sglang") is None:
        for item in items:
            if item.get_closest_marker("engine"):
                item.add_marker(pytest.mark.skip(reason="SGLang is not installed here"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family="qwen2", **overrides)`` is the directory of such a model."""

    @cache
    def make(family: str = "qwen2", **overrides: Any) -> Path:
        return make_tiny_model(tmp_path_factory.mktemp("models") / family, family, **overrides)

    return make


@pytest.fixture(scope="session")
def imported() -> Iterator[int]:
    """The process that has SGLang imported, kept from test to test."""
    environment = engine_environment("cpu")
    server = ForkServer.obtain(environment, subprocess.DEVNULL, sys.executable, PRELOAD)
    yield server._process.pid
    server.release()


@pytest.fixture
def start(imported: int, tiny: Callable[..., Path]) -> Iterator[Callable[..., SglangGeneration]]:
    """``start(family, sglang_cfg, **config)`` is an engine that is awake; all end with the test."""
    from rl_sglang import SglangGeneration

    started = []

    def make(
        family: str = "qwen2", sglang_cfg: dict[str, Any] | None = None, **config: Any
    ) -> SglangGeneration:
        engine = {"max_running_requests": 16, "max_total_tokens": 4096, **(sglang_cfg or {})}
        given = {"model_name": str(tiny(family)), "max_new_tokens": 12, **config}
        backend = SglangGeneration(None, {**given, "sglang_cfg": engine})
        started.append(backend)
        backend.prepare_for_generation()
        return backend

    yield make
    for backend in started:
        backend.shutdown()


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
