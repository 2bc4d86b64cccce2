"""A stock SGLang server on the CPU, and refits by its own HTTP route: a program.

``python -m sglang_refits MODEL DIRECTORY TP`` prints, as JSON, what each scenario came to. What the
server needs without a GPU is in a ``sitecustomize`` of DIRECTORY: it is started as anywhere else.
"""

from __future__ import annotations

import base64
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rl_core import create_policy, refit
from rl_core.errors import LifecycleError
from rl_core.weights.engine_lock import EngineLock
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import BucketReady
from rl_hosting._remote_receiver import RemoteReceiver

START_S, DEADLINE_S, TOKENS = 400.0, 30.0, 16
PROMPTS = [list(range(5, 45)), [5, 6, 7], [90, 3]]
ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
    "--skip-server-warmup --grammar-backend none --dtype float32 --max-total-tokens 8192 "
    "--max-running-requests 32 --sleep-on-idle --skip-tokenizer-init --log-level warning"
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "",
}
STAND_IN = "from rl_sglang.cpu import stand_in\nstand_in()\n"


class Server:
    """SGLang's, with the methods of a hosted process that a driver of refits calls."""

    def __init__(self, model: str, directory: Path, tp: int) -> None:
        self.name, self.tp = "the server", tp
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = directory / "log"
        (directory / "sitecustomize.py").write_text(STAND_IN)
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = dict(os.environ) | ENVIRONMENT | {"PYTHONPATH": path}
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--port", str(port), "--tp-size", str(tp), *ARGUMENTS.split()]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        end = time.monotonic() + START_S
        while self.process.poll() is None and time.monotonic() < end:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.5)
        self.end()
        sys.exit(f"the server did not start:\n{self.log.read_text()[-6000:]}")

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(30)

    def post(self, route: str, body: Any, timeout_s: float = 60.0) -> Any:
        request = urllib.request.Request(
            f"{self.url}{route}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                text = answer.read().decode()
        except urllib.error.HTTPError as error:
            return {"status": error.code, "text": error.read().decode()}
        return json.loads(text) if text[:1] in "[{" else text

    def call(self, method: str, timeout_s: float, *, call: bytes) -> list[bytes]:
        del method
        body = {"server_args": {"rl_refit": 1}, "rid": base64.b64encode(call).decode()}
        [found] = self.post("/set_internal_state", body, timeout_s + DEADLINE_S)
        return [base64.b64decode(one) for one in found["rl_refit"]]

    def logs_in_errors(self) -> AbstractContextManager[None]:
        return nullcontext()

    def with_log(self, error: Any) -> Any:
        return error

    def generate(self, prompt: list[int], tokens: int = TOKENS) -> Any:
        how = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": how, "return_logprob": True}
        return self.post("/generate", body)


class Engine:
    """What ``refit`` takes for an engine."""

    def __init__(self, server: Server) -> None:
        self.receiver_count = server.tp
        self.remote = RemoteReceiver(
            server,  # type: ignore[arg-type]
            count=server.tp,
            answer_s=DEADLINE_S,
            lock=EngineLock(),
            busy=lambda: True,
            on_commit=lambda _: None,
            wake=lambda: None,
        )

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        self.remote.prepare(info)

    def receive_weights(self, **how: Any) -> list[Any]:
        return [self.remote.receive(**how)]

    def cancel_refit(self, number: int) -> None:
        self.remote.cancel(number)


def change(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=0.03)


def ids_of(answer: Any) -> list[int]:
    return [one[1] for one in answer["meta_info"]["output_token_logprobs"]]


def difference(server: Server, model: Any) -> float:
    """How far log-probs of greedy rows are from those of transformers; 1e9 if tokens differ."""
    found = 0.0
    for prompt in PROMPTS:
        answer = server.generate(prompt)
        ids = ids_of(answer)
        with torch.no_grad():
            logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1]
        if logits.argmax(-1).tolist() != ids:
            return 1e9
        wanted = logits.float().log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        logprobs = torch.tensor([one[0] for one in answer["meta_info"]["output_token_logprobs"]])
        found = max(found, (wanted - logprobs).abs().max().item())
    return found


def policy_of(model: str) -> Any:
    return create_policy({"backend": "hf", "model_name": model})


def trainer_that_is_killed(model: str, server: Any, tp: int) -> None:
    """A refit in a process of its own, which ends when a part of the weights was written."""
    policy = policy_of(model)
    change(policy.model, 5)
    there = Server.__new__(Server)
    there.name, there.url, there.tp = "the server", server, tp
    encode, sent = Channel.encode, []

    def killing(channel: Channel, message: object) -> bytes:
        sent.append(isinstance(message, BucketReady))
        if sum(sent) == 8:
            time.sleep(0.5)  # those before are written
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(channel, message)

    with mock.patch.object(Channel, "encode", killing):
        refit(policy, Engine(there), deadline_s=DEADLINE_S, bucket_bytes=1 << 15)


