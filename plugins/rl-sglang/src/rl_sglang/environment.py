"""The variables that the engine's own processes get, and nobody else.

What you export yourself wins, so that each can be tried the other way.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["PRELOAD", "SOCKETS", "VARIABLES", "engine_environment"]

#: Tells Python's tempfile, by which SGLang names its sockets, where these go; it leaves them there.
SOCKETS = "TMPDIR"
#: What takes long to import; on the CPU engines are forked from a process that has done so.
PRELOAD = ("rl_sglang.preloaded",)

#: By device: the variable, its value, and why.
VARIABLES: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "any": {
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": (
            "1",
            "SGLang keeps tokens of the context to itself; rows never use more than the model has",
        ),
        "SGLANG_PLUGINS": ("none", "only what the configuration names takes part"),
        "TOKENIZERS_PARALLELISM": ("false", "no threads that a fork would break"),
    },
    "cpu": {
        "SGLANG_USE_CPU_ENGINE": ("1", "SGLang looks for no GPU"),
        "TORCHDYNAMO_DISABLE": ("1", "compiling takes 15 s of the first call, and a C++ compiler"),
        "OMP_NUM_THREADS": ("", "the cores of this process, shared by the engine's schedulers"),
        "SGLANG_CPU_OMP_THREADS_BIND": (
            "",
            "the same cores; SGLang wants it for several schedulers",
        ),
    },
    "cuda": {},
}


def engine_environment(device: str, *, workers: int = 1) -> dict[str, str]:
    """The environment of an engine's process: this one's, with what SGLang needs.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        workers: Processes that will share the cores.
    """
    given = {name: value for name, (value, _) in {**VARIABLES["any"], **VARIABLES[device]}.items()}
    if device == "cpu":
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::workers] or cores for rank in range(workers)]
        given["OMP_NUM_THREADS"] = str(max(1, len(cores) // workers))
        given["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(
            ",".join(map(str, share)) for share in shares
        )
        if workers == 1:
            del given["SGLANG_CPU_OMP_THREADS_BIND"]
    return given | dict(os.environ)
