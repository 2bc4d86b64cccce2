"""The SGLang generation backend: this process's side of an engine in processes of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_hosting import EngineBackend
from rl_sglang.config import SglangConfig
from rl_sglang.engine_args import check_engine_args, check_sampling
from rl_sglang.environment import PRELOAD, SOCKETS, engine_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SglangGeneration"]


class SglangGeneration(EngineBackend):
    """Generates with SGLang, in processes of its own; see :class:`rl_hosting.EngineBackend`.

    SGLang kills all of its processes when one of them fails; this one sees that as a
    :class:`~rl_core.errors.WorkerDiedError` with the end of their log.
    """

    backend_name = "sglang"
    config_type = SglangConfig
    engine_class = "rl_sglang.engine:SglangEngine"
    engine_title = "SGLang"
    preload = PRELOAD
    sockets = SOCKETS
    workers_key = "tp_size"

    def check_engine_config(
        self, config: Mapping[str, Any], engine: Mapping[str, Any], device: str
    ) -> None:
        """See :meth:`EngineBackend.check_engine_config`."""
        check_engine_args(engine, device)
        check_sampling(config)

    def engine_environment(
        self, engine: Mapping[str, Any], device: str, workers: int
    ) -> dict[str, str]:
        """See :meth:`EngineBackend.engine_environment`."""
        del engine
        return engine_environment(device, workers=workers)