def scenarios(server: Server, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    policy, engine = policy_of(path), Engine(server)
    before = [ids_of(server.generate(prompt)) for prompt in PROMPTS]
    found["other_bodies"] = [
        server.post("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}}),
        server.post("/set_internal_state", {"server_args": {"unknown": 8}}),
        server.post("/set_internal_state", {"server_args": {"rl_refit": 1}}),
        server.post("/set_internal_state", {"server_args": {"rl_refit": 1}, "rid": "no frame"}),
    ]

    running: list[Any] = []  # a request that begins before a refit, and ends after it
    thread = threading.Thread(target=lambda: running.append(server.generate(PROMPTS[1], 200)))
    thread.start()
    time.sleep(0.5)
    change(policy.model, 1)
    began = time.monotonic()
    report = refit(policy, engine, deadline_s=DEADLINE_S, bucket_bytes=1 << 16)
    took = time.monotonic() - began
    thread.join(60)
    ids, meta = ids_of(running[0]), running[0]["meta_info"]
    with torch.no_grad():
        logits = policy.model(torch.tensor([PROMPTS[1] + ids])).logits[0, 2:-1]
    logprobs = [one[0] for one in meta["output_token_logprobs"]]
    found["a_running_request"] = {
        "tokens": len(ids),
        "end": meta["finish_reason"]["type"],
        "under_new_weights": sum(
            abs(row.float().log_softmax(-1)[token].item() - logprob) < 5e-5
            for row, token, logprob in zip(logits, ids, logprobs, strict=True)
        ),
    }
    found["refit"] = {
        "report": str(report),
        "seconds": took,
        "changed": [ids_of(server.generate(prompt)) for prompt in PROMPTS] != before,
        "difference": difference(server, policy.model),
    }

    differences = []
    for seed, options in enumerate([{"mode": "packed"}, {"delta": True}, {"verify": "none"}], 2):
        change(policy.model, seed)
        refit(policy, engine, deadline_s=DEADLINE_S, **options)
        differences.append(difference(server, policy.model))
    found["more_refits"] = differences

    server.post("/pause_generation", {"mode": "in_place"})
    change(policy.model, 9)
    refit(policy, engine, deadline_s=DEADLINE_S)
    waits: list[Any] = []
    thread = threading.Thread(target=lambda: waits.append(difference(server, policy.model)))
    thread.start()
    thread.join(2)
    paused = thread.is_alive()
    server.post("/continue_generation", {})
    thread.join(60)
    found["a_pause_of_the_user"] = {"paused": paused, "difference": waits[0]}

    server.post("/release_memory_occupation", {"tags": ["weights"]})
    error = ""
    try:
        refit(policy, engine, deadline_s=DEADLINE_S)
    except LifecycleError as caught:
        error = str(caught)
    server.post("/resume_memory_occupation", {"tags": ["weights"]})
    refit(policy, engine, deadline_s=DEADLINE_S)
    found["released_memory"] = {"error": error, "difference": difference(server, policy.model)}

    frame = b"\x94\xa7request\xa4call\x82\xa8function\xa2os\xa9arguments\x80\x00"
    found["code_of_a_client"] = server.call("", 5, call=frame)[0].decode(errors="replace")

    context = multiprocessing.get_context("spawn")
    killed = context.Process(target=trainer_that_is_killed, args=(path, server.url, server.tp))
    rows: list[Any] = []
    over = threading.Event()

    def generate_on() -> None:
        while not over.is_set():
            rows.append(server.generate(PROMPTS[1], 200))

    thread = threading.Thread(target=generate_on)
    killed.start()
    thread.start()
    killed.join(120)
    end = time.monotonic() + DEADLINE_S
    while "status" not in (refused := server.generate(PROMPTS[0])) and time.monotonic() < end:
        time.sleep(0.1)
    over.set()
    thread.join(120)
    healthy = server.post("/set_internal_state", {"server_args": {"pp_max_micro_batch_size": 8}})
    change(policy.model, 10)
    later = Engine(server)
    refit(policy, later, deadline_s=DEADLINE_S)
    found["a_killed_trainer"] = {
        "exit": killed.exitcode,
        "refused": refused,
        "other_bodies": healthy,
        "running": [row for row in rows if "status" in row],
        "difference": difference(server, policy.model),
    }
    policy.shutdown()
    return found


def main() -> None:
    model, directory, tp = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    server = Server(model, directory, tp)
    try:
        found = scenarios(server, model)
        found["log"] = server.log.read_text()[-4000:]
    except BaseException:
        print(server.log.read_text()[-6000:], file=sys.stderr)
        raise
    finally:
        server.end()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
