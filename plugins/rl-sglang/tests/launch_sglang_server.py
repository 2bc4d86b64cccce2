"""SGLang's own HTTP server on a CPU, with what its modules import and no CPU has.

Its processes are forked, not spawned: spawned ones would import it all again.
"""

from __future__ import annotations

import sys

from rl_sglang import launch  # stands in, before SGLang is imported

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    launch.sglang_engine.mp = launch.Forking()
    run_server(prepare_server_args(sys.argv[1:]))
