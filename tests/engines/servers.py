"""Real servers of the engines on a CPU, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil
import pytest

from rl_core import create_generation

if TYPE_CHECKING:
    from engines.kinds import Kind

__all__ = ["KEY", "RealServer", "connected"]

KEY = "sk-of-the-test"
START_S = 400.0
_HERE = Path(__file__).parent


class _Start(NamedTuple):
    """How an engine's server is started, without its model, address and key."""

    command: tuple[str, ...]
    model: str  # the argument that names the model
    arguments: str
    environment: dict[str, str]


_STARTS = {
    "sglang": _Start(
        (str(_HERE / "launch_sglang_server.py"),),
        "--model-path",
        "--device cpu --attention-backend torch_native --sampling-backend pytorch "
        "--disable-cuda-graph --skip-server-warmup --grammar-backend none --dtype float32 "
        "--max-total-tokens 8192 --max-running-requests 32 --sleep-on-idle --log-level warning",
        {"SGLANG_USE_CPU_ENGINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    ),
    "vllm": _Start(
        ("-m", "vllm.entrypoints.openai.api_server"),
        "--model",
        "--dtype float32 --enforce-eager --kv-cache-memory-bytes 67108864 --max-num-seqs 32 "
        "--no-enable-chunked-prefill --enable-scale-out --logprobs-mode processed_logprobs "
        '--weight-transfer-config {"backend":"rl_core"} --uvicorn-log-level warning',
        {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_PLUGINS": "rl_core",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        },
    ),
}


class RealServer:
    """An engine's server of one model, always at the same port.

    Args:
        kind: The engine.
        model: Directory of the checkpoint.
        log: Where it writes.
        *more: Further arguments.
        **environment: Further variables.
    """

    def __init__(self, kind: Kind, model: Path, log: Path, *more: str, **environment: str) -> None:
        self.kind, self.model, self._log, self._more = kind, model, log, more
        self._how = _STARTS[kind.name]
        self._environment = (
            dict(os.environ)
            | {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "LOADS": str(log.parent)}
            | {"PYTHONDONTWRITEBYTECODE": "", "RL_SERVER_FAULTS": "1"}
            | self._how.environment
            | environment
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> RealServer:
        command = [sys.executable, *self._how.command, self._how.model, str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--api-key", KEY]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._how.arguments.split(), *self._more],
                env=self._environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        end = time.monotonic() + START_S
        while time.monotonic() < end and self._process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return self
            except OSError:
                time.sleep(0.5)
        self.kill()
        pytest.fail(f"the server did not start:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> None:
        """Ends it as its user would, so that nothing is left; or kills it."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        self.kill()

    def kill(self) -> None:
        """Kills it and its processes, but for those that remove what is left in shared memory."""
        if not psutil.pid_exists(self._process.pid):
            return
        processes = [psutil.Process(self._process.pid)]
        processes += processes[0].children(recursive=True)
        removing = [one for one in processes if "resource_tracker" in " ".join(one.cmdline())]
        for one in set(processes) - set(removing):
            one.kill()
        self._process.wait(30)
        psutil.wait_procs(removing, timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)


def connected(server: RealServer, **config: Any) -> Any:
    """A client of a server, awake."""
    base = {"backend": f"{server.kind.name}-server", "model_name": str(server.model)}
    base |= {"url": server.url, "api_key": KEY, "connect_timeout_s": 60.0}
    made = create_generation(base | config)
    made.prepare_for_generation()
    return made
