"""The backend for a vLLM server that is already running. It need not be installed here."""

from __future__ import annotations

import asyncio
from math import nan
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import PluginError
from rl_hosting.server.generation import ServerGeneration
from rl_hosting.server.server import Part, Server, ServerFacts, Weights, read_version
from rl_vllm.engine_args import check_temperature

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends.generation.rows import Row

__all__ = ["VllmServer", "VllmServerGeneration"]

#: Of vLLM: what was tested as a server.
_VERSIONS = ">=0.32,<0.33"
#: The label of weights that no refit brought.
_LOADED = Weights("default")
#: What vLLM writes for the log-probs NaN and minus infinity.
_NO_NUMBER = -9999.0
#: Of vLLM's metrics: what counts tokens.
_COUNTED = (b"vllm:generation_tokens_total", b"vllm:prompt_tokens_total")
_HOW = (
    "start it with VLLM_SERVER_DEV_MODE=1 and with --enable-scale-out "
    '--logprobs-mode processed_logprobs --weight-transfer-config \'{"backend": "rl_core"}\''
)


class _Model(msgspec.Struct):
    model: str
    max_model_len: int
    logprobs_mode: str
    logits_processors: Any = None


class _Parallel(msgspec.Struct):
    world_size: int
    data_parallel_size: int = 1


class _Scheduler(msgspec.Struct):
    runner_type: str = "generate"
    enable_chunked_prefill: bool = False


class _Transfer(msgspec.Struct):
    backend: str


class _Device(msgspec.Struct):
    device: str


class _Config(msgspec.Struct):
    instance_id: Any
    model_config: _Model
    parallel_config: _Parallel
    scheduler_config: _Scheduler
    device_config: _Device
    weight_transfer_config: _Transfer | None = None
    speculative_config: Any = None
    watermark_config: Any = None
    lora_config: Any = None


