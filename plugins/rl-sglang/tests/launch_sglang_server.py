"""SGLang's own HTTP server on a CPU, with what its modules import and no CPU has.

Its processes are forked, not spawned: spawned ones would import it all again. Seeds work, too, with
``--enable-deterministic-inference``: SGLang wants kernels of a GPU for it, and torch's
will do here.
"""

from __future__ import annotations

import sys

from rl_sglang import launch  # stands in, before SGLang is imported

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import DETERMINISTIC_ATTENTION_BACKEND_CHOICES, prepare_server_args

    launch.sglang_engine.mp = launch.Forking()
    DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    ModelRunner.maybe_enable_batch_invariant_mode = lambda self: None
    run_server(prepare_server_args(sys.argv[1:]))
