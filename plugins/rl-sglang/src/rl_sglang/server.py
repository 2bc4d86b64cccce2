"""The backend for an SGLang server that is already running. It need not be installed here."""

from __future__ import annotations

import asyncio
import json
import math
from typing import TYPE_CHECKING, Any

import msgspec

from rl_core.errors import CapabilityError, PluginError
from rl_hosting.server.generation import ServerGeneration
from rl_hosting.server.server import Part, Server, ServerFacts, Weights, read_version
from rl_sglang.engine_args import check_sampling
from rl_sglang.manifest import VERSIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends.generation.rows import Row

__all__ = ["SglangServer", "SglangServerGeneration"]

#: Sampling parameters that rows set themselves: what a server prefers of these has no effect.
SET_IN_ROWS = frozenset(
    {
        "frequency_penalty",
        "ignore_eos",
        "max_new_tokens",
        "min_new_tokens",
        "min_p",
        "n",
        "presence_penalty",
        "repetition_penalty",
        "stop",
        "stop_token_ids",
        "temperature",
        "top_k",
        "top_p",
    }
)
#: Of SGLang's loads: what changes with every step that decodes.
_COUNTED = ("num_used_tokens", "total_prefill_uncached_tokens", "decode_moments")
#: Tokens of a prompt and its completion, beyond the longest prompt: SGLang reserves the last two.
_BEYOND_PROMPT = 4
#: Candidates whose log-probs are compared, prompts that are tried, and how far apart two
#: candidates must be for a temperature to show.
_CANDIDATES, _PROMPTS, _APART = 16, 4, 1e-2


class _ModelInfo(msgspec.Struct):
    model_path: str
    is_generation: bool
    weight_version: str | None = None
    architectures: list[str] | None = None
    model_type: str | None = None
    preferred_sampling_params: dict[str, Any] | str | None = None


class _ServerInfo(msgspec.Struct):
    version: str
    model_path: str
    max_req_input_len: int
    startup_time: Any
    random_seed: int | None = None
    weight_version: str | None = None
    quantization: str | None = None
    tp_size: int = 1
    dp_size: int = 1
    enable_deterministic_inference: bool = False
    incremental_streaming_output: bool = False
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    watermark_default_enabled: bool = False
    watermark_enforce_all: bool = False
    weight_cache_mode: str = "off"
    rl_on_policy_target: str | None = None


