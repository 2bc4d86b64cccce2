"""What vLLM calls in every process of an engine: its entry point ``vllm.general_plugins``."""

from __future__ import annotations

import functools
import logging
from importlib import import_module
from typing import Any

__all__ = ["BACKEND", "register"]

#: The backend's name in vLLM's registries.
BACKEND = "rl_core"


def register() -> None:
    """Adds the backend to vLLM; does nothing else to engines that use another one.

    A vLLM whose registries are not there stays as it is, with a warning in its log.
    """
    try:
        from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

        from rl_guests.vllm.engine_core import guard_engine_core
    except ImportError as error:
        logging.getLogger(__name__).warning(
            "rl-guests: this vLLM has no weight-transfer API that can be joined (%s)", error
        )
        return
    worker = "rl_guests.vllm.worker"
    WeightTransferEngineFactory.register_engine(BACKEND, worker, "RefitTransferEngine")
    guard_engine_core(BACKEND)

    loader: Any = import_module("vllm.model_executor.model_loader.base_loader")
    initialize = loader.initialize_model

    @functools.wraps(initialize)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        given = vllm_config.weight_transfer_config
        if given is not None and given.backend == BACKEND:
            loader.initialize_model = initialize
            import_module("rl_vllm.worker")  # from here on, it watches how models are loaded
            return loader.initialize_model(vllm_config, *args, **kwargs)
        return initialize(vllm_config, *args, **kwargs)

    loader.initialize_model = initialize_model
