"""Real servers that are already running: their rows, their refits, and what faults leave."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from engines.calls import in_background, prompts
from engines.servers import KEY, RealServer, connected

from rl_backends import Completion, ModelFacts, SamplingParams
from rl_backends.generation.rows import Row
from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy, refit
from rl_core.batch import BatchedDataDict
from rl_core.errors import PluginError, RLError, WeightsTornError, WorkerDiedError
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import BucketReady
from rl_hosting.server.row_stream import RowStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engines.kinds import Kind

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("running_servers"),  # one server for all of them
    pytest.mark.skipif(importlib.util.find_spec("aiohttp") is None, reason="aiohttp is missing"),
    pytest.mark.filterwarnings("ignore::rl_core.errors.LoopWarning"),  # of several trainers
]

ROWS = [[5, 6, 7, 8], [9], list(range(20, 60)), [100, 3, 7]]
CLOSE, DEADLINE_S = 1e-3, 30.0


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.full)], ids=["tp1", "tp2"]
)
def server(
    kind: Kind, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    home = tmp_path_factory.mktemp("server")
    more = {} if request.param == 1 else {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    made = RealServer(
        kind,
        make_tiny_model(home / "qwen2", "qwen2"),
        home / "log",
        f"--{kind.backend.workers_key.replace('_', '-')}",
        str(request.param),
        **more,
    )
    yield made.start()
    made.stop()


@pytest.fixture
def pair(server: RealServer) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """``pair(**config)``: the server, and transformers, with the same weights and configuration."""
    made: list[Any] = []
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})

    def make(**config: Any) -> tuple[Any, Any]:
        reference = create_generation({"backend": "hf", "model_name": str(server.model)} | config)
        reference.prepare_for_generation()
        made.append(reference)
        made.append(connected(server, **config))
        refit(policy, made[-1])  # an earlier test may have brought others
        return made[-1], reference

    yield make
    for one in (*made, policy):
        one.shutdown()


def assert_agree(one: Any, other: Any) -> None:
    for key in ("output_ids", "generation_lengths", "truncated"):
        assert torch.equal(one[key], other[key]), key
    assert (one["logprobs"] - other["logprobs"]).abs().max() < CLOSE


def change(policy: Any, amount: float, seed: int = 0) -> None:
    with torch.no_grad():
        for number, tensor in enumerate(policy.model.parameters()):
            generator = torch.Generator().manual_seed(number + 1000 * seed)
            tensor.add_(torch.randn(tensor.shape, generator=generator), alpha=amount)


@pytest.mark.full
def test_rows_end_as_those_of_transformers(pair: Any) -> None:
    ours, theirs = pair(max_new_tokens=24)
    plain = ours.generate(prompts(*ROWS), greedy=True)
    assert_agree(plain, theirs.generate(prompts(*ROWS), greedy=True))
    ids = plain["output_ids"][0].tolist()
    tokenizer = ours._server.checkpoint.tokenizer
    strings = [[tokenizer.decode(ids[12:14])], None, None, ["never there"]]
    batch = prompts(*ROWS, stop_strings=strings)
    one = ours.generate(batch, greedy=True)
    assert not one["truncated"][0]
    assert_agree(one, theirs.generate(batch, greedy=True))
    ours, theirs = pair(max_new_tokens=24, stop_token_ids=[ids[10]])
    one = ours.generate(prompts(*ROWS), greedy=True)
    assert one["output_ids"][0, : one["unpadded_sequence_lengths"][0]].tolist() == ids[:11]
    assert_agree(one, theirs.generate(prompts(*ROWS), greedy=True))


@pytest.mark.full
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_logprobs_are_those_of_the_policy(pair: Any, temperature: float) -> None:
    ours, theirs = pair(max_new_tokens=24, temperature=temperature)
    policy = create_policy(
        {"backend": "hf", "model_name": theirs.config["model_name"], "temperature": temperature}
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
    assert (output["logprobs"] - scored)[generated].abs().max() < CLOSE
    assert not torch.equal(output["output_ids"][:4], output["output_ids"][4:])
    policy.shutdown()


def test_refits_reach_the_server_and_a_later_client_waits_for_its_own(
    pair: Any, server: RealServer
) -> None:
    ours, theirs = pair(max_new_tokens=24)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    before = ours.generate(prompts(*ROWS), greedy=True)
    for options in (
        {},
        {"mode": "packed", "verify": "none"},
        {"delta": True},
        {"verify": "installed"},
        {"isolation": "staged"},
    ):
        change(policy, 0.03)
        report = refit(policy, ours, **options)
        refit(policy, theirs)
        after = ours.generate(prompts(*ROWS), greedy=True)
        assert_agree(after, theirs.generate(prompts(*ROWS), greedy=True))
        assert not torch.equal(after["output_ids"], before["output_ids"])
        assert after["weights_version"].tolist() == [report.version] * 4
        before = after
    later = connected(server, max_new_tokens=2)
    with pytest.raises(WeightsTornError):
        later.generate(prompts([5]))
    refit(policy, later)
    later.generate(prompts([5]))
    with pytest.raises(WeightsTornError):
        ours.generate(prompts([5]))
    for one in (later, policy):
        one.shutdown()


def test_nan_is_an_error_until_the_next_refit(pair: Any, server: RealServer) -> None:
    ours, theirs = pair(max_new_tokens=16)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    weight = policy.model.model.layers[0].mlp.down_proj.weight.data
    kept = weight.clone()
    weight[3, 5] = torch.nan  # so that keys and values of the next layer are NaN
    refit(policy, ours)
    with pytest.raises(PluginError, match="not finite, with weights of version 1"):
        ours.generate(prompts(*ROWS), greedy=True)
    weight.copy_(kept)
    refit(policy, ours, verify="installed")
    after = ours.generate(prompts(*ROWS), greedy=True)
    assert_agree(after, theirs.generate(prompts(*ROWS), greedy=True))
    policy.shutdown()


def request_of_another(
    client: Any, prompt: list[int], tokens: int, began: threading.Event | None = None
) -> Completion:
    """A greedy row beside the client's own, of any weights; ``began`` is for its first token."""
    sampling = SamplingParams.from_config({"do_sample": False}, ModelFacts(0, (), 272, 256))
    stream = RowStream(Row(0, 0, 0, prompt, tokens, 0, False, (), sampling), client._server)

    async def collect() -> Completion | None:
        body = stream.request(f"other-{time.monotonic_ns()}")
        async for event in client._client.events(client._server.generate_path, body):
            done, _ = stream.take(event)
            if began is not None:
                began.set()
        return done

    done: Completion = client._client.run(collect(), 120, "a row")
    return done


