"""Real servers that are already running: their rows, their refits, and what faults leave."""

from __future__ import annotations

import asyncio
import importlib.util
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from engines.calls import in_background, prompts, until
from engines.servers import KEY, RealServer, connected

from rl_backends import ModelFacts, SamplingParams
from rl_backends.generation.rows import Row
from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy, refit
from rl_core.batch import BatchedDataDict
from rl_core.errors import PluginError, WeightsTornError, WorkerDiedError
from rl_core.weights.protocol.frames import Channel
from rl_core.weights.protocol.messages import BucketReady, Done
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
LONG = pytest.mark.full, pytest.mark.timeout(2400)


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


def weights_of(policy: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


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


def stream_of(client: Any, prompt: list[int], tokens: int) -> RowStream:
    """A greedy row of any weights, beside the client's own, which looks at every token."""
    sampling = SamplingParams.from_config({"do_sample": False}, ModelFacts(0, (), 272, 256))
    row = Row(0, 0, 0, prompt, tokens, 0, False, ("never there",), sampling)
    return RowStream(row, client._server)


class Others:
    """Rows of other clients, eight at a time, without a pause; one in four is longer.

    Attributes:
        rows: How many have ended.
        parts: Of each event: the prompt, the tokens so far, their log-probs and labels.
    """

    def __init__(self, client: Any) -> None:
        self.parts: list[tuple[list[int], list[int], list[float], set[str]]] = []
        self.rows, self._ended, self._client = 0, False, client
        self._running = [
            asyncio.run_coroutine_threadsafe(
                self._generate(random.Random(seed)), client._client.loop
            )
            for seed in range(8)
        ]

    async def _generate(self, chosen: random.Random) -> None:
        while not self._ended:
            prompt = [chosen.randrange(5, 250) for _ in range(3)]
            stream = stream_of(self._client, prompt, chosen.choice([1, 2, 3, 40]))
            body = stream.request(f"other-{self.rows}-{prompt}")
            async for event in self._client._client.events(stream._server.generate_path, body):
                _, labels = stream.take(event)
                if stream._ids:
                    self.parts.append((prompt, [*stream._ids], [*stream._logprobs], labels))
            self.rows += 1

    def end(self) -> None:
        self._ended = True
        for one in self._running:
            one.result(60)

    def check(self, model: Any, weights: dict[str, dict[str, torch.Tensor]]) -> None:
        """Each token is of the weights of a label that came with it, and of none beside them."""
        counts = torch.tensor([len(ids) for _, ids, _, _ in self.parts])[:, None]
        place = torch.arange(int(counts.max()))
        rows = [(prompt + ids + [0] * 40)[: 3 + len(place)] for prompt, ids, _, _ in self.parts]
        given = [(logprobs + [0.0] * 40)[: len(place)] for *_, logprobs, _ in self.parts]
        ids, logprobs = torch.tensor(rows), torch.tensor(given)
        right = place >= counts
        for label, tensors in weights.items():
            named = torch.tensor([label in labels for *_, labels in self.parts])
            some = named | (torch.arange(len(rows)) % 20 == 0)
            named = named[some]
            model.load_state_dict(tensors)
            with torch.no_grad():
                logits = torch.cat([model(few).logits[:, 2:-1] for few in ids[some].split(256)])
            wanted = logits.float().log_softmax(-1).gather(-1, ids[some, 3:, None])[..., 0]
            far = torch.where(place < counts[some], (wanted - logprobs[some]).abs(), 0.0)
            right[some] |= named[:, None] & (far < CLOSE)
            # It can tell versions: of rows of one token, one in a thousand is close by chance.
            assert (far[~named].amax(-1) > 0.1).float().mean() > 0.9
        assert right.all(), f"{int((~right).any(-1).sum())} of {len(rows)}"
        assert {label for *_, labels in self.parts for label in labels} <= set(weights)


@pytest.mark.parametrize("refits", [10, pytest.param(200, marks=LONG)])
def test_rows_beside_refits_are_of_the_weights_of_their_label(
    pair: Any, server: RealServer, refits: int
) -> None:
    ours, _ = pair()
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    start = weights_of(policy)
    weights = {ours._server.counted_on.label: start}
    others = Others(ours)
    for seed in range(refits):
        policy.model.load_state_dict(start)
        change(policy, 0.1, seed)
        refit(policy, ours)
        weights[ours._server.counted_on.label] = weights_of(policy)
    others.end()
    others.check(policy.model, weights)
    policy.shutdown()


def killed_trainer(kind: str, url: str, model: str, message: type[Any], count: int) -> None:
    """A refit in a process of its own, which kills itself at message number ``count`` of a kind."""
    policy = create_policy({"backend": "hf", "model_name": model})
    change(policy, 0.1, seed=5)
    engine = create_generation(
        {"backend": f"{kind}-server", "url": url, "api_key": KEY, "model_name": model}
    )
    encode, decode, seen = Channel.encode, Channel.decode, []

    def killing(one: Any) -> Any:
        seen.append(isinstance(one, message))
        if sum(seen) == count:
            time.sleep(0.5 if message is BucketReady else 0)  # those before are written
            os.kill(os.getpid(), signal.SIGKILL)
        return one

    with (
        mock.patch.object(Channel, "encode", lambda self, one: encode(self, killing(one))),
        mock.patch.object(Channel, "decode", lambda self, one: killing(decode(self, one))),
    ):
        refit(policy, engine, mode="packed", deadline_s=DEADLINE_S, bucket_bytes=1 << 15)


def kill_a_trainer(server: RealServer, message: type[Any], count: int) -> None:
    context = multiprocessing.get_context("spawn")
    who = server.kind.name, server.url, str(server.model)
    killed = context.Process(target=killed_trainer, args=(*who, message, count))
    killed.start()
    killed.join(400)
    assert killed.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("rows", [200, pytest.param(10_000, marks=LONG)])
def test_rows_after_a_trainer_was_killed_by_a_commit_are_of_its_weights(
    pair: Any, server: RealServer, rows: int
) -> None:
    ours, _ = pair()
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    label = ours._server.counted_on.label
    weights = {label: weights_of(policy)}
    change(policy, 0.1, seed=5)
    others = Others(ours)
    until(lambda: others.rows > 8, 60)
    kill_a_trainer(server, Done, 1)
    before = others.rows
    until(lambda: others.rows >= before + rows, 800)
    others.end()
    [new] = {one for *_, labels in others.parts for one in labels} - {label}
    others.check(policy.model, weights | {new: weights_of(policy)})
    with pytest.raises(WeightsTornError, match=new):
        ours.generate(prompts(*ROWS))
    policy.shutdown()


def test_a_killed_trainer_leaves_a_server_that_refuses_until_the_next_refit(
    pair: Any, server: RealServer
) -> None:
    ours, theirs = pair(max_new_tokens=200)

    def generate() -> None:
        while True:
            ours.generate(prompts(*ROWS * 4), greedy=True)

    call = in_background(generate)
    kill_a_trainer(server, BucketReady, 8)
    error = call()
    assert isinstance(error, WeightsTornError), error
    assert "takes no request: the last" in str(error)
    with pytest.raises(WeightsTornError, match="takes no request: the last"):
        ours.generate(prompts(*ROWS))
    body = stream_of(ours, [5], 4).request("of a plain client")
    for streamed, status in ((False, 503), (True, 200)):
        asked = ours._client.post(ours._server.generate_path, body | {"stream": streamed}, 30)
        answer = ours._client.run(asked, 40, "a row")
        assert answer[0] == status
        assert "takes no request: the last" in str(answer)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    refit(policy, ours)
    assert_agree(
        ours.generate(prompts(*ROWS), greedy=True), theirs.generate(prompts(*ROWS), greedy=True)
    )
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
def test_a_server_that_is_killed_and_started_again(kind: Kind, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "qwen2", "qwen2", num_layers=1, max_position_embeddings=2048)
    server = RealServer(kind, model, tmp_path / "log").start()
    try:
        ours = connected(server, max_new_tokens=1500)
        policy = create_policy({"backend": "hf", "model_name": str(model)})
        refit(policy, ours)
        row = in_background(lambda: ours.generate(prompts([5, 6, 7])))
        until(lambda: ours._rows._heard)
        server.kill()
        error = row()
        assert isinstance(error, WorkerDiedError)
        assert server.url in str(error)
        server.start()
        with pytest.raises(WeightsTornError, match="was restarted"):
            ours.generate(prompts([5, 6]))
        refit(policy, ours)
        assert ours.generate(prompts([5, 6]))["weights_version"].tolist() == [2]
        for one in (ours, policy):
            one.shutdown()
    finally:
        server.stop()
