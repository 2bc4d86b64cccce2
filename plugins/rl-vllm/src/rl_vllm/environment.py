"""The variables that the engine's own processes get, and nobody else.

What you export yourself wins, so that each can be tried the other way.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PRELOAD", "SOCKETS", "VARIABLES", "engine_environment"]

#: Tells vLLM where its sockets go, which it leaves behind.
SOCKETS = "VLLM_RPC_BASE_PATH"
#: What takes long to import; on the CPU engines are forked from a process that has done so.
PRELOAD = ("rl_vllm.preloaded",)


#: By device: the variable, its value, and why.
VARIABLES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "any": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": (
            "0",
            "the engine runs in our process, which ends with its parent; vLLM's own would not",
        ),
        "VLLM_WORKER_MULTIPROC_METHOD": ("spawn", "nothing of the engine's process is forked"),
        "VLLM_LOGGING_LEVEL": ("WARNING", "quiet unless verbose is set"),
        "VLLM_NO_USAGE_STATS": ("1", "nothing is sent anywhere"),
        "VLLM_PLUGINS": ("", "only what the configuration names takes part"),
        "TOKENIZERS_PARALLELISM": ("false", "no threads that a fork would break"),
    },
    "cpu": {
        "TORCHDYNAMO_DISABLE": ("1", "compiling takes 15 s of the first call, and a C++ compiler"),
        "VLLM_CPU_OMP_THREADS_BIND": ("nobind", "several engines share a host"),
        "OMP_NUM_THREADS": ("", "the cores of this process, shared by the engine's workers"),
    },
    "cuda": {},
}


def engine_environment(device: str, *, workers: int = 1, verbose: bool = False) -> dict[str, str]:
    """The environment of an engine's process: this one's, with what vLLM needs.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        workers: Processes that will share the cores.
        verbose: Leave vLLM's logging as it is.
    """
    wanted = {**VARIABLES["any"], **VARIABLES[device]}
    if verbose:
        wanted.pop("VLLM_LOGGING_LEVEL")
    given = {name: value for name, (value, _) in wanted.items()}
    if "OMP_NUM_THREADS" in given:
        given["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return given | dict(os.environ)
