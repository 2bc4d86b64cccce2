"""What an engine on the CPU needs imported and set up, as the fork server does it: once for all."""

from __future__ import annotations

from rl_vllm import engine, worker  # isort: skip - before vLLM: what they leave out
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.worker import cpu_worker

__all__ = ["cpu_worker", "engine", "worker"]

if hasattr(EngineArgs, "create_logging_config"):  # not in the oldest vLLM
    from vllm.logger import configure_logging_if_needed

    configure_logging_if_needed(EngineArgs(model="").create_logging_config())

if hasattr(current_platform, "register_triton_kernel_overrides"):
    # It looks through every module, which takes as long as all else that a small engine does.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)
