"""A real SGLang server on the CPU, in processes of its own, against transformers."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from sglang_server_calls import in_background, prompts, until

from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy, refit
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, ConfigError, WeightsTornError, WorkerDiedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None or importlib.util.find_spec("aiohttp") is None,
        reason="SGLang or aiohttp is not installed here",
    ),
]

KEY = "sk-of-the-test"
START_S = 400.0
ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph "
    "--skip-server-warmup --grammar-backend none --dtype float32 --max-total-tokens 8192 "
    "--max-running-requests 32 --sleep-on-idle --log-level warning"
)
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}


class RealServer:
    """SGLang's server of one model, always at the same port."""

    def __init__(self, model: Path, log: Path, *more: str, **environment: str) -> None:
        self.model, self._log, self._more = model, log, more
        self._environment = (
            dict(os.environ) | ENVIRONMENT | {"LOADS": str(log.parent)} | environment
        )
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> RealServer:
        launcher = Path(__file__).with_name("launch_sglang_server.py")
        command = [sys.executable, str(launcher), "--model-path", str(self.model)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--api-key", KEY]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *ARGUMENTS.split(), *self._more],
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

    def running(self) -> int:
        """How many rows it decodes at this moment."""
        request = urllib.request.Request(
            f"{self.url}/v1/loads?include=core", headers={"Authorization": f"Bearer {KEY}"}
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            return sum(one["num_running_reqs"] for one in json.load(answer)["loads"])

    def kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    home = tmp_path_factory.mktemp("server")
    made = RealServer(make_tiny_model(home / "qwen2", "qwen2"), home / "log").start()
    yield made
    made.kill()


def connected(server: RealServer, **config: Any) -> Any:
    base = {"backend": "sglang-server", "model_name": str(server.model), "url": server.url}
    made = create_generation(base | {"api_key": KEY, "connect_timeout_s": 60.0} | config)
    made.prepare_for_generation()
    return made


@pytest.fixture
def pair(server: RealServer) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """``pair(**config)``: the server, and transformers, with the same configuration."""
    made: list[Any] = []

    def make(**config: Any) -> tuple[Any, Any]:
        reference = create_generation({"backend": "hf", "model_name": str(server.model)} | config)
        reference.prepare_for_generation()
        made.append(reference)
        made.append(connected(server, **config))
        return made[-1], reference

    yield make
    for one in made:
        one.shutdown()


def assert_agree(one: Any, other: Any) -> None:
    for key in ("output_ids", "generation_lengths", "truncated"):
        assert torch.equal(one[key], other[key]), key
    assert (one["logprobs"] - other["logprobs"]).abs().max() < 1e-3


ROWS = [[5, 6, 7, 8], [9], list(range(20, 60)), [100, 3, 7]]


def test_greedy_rows_are_those_of_transformers(pair: Any) -> None:
    ours, theirs = pair(max_new_tokens=24)
    assert_agree(ours.generate(prompts(*ROWS), greedy=True), theirs.generate(prompts(*ROWS), True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_the_policy(server: RealServer, temperature: float) -> None:
    ours = connected(server, max_new_tokens=24, temperature=temperature)
    policy = create_policy(
        {"backend": "hf", "model_name": str(server.model), "temperature": temperature}
    )
    output = ours.generate(prompts(*ROWS, *ROWS))
    scored = policy.get_logprobs(
        BatchedDataDict(
            {
                "input_ids": output["output_ids"],
                "input_lengths": output["unpadded_sequence_lengths"],
            }
        )
    )["logprobs"]
    generated = output["logprobs"] != 0
    assert (output["logprobs"] - scored)[generated].abs().max() < 1e-3
    assert not torch.equal(output["output_ids"][:4], output["output_ids"][4:])
    ours.shutdown()
    policy.shutdown()


def test_rows_end_as_those_of_transformers(pair: Any, server: RealServer) -> None:
    plain, _ = pair(max_new_tokens=24)
    ids = plain.generate(prompts([5, 6, 7, 8]), greedy=True)["output_ids"][0].tolist()
    for config in ({"stop_token_ids": [ids[10]]}, {"eos_token_id": ids[10]}):
        ours, theirs = pair(max_new_tokens=24, **config)
        one = ours.generate(prompts(*ROWS), greedy=True)
        assert one["output_ids"][0, : one["unpadded_sequence_lengths"][0]].tolist() == ids[:11]
        assert_agree(one, theirs.generate(prompts(*ROWS), greedy=True))
    ours, theirs = pair(max_new_tokens=24)
    tokenizer = ours._server.checkpoint.tokenizer
    strings = [[tokenizer.decode(ids[12:14])], None, None, ["never there"]]
    batch = prompts(*ROWS, stop_strings=strings)
    one = ours.generate(batch, greedy=True)
    assert not one["truncated"][0]
    assert_agree(one, theirs.generate(batch, greedy=True))
    ours._rows.drain(20)


def test_context_is_kept(server: RealServer) -> None:
    ours = connected(server, max_new_tokens=1000)
    longest = ours.facts.max_model_len
    assert longest == 254
    rows = [[7] * count for count in (1, 200, 249, 250, 253)]
    output = ours.generate(prompts(*rows), greedy=True)
    assert output["unpadded_sequence_lengths"].max() <= longest
    assert output["generation_lengths"][3:].tolist() == [0, 0]
    assert output["generation_lengths"][2] > 0
    assert output["truncated"][1:].all()
    ours.shutdown()


def test_many_rows_of_many_calls(server: RealServer) -> None:
    ours = connected(server, max_new_tokens=6, max_requests=48)
    alone = ours.generate(prompts(*([n] for n in range(10, 74))), greedy=True)
    found: dict[int, Any] = {}

    def call(number: int) -> None:
        rows = [[n] for n in range(10 + 16 * number, 26 + 16 * number)]
        found[number] = ours.generate(prompts(*rows), greedy=True)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    together = torch.cat([found[number]["output_ids"] for number in range(4)])
    assert torch.equal(together, alone["output_ids"])
    ours.shutdown()


def test_rows_that_nobody_waits_for_are_let_go(server: RealServer) -> None:
    ours = connected(server, max_new_tokens=240)

    async def one() -> None:
        rows = ours.generate_async(prompts(*([n] for n in range(10, 26))), greedy=True)
        reader = asyncio.ensure_future(anext(rows))
        await asyncio.sleep(0.5)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        await rows.aclose()

    asyncio.run(one())
    began = time.monotonic()
    ours.generate(prompts([5]), greedy=True)  # waits for room, were they still there
    ours._rows.drain(20)
    assert ours.invalidate_kv_cache()
    print(f"let go within {time.monotonic() - began:.2f} s")
    ours.shutdown()


def test_what_the_server_cannot_do_is_refused(server: RealServer) -> None:
    with pytest.raises(CapabilityError, match="deterministic"):
        connected(server, seed=1)
    with pytest.raises(CapabilityError, match="logprobs_mode"):
        connected(server, temperature=0.5, logprobs_mode="raw")
    with pytest.raises(ConfigError, match="api_key is not valid"):
        connected(server, api_key="sk-wrong")


def changed(policy: Any, amount: float) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(policy.model.parameters()):
            generator = torch.Generator().manual_seed(number)
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=amount)


@pytest.mark.filterwarnings("ignore:.* had version:rl_core.errors.LoopWarning")
def test_refits_reach_the_server(pair: Any, server: RealServer) -> None:
    ours, theirs = pair(max_new_tokens=24)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    before = ours.generate(prompts(*ROWS), greedy=True)
    for options in ({}, {"mode": "packed"}, {"delta": True}, {"verify": "installed"}):
        changed(policy, 0.03)
        print(refit(policy, ours, **options))
        refit(policy, theirs)
        after = ours.generate(prompts(*ROWS), greedy=True)
        assert_agree(after, theirs.generate(prompts(*ROWS), greedy=True))
        assert not torch.equal(after["output_ids"], before["output_ids"])
        before = after
    assert ours.weights_version == 7  # every second one went to the reference
    policy.shutdown()


@pytest.mark.filterwarnings("ignore:.* had version:rl_core.errors.LoopWarning")
def test_later_client_waits_for_a_refit_of_its_own(server: RealServer) -> None:
    first, policy = connected(server, max_new_tokens=2), None
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    refit(policy, first)
    first.shutdown()
    second = connected(server, max_new_tokens=2)
    with pytest.raises(WeightsTornError):
        second.generate(prompts([5]))
    refit(policy, second)
    second.generate(prompts([5]))
    second.shutdown()
    policy.shutdown()


def test_server_with_seeds_and_raw_logprobs_that_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    model = make_tiny_model(tmp_path / "qwen2", "qwen2", num_layers=1, max_position_embeddings=2048)
    arguments = "--enable-deterministic-inference"
    server = RealServer(model, tmp_path / "log", arguments, SGLANG_RETURN_ORIGINAL_LOGPROB="1")
    server.start()
    try:

        def drawn(seed: int) -> torch.Tensor:
            engine = connected(server, max_new_tokens=20, seed=seed)
            found: torch.Tensor = engine.generate(prompts(*ROWS))["output_ids"]
            engine.shutdown()
            return found

        first, second, third = drawn(3), drawn(3), drawn(4)
        assert torch.equal(first, second)
        assert not torch.equal(first, third)
        with pytest.raises(CapabilityError, match="SGLANG_RETURN_ORIGINAL_LOGPROB"):
            connected(server, temperature=0.5)
        ours, other = (
            connected(server, max_new_tokens=count, temperature=0.5, logprobs_mode="raw")
            for count in (20, 1900)
        )
        policy = create_policy({"backend": "hf", "model_name": str(model), "temperature": 0.5})
        call = in_background(lambda: other.generate(prompts([10], [11], [12], [13])))
        until(lambda: server.running() > 0, 60)  # a row may end at its first token
        server.kill()
        error = call()
        assert isinstance(error, WorkerDiedError)
        assert server.url in str(error)
        other.shutdown()

        server.start()
        ours.generate(prompts([5, 6]))  # the weights that it starts with are those counted on
        refit(policy, ours)
        ours.generate(prompts([5, 6]))
        server.kill()
        server.start()
        with pytest.raises(WeightsTornError, match="was restarted"):
            ours.generate(prompts([5, 6]))
        refit(policy, ours)
        assert ours.generate(prompts([5, 6]))["weights_version"].tolist() == [2]
        ours.shutdown()
        policy.shutdown()
    finally:
        server.kill()