def killed_trainer(kind: str, url: str, model: str) -> None:
    """A refit in a process of its own, which is killed when a part of the weights was written."""
    policy = create_policy({"backend": "hf", "model_name": model})
    change(policy, 0.05, seed=5)
    engine = create_generation(
        {"backend": f"{kind}-server", "url": url, "api_key": KEY, "model_name": model}
    )
    encode, sent = Channel.encode, []

    def killing(channel: Channel, message: object) -> bytes:
        sent.append(isinstance(message, BucketReady))
        if sum(sent) == 8:
            time.sleep(0.5)  # those before are written
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(channel, message)

    with mock.patch.object(Channel, "encode", killing):
        refit(policy, engine, mode="packed", deadline_s=DEADLINE_S, bucket_bytes=1 << 15)


@pytest.mark.full
def test_a_killed_trainer_leaves_a_server_that_refuses_until_the_next_refit(
    pair: Any, server: RealServer
) -> None:
    ours, theirs = pair(max_new_tokens=24)
    context = multiprocessing.get_context("spawn")
    killed = context.Process(
        target=killed_trainer, args=(server.kind.name, server.url, str(server.model))
    )
    killed.start()
    killed.join(200)
    assert killed.exitcode == -signal.SIGKILL
    end = time.monotonic() + DEADLINE_S + 10
    error: RLError | None = None
    while error is None and time.monotonic() < end:
        try:
            request_of_another(ours, [5, 6, 7], 4)
        except RLError as caught:
            error = caught
    assert error is not None
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    refit(policy, ours)
    assert_agree(
        ours.generate(prompts(*ROWS), greedy=True), theirs.generate(prompts(*ROWS), greedy=True)
    )
    request_of_another(ours, [5, 6, 7], 4)
    policy.shutdown()


@pytest.mark.full
def test_the_suite_runs_against_the_server(server: RealServer) -> None:
    command = [str(Path(sys.executable).with_name("rl")), "conformance", "run"]
    command += [f"{server.kind.name}-server", "--url", server.url, "--model", str(server.model)]
    chosen = "R11 or (R1 and one_changed) or (R8 and torn) or G15 or (G18 and freed)"
    environment = dict(os.environ) | {"RL_SERVER_API_KEY": KEY}
    done = subprocess.run(
        [*command, "-k", chosen], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode in (0, 3), done.stdout[-4000:]
    assert "torn_weights_are_never_served" in done.stdout


@pytest.mark.full
def test_long_rows_across_a_refit_and_a_kill(kind: Kind, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "qwen2", "qwen2", num_layers=1, max_position_embeddings=2048)
    server = RealServer(kind, model, tmp_path / "log").start()
    try:
        ours, other = connected(server, max_new_tokens=20), connected(server)
        policy = create_policy({"backend": "hf", "model_name": str(model)})

        def begun(tokens: int) -> Callable[[], Any]:
            began = threading.Event()
            row = in_background(lambda: request_of_another(other, [5, 6, 7], tokens, began))
            assert began.wait(60)
            return row

        row = begun(1500)
        change(policy, 0.03)
        refit(policy, ours)
        done = row()
        ids, logprobs = list(done.token_ids), torch.tensor(done.logprobs)
        with torch.no_grad():
            logits = policy.model(torch.tensor([[5, 6, 7, *ids]])).logits[0, 2:-1].float()
        wanted = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        under_new = (wanted - logprobs).abs() < CLOSE
        assert len(ids) == 1500
        assert not under_new[:2].all()
        assert under_new[-100:].all()

        row = begun(1500)
        server.kill()
        error = row()
        assert isinstance(error, WorkerDiedError)
        assert server.url in str(error)
        server.start()
        with pytest.raises(WeightsTornError, match="was restarted"):
            ours.generate(prompts([5, 6]))
        refit(policy, ours)
        assert ours.generate(prompts([5, 6]))["weights_version"].tolist() == [2]
        for one in (ours, other, policy):
            one.shutdown()
    finally:
        server.stop()
