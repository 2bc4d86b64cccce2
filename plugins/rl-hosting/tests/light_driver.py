"""A driver for the tests to kill: ``light_driver.py MOMENT ACT [python]``. It imports no torch.

Prints the process ids of the engine and its server once it is at the moment, then waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from rl_backends import Row, SamplingParams
from rl_hosting._process import HostedProcess

ENDLESS = 904


def row(key: int, tokens: list[int]) -> Row:
    return Row(key, 0, 0, tokens, 4, 0, False, (), SamplingParams(greedy=True))


def main() -> None:
    assert "torch" not in sys.modules  # nor has the fork server, which imports the same
    # They are ignored where the tests run in the background of a shell, or under nohup.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    moment, act = sys.argv[1:3]
    acts = {moment: act} if act else {}
    engine = HostedProcess(
        "the fake engine",
        "fake_engine:FakeEngine",
        {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )
    config = {"fake": {"acts": acts, "pause": 0.01}}
    if moment == "handshake":
        engine._process.wait_for_fork(30)
    elif moment == "start":
        threading.Thread(target=lambda: engine.start(config, 300), daemon=True).start()
    else:
        engine.start(config, 30)
    if moment in ("submit", "step", "decoding"):
        engine.submit([row(key, [ENDLESS]) for key in range(3)])
    if moment in ("sleep", "reset_caches", "call_workers"):
        name = {"call_workers": "refit"}.get(moment, moment)
        arguments = {"sleep": {"tags": [], "level": 1}, "call_workers": {"call": b""}}
        engine.tell(name, **arguments.get(moment, {}))
    if moment == "large":
        engine.submit([row(key, [7] * 100_000) for key in range(50)])
    if moment == "forked" and not os.fork():
        time.sleep(600)
    if moment == "child":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], close_fds=False)
    if moment == "shutdown":
        threading.Thread(target=engine.close, daemon=True).start()
    while not engine.pid:
        time.sleep(0.01)
    time.sleep(0.3)
    print(json.dumps([engine.pid, engine._process._server.pid, engine._owned[3]]), flush=True)
    if moment == "exit":
        return
    if moment == "raises":
        raise SystemExit(3)
    time.sleep(600)


main()
