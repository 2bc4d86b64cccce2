"""The engines that have an environment each: what tests of all of them must know of one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rl_hosting._fork_client import ForkServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_hosting import EngineBackend

__all__ = ["KINDS", "Kind", "imported", "skip_without_engine", "start"]


@dataclass(frozen=True)
class Kind:
    """One engine.

    Attributes:
        name: Of its package and of its backend.
        small: Its section of a configuration, so that several engines fit side by side.
    """

    name: str
    small: dict[str, Any]

    def module(self, name: str) -> Any:
        """A module of the plugin."""
        return importlib.import_module(f"rl_{self.name}.{name}")

    @property
    def backend(self) -> type[EngineBackend]:
        """The class of the plugin."""
        found: type[EngineBackend] = getattr(
            self.module("generation"), f"{self.name.title()}Generation"
        )
        return found

    @property
    def section(self) -> str:
        """The key of a configuration for what is the engine's alone."""
        return f"{self.name}_cfg"

    def build(
        self, config: dict[str, Any], engine: dict[str, Any] | None = None, cluster: Any = None
    ) -> Any:
        """The backend, with an engine that is small unless ``engine`` makes it larger."""
        return self.backend(cluster, config | {self.section: self.small | (engine or {})})


KINDS = {
    kind.name: kind
    for kind in (
        Kind("vllm", {"max_num_seqs": 16, "kv_cache_memory_bytes": 64 << 20}),
        Kind("sglang", {"max_running_requests": 16, "max_total_tokens": 4096}),
    )
}


def skip_without_engine(item: pytest.Item, kind: Kind) -> None:
    """Skips a test that starts an engine where that is not installed."""
    if item.get_closest_marker("engine") and importlib.util.find_spec(kind.name) is None:
        pytest.skip(f"{kind.backend.engine_title} is not installed here")


@pytest.fixture(scope="session")
def imported(kind: Kind) -> Iterator[Callable[..., int]]:
    """``imported(workers=1)`` is the process that has the engine imported for engines of so many.

    It is kept from test to test. Engines find what these tests run beside their weights
    (``engines.held``).
    """
    parts = kind.module("environment")
    with pytest.MonkeyPatch.context() as patch, ExitStack() as ending:
        tests = str(Path(__file__).parent.parent)
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if tests not in given:  # tests of a plugin have it set, too
            patch.setenv("PYTHONPATH", tests, prepend=os.pathsep)

        @cache
        def obtain(workers: int = 1) -> int:
            environment = parts.engine_environment("cpu", workers=workers)
            log, preload = subprocess.DEVNULL, parts.PRELOAD
            server = ForkServer.obtain(environment, log, sys.executable, preload)
            ending.callback(server.release)
            return server.pid

        obtain()
        yield obtain


@pytest.fixture
def start(
    kind: Kind, imported: Callable[..., int], tiny: Callable[..., Path]
) -> Iterator[Callable[..., Any]]:
    """``start(family, engine, **config)`` is an engine that is awake; all end with the test."""
    started = []

    def make(family: str = "qwen2", engine: dict[str, Any] | None = None, **config: Any) -> Any:
        given = {"model_name": str(tiny(family)), "max_new_tokens": 12, **config}
        imported((engine or {}).get(kind.backend.workers_key, 1))
        started.append(kind.build(given, engine))
        started[-1].prepare_for_generation()
        return started[-1]

    yield make
    for backend in started:
        backend.shutdown()
