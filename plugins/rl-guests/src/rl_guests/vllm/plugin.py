"""What vLLM calls in every process of an engine: its entry point ``vllm.general_plugins``."""

from __future__ import annotations

import functools
import logging
import sys
from importlib import import_module
from typing import Any

__all__ = ["BACKEND", "register"]

#: The backend's name in vLLM's registries.
BACKEND = "rl_core"


_registered: list[str] = []


def register() -> None:
    """Adds the backend to vLLM; does nothing else to engines that use another one.

    vLLM may call it several times. A vLLM that has not what is joined here stays as it is, with a
    warning in its log.
    """
    if _registered:
        return
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from rl_guests.vllm.engine_core import guard_engine_core

        loader: Any = import_module("vllm.model_executor.model_loader.base_loader")
        initialize = loader.initialize_model
        guard_engine_core(BACKEND)
    except (ImportError, AttributeError) as error:
        logging.getLogger(__name__).warning(
            "rl-guests: this vLLM has no weight-transfer API that can be joined (%s)", error
        )
        return
    _registered.append(BACKEND)
    worker = "rl_guests.vllm.worker"
    WeightTransferEngineFactory.register_engine(BACKEND, worker, "RefitTransferEngine")

    @functools.wraps(initialize)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        given = vllm_config.weight_transfer_config
        ours = given is not None and given.backend == BACKEND
        if ours and "rl_vllm.worker" not in sys.modules:
            import_module("rl_vllm.worker")  # from here on, it watches how models are loaded
            return loader.initialize_model(vllm_config, *args, **kwargs)
        return initialize(vllm_config, *args, **kwargs)

    loader.initialize_model = initialize_model
