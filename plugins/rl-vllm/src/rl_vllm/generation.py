"""The vLLM generation backend: this process's side of an engine in a process of its own."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rl_backends import TAGS
from rl_core.errors import CapabilityError
from rl_hosting import EngineBackend
from rl_vllm.config import VllmConfig
from rl_vllm.engine_args import check_engine_args, check_temperature
from rl_vllm.environment import PRELOAD, SOCKETS, engine_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["VllmGeneration"]


class VllmGeneration(EngineBackend):
    """Generates with vLLM, in a process of its own; see :class:`rl_hosting.EngineBackend`."""

    backend_name = "vllm"
    config_type = VllmConfig
    engine_class = "rl_vllm.engine:VllmEngine"
    engine_title = "vLLM"
    preload = PRELOAD
    sockets = SOCKETS
    workers_key = "tensor_parallel_size"

    def check_engine_config(
        self, config: Mapping[str, Any], engine: Mapping[str, Any], device: str
    ) -> None:
        """See :meth:`EngineBackend.check_engine_config`."""
        check_engine_args(engine, device)
        check_temperature(config)

    def engine_environment(
        self, engine: Mapping[str, Any], device: str, workers: int
    ) -> dict[str, str]:
        """See :meth:`EngineBackend.engine_environment`."""
        return engine_environment(device, workers=workers, verbose=engine.get("verbose", False))

    def worker_count(self, engine: Mapping[str, Any]) -> int:
        """See :meth:`EngineBackend.worker_count`."""
        return math.prod(engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))

    def tags_that_sleep_with(self, tags: frozenset[str]) -> frozenset[str]:
        """See :meth:`GenerationBackend.tags_that_sleep_with`.

        Raises:
            CapabilityError: Only the cache is to sleep; vLLM gives back everything or nothing.
        """
        if not self._sleeps:
            return tags
        if "weights" not in tags:
            raise CapabilityError(
                "vLLM cannot put its cache to sleep without its weights",
                fix='call finish_generation with the tag "weights", too, or without tags',
                capability="sleep",
            )
        return TAGS
