"""Engines that take one refit together, and a fault of one: for the suite's checks."""

from __future__ import annotations

import concurrent.futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from rl_core.weights.spellings import TakesWeights

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_core.testing import Engine

__all__ = ["Engines", "broken_tensor"]


class Engines(TakesWeights):
    """Several engines, of any kind, that take one refit together."""

    def __init__(self, *engines: Any) -> None:
        self.engines = engines
        self.receiver_count = len(engines)

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.prepare_refit_info(info)

    def receive_weights(self, **options: Any) -> list[Any]:
        return [f for engine in self.engines for f in engine.receive_weights(**options)]

    def cancel_refit(self, number: int) -> None:
        for engine in self.engines:
            engine.cancel_refit(number)

    def init_collective(self, *group: Any, **options: Any) -> list[Any]:
        return [f for e in self.engines for f in e.init_collective(*group, **options)]

    def update_weights_from_collective(self, *info: Any, **options: Any) -> list[Any]:
        # Their own method, which a test may be about.
        return [f for e in self.engines for f in e.update_weights_from_collective(*info, **options)]


@contextmanager
def broken_tensor(engine: Engine, name: str) -> Generator[None]:
    """Fault: once the manifest is agreed, one tensor can no longer hold what comes."""
    receive = engine.receive_weights
    whole, pending = engine.tensors, []

    def broken(**options: Any) -> list[Any]:
        engine.tensors = whole | {name: whole[name][:2, :2].clone()}
        pending.extend(receive(**options))
        return pending

    with mock.patch.object(engine, "receive_weights", broken):
        try:
            yield
        finally:
            concurrent.futures.wait(pending, timeout=60)
            engine.tensors = whole