class VllmServer(Server):
    """A server of vLLM, by its routes for development and for tokens."""

    name = "vLLM"
    generate_path = "/inference/v1/generate"

    async def look(self) -> ServerFacts:
        """See :meth:`Server.look`."""
        client, seconds = self.client, self.answer_s
        version = (await client.get("/version", seconds)).get("version")
        read_version(client.who, version, _VERSIONS, self.name)
        try:
            server, now = await asyncio.gather(
                client.get("/server_info?config_format=json", seconds),
                client.get("/weight_info", seconds),
            )
            config = msgspec.convert(server["vllm_config"], _Config)
            weights = Weights(str(now["weight_version"]))
        except (msgspec.ValidationError, KeyError) as error:
            raise PluginError(
                f"{client.who} reports facts that vLLM {version} does not have: {error}",
                fix="check that url is the address of a vLLM server",
            ) from error
        model, parallel = config.model_config, config.parallel_config
        transfer = config.weight_transfer_config
        refits = ""
        if transfer is None or transfer.backend != "rl_core":
            refits = "it was not started with the weight-transfer backend rl_core"
        elif parallel.data_parallel_size > 1:
            refits = "it has several engines (data parallel), and its route reaches only one"
        elif config.lora_config is not None:
            refits = "it serves adapters (--enable-lora)"
        cut = (
            config.device_config.device == "cpu" and config.scheduler_config.enable_chunked_prefill
        )
        return ServerFacts(
            start=str(config.instance_id),
            path=model.model,
            loaded=_LOADED,
            weights=weights,
            longest_prompt=model.max_model_len - 1,
            longest_row=model.max_model_len,
            workers=parallel.world_size,
            without_seeds="runs prompts in chunks on a CPU, where vLLM cannot set a row's random "
            "generator back (--no-enable-chunked-prefill)"
            if cut
            else "",
            without_refits=refits,
            unusable=self._unusable(config),
        )

    async def measure(self) -> None:
        """Tries the key: vLLM guards none of the routes that :meth:`look` asks."""
        await self.client.get("/v1/models", self.answer_s)

    def _unusable(self, config: _Config) -> tuple[str, str] | None:
        model = config.model_config
        if config.scheduler_config.runner_type != "generate":
            return "it serves a model that does not generate", "start a server of one that does"
        if config.speculative_config is not None:
            why = "it decodes speculatively, which was never tested"
            return why, "start it without --speculative-config"
        if config.watermark_config is not None or model.logits_processors:
            why = "it changes the logits (a watermark, or --logits-processors)"
            return why, "start it without"
        wanted = f"{self.config.get('logprobs_mode', 'processed')}_logprobs"
        changed = self.config.get("do_sample", True) and any(
            self.config.get(key, off) not in (off, None)
            for key, off in {"temperature": 1.0, "top_k": 0, "top_p": 1.0}.items()
        )
        changed = changed or self.config.get("repetition_penalty", 1.0) != 1.0
        same = not changed and model.logprobs_mode in ("raw_logprobs", "processed_logprobs")
        if model.logprobs_mode != wanted and not same:
            why = f"it gives {model.logprobs_mode}, and logprobs_mode needs {wanted}"
            return why, f"start it with --logprobs-mode {wanted}, or change logprobs_mode"
        return None

    def request(self, row: Row, name: str, *, look_every: int | None) -> dict[str, Any]:
        """See :meth:`Server.request`."""
        sampling, greedy = row.sampling, row.sampling.greedy
        params = {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": 0 if greedy else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": sorted(sampling.stop_token_ids),
            "ignore_eos": True,  # the end-of-sequence tokens are among the stop tokens
            "max_tokens": row.budget,
            "seed": row.seed if row.seeded and not greedy else None,
            "logprobs": 0,
            "detokenize": False,
            "stream_interval": look_every or row.budget,
        }
        token_ids = list(row.token_ids)
        return {"request_id": name, "token_ids": token_ids, "stream": True} | {
            "sampling_params": params
        }

    def part(self, event: dict[str, Any]) -> Part:
        """See :meth:`Server.part`."""
        [choice] = event["choices"]
        content = choice["logprobs"]["content"] if choice["token_ids"] else []
        return Part(
            ids=[int(token) for token in choice["token_ids"]],
            logprobs=[x if (x := float(one["logprob"])) > _NO_NUMBER else nan for one in content],
            reason=choice["finish_reason"] or "",
            labels={str(span["version"]) for span in choice["weight_versions"] or ()},
        )

    async def abort(self, name: str, timeout_s: float) -> None:
        """See :meth:`Server.abort`."""
        body = {"request_ids": [f"generate-tokens-{name}"]}
        await self.client.post("/inference/v1/abort_requests", body, timeout_s)

    async def progress(self, timeout_s: float) -> Any:
        """See :meth:`Server.progress`; vLLM started with --disable-log-stats does not count."""
        _, metrics = await self.client.ask("/metrics", timeout_s)
        return [line for line in metrics.splitlines() if line.startswith(_COUNTED)]

    async def paused(self, timeout_s: float) -> bool:
        """See :meth:`Server.paused`."""
        return (await self.client.get("/is_paused", timeout_s)).get("is_paused") is True

    async def call_workers(self, frame: str, timeout_s: float) -> list[str]:
        """See :meth:`Server.call_workers`."""
        body = {"method": "rl_refit", "args": [frame]}
        status, answer = await self.client.post("/collective_rpc", body, timeout_s)
        if status != 200 or not isinstance(answer.get("results"), list):
            raise PluginError(
                f"{self.client.who} did not pass a call to its workers ({status}): {answer}",
                fix=f"install rl-guests and rl-vllm where it runs, and {_HOW}",
            )
        found: list[str] = answer["results"]
        return found

    async def reset_caches(self) -> None:
        """See :meth:`Server.reset_caches`."""
        status, answer = await self.client.post("/reset_prefix_cache", {}, self.answer_s)
        if status != 200 or answer.get("success") is not True:
            raise PluginError(
                f"{self.client.who} did not clear its prefix cache ({status})",
                fix="call it again when no client generates with the server",
            )


class VllmServerGeneration(ServerGeneration):
    """Generates with a running vLLM server; see :class:`~rl_hosting.server.ServerGeneration`.

    The server needs rl-guests for refits, and routes that vLLM leaves out by default; rl-vllm's
    README has the command.
    """

    backend_name = "vllm-server"
    server_type = VllmServer

    def check_config(self, config: Mapping[str, Any]) -> None:
        """See :meth:`ServerGeneration.check_config`."""
        check_temperature(config)
