"""A real SGLang server on the CPU, in processes of its own, against transformers."""

from __future__ import annotations

import importlib.util
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engines.calls import in_background, prompts
from engines.servers import RealServer, connected

from rl_conformance.models import make_tiny_model
from rl_core import create_policy, refit
from rl_core.errors import CapabilityError, ConfigError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engines.kinds import Kind

pytestmark = [
    pytest.mark.full,
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("sglang_server"),  # one server for all of them
    pytest.mark.skipif(
        importlib.util.find_spec("sglang") is None or importlib.util.find_spec("aiohttp") is None,
        reason="SGLang or aiohttp is not installed here",
    ),
    pytest.mark.filterwarnings("ignore::rl_core.errors.LoopWarning"),  # of several trainers
]
ROWS = [[5, 6, 7, 8], [9], list(range(20, 60)), [100, 3, 7]]


@pytest.fixture(scope="module")
def server(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    home = tmp_path_factory.mktemp("server")
    made = RealServer(kind, make_tiny_model(home / "qwen2", "qwen2"), home / "log").start()
    yield made
    made.stop()


def test_what_the_server_cannot_do_is_refused(server: RealServer) -> None:
    with pytest.raises(CapabilityError, match="deterministic"):
        connected(server, seed=1)
    with pytest.raises(CapabilityError, match="logprobs_mode"):
        connected(server, temperature=0.5, logprobs_mode="raw")
    with pytest.raises(ConfigError, match="api_key is not valid"):
        connected(server, api_key="sk-wrong")


def posted(client: Any, path: str, body: dict[str, Any]) -> Any:
    return client._client.run(client._client.post(path, body, 60.0), 60.0, path)[1]


def test_bodies_that_are_no_frames_are_answered_as_by_sglang(server: RealServer) -> None:
    ours = connected(server)
    frame = {"server_args": {"rl_refit": 1}}
    for body, answer in (
        ({"server_args": {"pp_max_micro_batch_size": 8}}, [True]),
        ({"server_args": {"unknown": 8}}, [False]),
        (frame, [False]),
        (frame | {"rid": "no frame"}, [False]),
    ):
        assert posted(ours, "/set_internal_state", body) == answer
    ours.shutdown()


def test_a_pause_of_the_user_lasts_beyond_a_refit(server: RealServer) -> None:
    ours = connected(server, max_new_tokens=4)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    posted(ours, "/pause_generation", {"mode": "in_place"})
    refit(policy, ours)
    waiting = in_background(lambda: ours.generate(prompts([5])))
    time.sleep(1.0)
    assert ours._rows._tasks
    posted(ours, "/continue_generation", {})
    assert waiting()["generation_lengths"].tolist() == [4]
    for one in (ours, policy):
        one.shutdown()


def test_weights_whose_memory_is_released_are_not_written(server: RealServer) -> None:
    ours = connected(server, max_new_tokens=4)
    policy = create_policy({"backend": "hf", "model_name": str(server.model)})
    posted(ours, "/release_memory_occupation", {"tags": ["weights"]})
    with pytest.raises(LifecycleError, match="has released the memory of its weights"):
        refit(policy, ours)
    posted(ours, "/resume_memory_occupation", {"tags": ["weights"]})
    refit(policy, ours)
    ours.generate(prompts([5]))
    for one in (ours, policy):
        one.shutdown()


def test_server_with_seeds_and_raw_logprobs(kind: Kind, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "qwen2", "qwen2", num_layers=1, max_position_embeddings=2048)
    arguments = "--enable-deterministic-inference"
    server = RealServer(
        kind, model, tmp_path / "log", arguments, SGLANG_RETURN_ORIGINAL_LOGPROB="1"
    )
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
    finally:
        server.stop()
