"""Processes that are the ranks of one policy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

from rl_core.ports import free_port


def run_ranks(script: str, size: int, *arguments: Any) -> list[dict[str, Any]]:
    """What each of ``size`` processes printed last, as JSON; of one that printed nothing, {}.

    They run the script with the arguments, and their rank, the number of ranks and a free port.
    """
    port = free_port()
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                textwrap.dedent(script),
                *map(str, (*arguments, rank, size, port)),
            ],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        outputs = [worker.communicate(timeout=280)[0] for worker in started]
    finally:
        for worker in started:
            worker.kill()
            worker.communicate()
    return [json.loads(output.splitlines()[-1]) if output else {} for output in outputs]