class SglangServer(Server):
    """A server of SGLang."""

    name = "SGLang"
    generate_path = "/generate"

    async def look(self) -> ServerFacts:
        """See :meth:`Server.look`."""
        client = self.client
        model_info, server_info = await asyncio.gather(
            client.get("/model_info", self.answer_s), client.get("/server_info", self.answer_s)
        )
        version = read_version(client.who, server_info.get("version"), VERSIONS, self.name)
        try:
            model = msgspec.convert(model_info, _ModelInfo)
            server = msgspec.convert(server_info, _ServerInfo)
        except msgspec.ValidationError as error:
            raise PluginError(
                f"{client.who} reports facts that SGLang {version} does not have: {error}",
                fix="check that url is the address of an SGLang server",
                url=client.url,
            ) from error
        refits = ""
        if server.quantization:
            refits = f"it is quantised with {server.quantization}"
        elif server.weight_cache_mode != "off":
            refits = f"its weights are in a cache (weight_cache_mode {server.weight_cache_mode})"
        self._deterministic = server.enable_deterministic_inference
        self._incremental = server.incremental_streaming_output
        why = _unusable(model, server)
        return ServerFacts(
            start=json.dumps([server.startup_time, server.random_seed], sort_keys=True),
            path=server.model_path,
            loaded=Weights(server.weight_version or "", server.model_path),
            weights=Weights(model.weight_version or "", model.model_path),
            model=(*(model.architectures or []), model.model_type or ""),
            longest_prompt=server.max_req_input_len - 1,
            longest_row=server.max_req_input_len + _BEYOND_PROMPT,
            workers=server.tp_size * server.dp_size,
            without_seeds=""
            if self._deterministic
            else "does not sample deterministically (--enable-deterministic-inference)",
            without_refits=refits,
            unusable=(why, "start a server of a model that generates, without such arguments")
            if why
            else None,
        )

    async def measure(self) -> None:
        """Finds out what the server's log-probs are of, which it does not report.

        With the variable SGLANG_RETURN_ORIGINAL_LOGPROB they are of the logits, otherwise of the
        logits divided by the temperature.

        Raises:
            CapabilityError: They are not those of ``logprobs_mode``, or it does not show.
        """
        sampled = self.config.get("do_sample", True)
        temperature = self.config.get("temperature", 1.0) if sampled else 1.0
        raw = self.config.get("logprobs_mode", "processed") == "raw"
        if temperature == 1.0:
            return
        for token in range(min(_PROMPTS, self.checkpoint.facts.vocab_size)):
            plain, scaled = await asyncio.gather(
                self._candidates(token, 1.0), self._candidates(token, temperature)
            )
            both = [one for one in plain if one in scaled]
            apart = plain[both[0]] - plain[both[-1]] if both else 0.0
            seen = scaled[both[0]] - scaled[both[-1]] if both else 0.0
            divided = apart / temperature
            if abs(apart - divided) < _APART:
                continue
            is_raw = abs(seen - apart) < abs(seen - divided)
            if is_raw == raw:
                return
            other = "without" if is_raw else "with"
            raise CapabilityError(
                f"{self.client.who} gives {'raw' if is_raw else 'processed'} "
                f"log-probs at temperature {temperature}, and logprobs_mode is "
                f"{'raw' if raw else 'processed'}",
                fix=f"start it {other} SGLANG_RETURN_ORIGINAL_LOGPROB=1, change logprobs_mode, or "
                "use temperature 1",
                capability="logprobs_mode",
                key="logprobs_mode",
            )
        raise CapabilityError(
            f"it cannot be measured whether {self.client.who} applies the "
            f"temperature {temperature} to log-probs",
            fix="use temperature 1",
            capability="logprobs_mode",
            key="logprobs_mode",
        )

    async def _candidates(self, token: int, temperature: float) -> dict[int, float]:
        """The log-probs of the likeliest tokens after one token."""
        request = {
            "input_ids": [token],
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1, "top_k": -1}
            | {"top_p": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": _CANDIDATES,
        }
        status, answer = await self.client.post("/generate", request, self.answer_s)
        self.check_whole(str(answer))
        try:
            if status != 200:
                raise ValueError(f"{status}: {answer}")
            [found] = answer["meta_info"]["output_top_logprobs"]
            return {int(one[1]): float(one[0]) for one in found}
        except (KeyError, TypeError, ValueError) as error:
            raise PluginError(
                f"{self.client.who} returned no log-probs for a prompt of one "
                f"token: {type(error).__name__}: {error}",
                fix="look at its log",
            ) from error

    def ends_rows_itself(self, stops: frozenset[int]) -> bool:
        """See :meth:`Server.ends_rows_itself`: it adds those of its model, or ignores all."""
        return self.checkpoint.ends <= stops

    def request(self, row: Row, name: str, *, look_every: int | None) -> dict[str, Any]:
        """See :meth:`Server.request`."""
        sampling, greedy = row.sampling, row.sampling.greedy
        stops = frozenset(sampling.stop_token_ids)
        params = {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "max_new_tokens": row.budget,
            "stop": None,
            "stop_token_ids": sorted(stops),
            "ignore_eos": not self.ends_rows_itself(stops),
            "n": 1,
            "stream_interval": look_every or row.budget,
        }
        if self._deterministic:  # without one, all rows of such a server would draw alike
            params["sampling_seed"] = row.seed
        return {
            "input_ids": list(row.token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "rid": name,
        }

    def part(self, event: dict[str, Any]) -> Part:
        """See :meth:`Server.part`."""
        meta = event["meta_info"]
        reason = meta["finish_reason"]
        spans = meta.get("weight_versions")
        kind = "" if reason is None else str(reason["type"])
        return Part(
            ids=[int(token) for token in event["output_ids"]],
            logprobs=[
                math.nan if one[0] is None else float(one[0])  # JSON has no NaN
                for one in meta["output_token_logprobs"]
            ],
            reason=kind if kind in ("", "length", "stop") else f"{kind}: {reason.get('message')}",
            # Without rl-guests there, the last part of a row alone has labels of its tokens.
            labels={str(one["version"]) for one in spans or [{"version": meta["weight_version"]}]},
            whole=not self._incremental,
        )

    async def abort(self, name: str, timeout_s: float) -> None:
        """See :meth:`Server.abort`."""
        await self.client.post("/abort_request", {"rid": name}, timeout_s)

    async def progress(self, timeout_s: float) -> Any:
        """See :meth:`Server.progress`."""
        loads = (await self.client.get("/v1/loads?include=core", timeout_s)).get("loads") or ()
        return [[load.get(key) for key in _COUNTED] for load in loads]

    async def paused(self, timeout_s: float) -> bool:
        """See :meth:`Server.paused`: by the plugin of rl-guests; SGLang itself does not say it."""
        body = {"server_args": {"rl_refit": 0}}
        _, answer = await self.client.post("/set_internal_state", body, timeout_s)
        paused: bool = answer == [{"rl_refit": [True]}]
        return paused

    async def call_workers(self, frame: str, timeout_s: float) -> list[str]:
        """See :meth:`Server.call_workers`: by the plugin of rl-guests in the server."""
        body = {"server_args": {"rl_refit": 1}, "rid": frame}
        status, answer = await self.client.post("/set_internal_state", body, timeout_s)
        try:  # of each data-parallel replica, the answers of its ranks
            return [one for replica in answer for one in replica["rl_refit"]]
        except (TypeError, KeyError):
            raise CapabilityError(
                f"{self.client.who} takes no refit: it did not pass a call to its schedulers "
                f"({status}): {answer}",
                fix="install rl-guests and rl-sglang where it runs, and start it without "
                "SGLANG_PLUGINS, or with rl_core among them",
                capability="refit",
            ) from None

    async def reset_caches(self) -> None:
        """See :meth:`Server.reset_caches`."""
        status, answer = await self.client.post("/flush_cache", {}, self.answer_s)
        if status != 200:
            raise PluginError(
                f"{self.client.who} did not clear its prefix cache: "
                f"{answer.get('message') or status}",
                fix="call it again when no client generates with the server",
            )


class SglangServerGeneration(ServerGeneration):
    """Generates with a running SGLang server; see :class:`rl_hosting.server.ServerGeneration`.

    The server needs rl-guests for refits.
    """

    backend_name = "sglang-server"
    server_type = SglangServer

    def check_config(self, config: Mapping[str, Any]) -> None:
        """See :meth:`ServerGeneration.check_config`."""
        check_sampling(config)
        truncated = (config.get("top_k") or 0) > 0 or config.get("top_p", 1.0) < 1.0
        sampled = config.get("do_sample", True)
        if sampled and truncated and config.get("logprobs_mode", "processed") == "processed":
            raise CapabilityError(
                "an SGLang server gives log-probs over all tokens, not over those that top_k and "
                "top_p leave, so it has no processed log-probs",
                fix='set logprobs_mode to "raw", leave top_k and top_p out, or use the backend '
                "'sglang', which starts its own engine",
                capability="logprobs_mode",
                key="logprobs_mode",
            )


def _unusable(model: _ModelInfo, server: _ServerInfo) -> str:
    if not model.is_generation:
        return "it serves a model that does not generate"
    if server.disaggregation_mode != "null":
        return f"it does only a part of the work (disaggregation_mode {server.disaggregation_mode})"
    if server.speculative_algorithm:
        return f"it decodes speculatively ({server.speculative_algorithm}), which was never tested"
    if server.watermark_default_enabled or server.watermark_enforce_all:
        return "it puts a watermark into sampled tokens"
    if server.rl_on_policy_target:
        return f"it rounds probabilities (rl_on_policy_target {server.rl_on_policy_target})"
    preferred = model.preferred_sampling_params or {}
    if isinstance(preferred, str):
        try:
            preferred = json.loads(preferred)
        except ValueError:
            return "its preferred_sampling_params are not JSON"
    if left := sorted(set(preferred) - SET_IN_ROWS):
        return f"it has preferred_sampling_params that rows cannot override ({', '.join(left)})"
    return ""
