"""SGLang's own HTTP server on a CPU, with what its modules import and no CPU has.

Its processes are forked, not spawned: spawned ones would import it all again. Seeds work, too, with
``--enable-deterministic-inference``: SGLang wants kernels of a GPU for it, and torch's
will do here. The files that tell loads are in the directory LOADS, which goes with the test: SGLang
leaves them in /dev/shm when it is killed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rl_sglang import launch  # stands in, before SGLang is imported

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.managers import load_snapshot
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import DETERMINISTIC_ATTENTION_BACKEND_CHOICES, prepare_server_args

    load_snapshot.shm_path_for = lambda name: str(Path(os.environ["LOADS"], Path(name).name))
    launch.sglang_engine.mp = launch.Forking()
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    run_server(prepare_server_args(sys.argv[1:]))
