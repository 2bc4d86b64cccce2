"""What a vLLM server reports, and which servers are refused; the server is a test double."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    IncompatiblePluginError,
    PluginError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

pytest.importorskip("aiohttp")


class CannedClient:
    """A client whose server gives the same answers always."""

    url, who = "http://there", "the vLLM server at http://there"

    def __init__(self, model: Path) -> None:
        self.config: dict[str, Any] = {
            "instance_id": 7,
            "model_config": {
                "model": str(model),
                "max_model_len": 64,
                "logprobs_mode": "processed_logprobs",
            },
            "parallel_config": {"world_size": 2},
            "scheduler_config": {},
            "device_config": {"device": "cuda"},
            "weight_transfer_config": {"backend": "rl_core"},
        }
        self.answers: dict[str, Any] = {
            "/version": {"version": "0.32.1"},
            "/server_info?config_format=json": {"vllm_config": self.config},
            "/weight_info": {"weight_version": "default"},
            "/v1/models": {"data": []},
        }

    def run(self, asked: Coroutine[Any, Any, Any], timeout_s: float, what: str) -> Any:
        return asyncio.run(asyncio.wait_for(asked, timeout_s))

    async def get(self, path: str, timeout_s: float) -> Any:
        if isinstance(self.answers[path], Exception):
            raise self.answers[path]
        return self.answers[path]

    async def post(self, path: str, body: Any, timeout_s: float) -> Any:
        return 200, self.answers[path]


@pytest.fixture
def client(tiny: Callable[..., Path]) -> CannedClient:
    return CannedClient(tiny())


@pytest.fixture
def server(client: CannedClient, tiny: Callable[..., Path]) -> Callable[..., Any]:
    from rl_hosting.server.checkpoint import Checkpoint
    from rl_vllm.server import VllmServer

    checkpoint = Checkpoint.load({"model_name": str(tiny())})
    lost: list[None] = []

    def make(**config: Any) -> Any:
        given: Any = client
        made = VllmServer(
            given, checkpoint, config, answer_s=5.0, on_lost=lambda: lost.append(None)
        )
        made.lost_count = lost  # type: ignore[attr-defined]
        return made

    return make


@pytest.mark.parametrize(
    ("section", "changed", "error", "said"),
    [
        ("speculative_config", {"method": "ngram"}, CapabilityError, "speculatively"),
        ("watermark_config", {"key": 1}, CapabilityError, "watermark"),
        ("scheduler_config", {"runner_type": "pooling"}, CapabilityError, "does not generate"),
        ("model_config", {"logits_processors": ["a:B"]}, CapabilityError, "logits"),
        ("model_config", {"logprobs_mode": "raw_logits"}, CapabilityError, "processed_logprobs"),
        ("model_config", {"model": "/elsewhere/other"}, ConfigError, "/elsewhere/other"),
        ("parallel_config", {"world_size": "two"}, PluginError, "world_size"),
    ],
)
def test_server_that_is_of_no_use_is_refused(
    server: Any,
    client: CannedClient,
    section: str,
    changed: dict[str, Any],
    error: type[Exception],
    said: str,
) -> None:
    client.config[section] = client.config.get(section, {}) | changed
    with pytest.raises(error, match=said):
        server()


def test_a_key_that_only_the_routes_that_generate_refuse_is_refused_at_once(
    server: Any, client: CannedClient
) -> None:
    client.answers["/v1/models"] = ConfigError("api_key is not valid", fix="set it", key="api_key")
    with pytest.raises(ConfigError, match="api_key"):
        server()


@pytest.mark.parametrize("version", ["0.31.0", "0.33.0"])
def test_other_releases_are_refused(server: Any, client: CannedClient, version: str) -> None:
    client.answers["/version"] = {"version": version}
    with pytest.raises(IncompatiblePluginError, match=version):
        server()


def test_a_copy_in_a_directory_of_that_name_is_taken(server: Any, client: CannedClient) -> None:
    name = client.config["model_config"]["model"].rpartition("/")[2]
    client.config["model_config"]["model"] = f"/elsewhere/{name}"
    assert server().facts.path == f"/elsewhere/{name}"


def test_what_logprobs_are_of_matters_where_it_changes_them(
    server: Any, client: CannedClient
) -> None:
    client.config["model_config"]["logprobs_mode"] = "raw_logprobs"
    server()
    server(temperature=0.5, logprobs_mode="raw")
    server(temperature=0.5, do_sample=False)
    for changing in ({"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}):
        with pytest.raises(CapabilityError, match="--logprobs-mode processed_logprobs"):
            server(**changing)


def test_seeds_need_whole_prompts_on_a_cpu(server: Any, client: CannedClient) -> None:
    client.config["device_config"] = {"device": "cpu"}
    client.config["scheduler_config"] = {"enable_chunked_prefill": True}
    server()
    with pytest.raises(CapabilityError, match="no-enable-chunked-prefill"):
        server(seed=3)


@pytest.mark.parametrize(
    ("section", "changed", "said"),
    [
        ("weight_transfer_config", None, "rl_core"),
        ("weight_transfer_config", {"backend": "nccl"}, "rl_core"),
        ("parallel_config", {"world_size": 1, "data_parallel_size": 2}, "data parallel"),
        ("lora_config", {"max_loras": 1}, "adapters"),
    ],
)
def test_server_that_takes_no_refits_says_so(
    server: Any, client: CannedClient, section: str, changed: Any, said: str
) -> None:
    client.config[section] = changed
    with pytest.raises(CapabilityError, match=said):
        server().check_refit()


def test_other_weights_are_noticed(server: Any, client: CannedClient) -> None:
    from rl_core.errors import WeightsTornError

    it = server()
    asyncio.run(it.confirm())
    client.answers["/weight_info"] = {"weight_version": "ab-3"}
    with pytest.raises(WeightsTornError, match="ab-3"):
        asyncio.run(it.confirm())
    assert it.lost_count
    it.committed("ab-3")
    asyncio.run(it.confirm())


def test_a_server_without_the_plugin_is_named(server: Any, client: CannedClient) -> None:
    client.answers["/collective_rpc"] = {"error": "no attribute rl_refit"}
    with pytest.raises(PluginError, match="rl-guests"):
        asyncio.run(server().call_workers("", 1.0))
