"""What a server says of itself, and whether it is one whose answers mean what they should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rl_core.errors import CapabilityError, ConfigError, IncompatiblePluginError, PluginError
from rl_sglang.manifest import VERSIONS

if TYPE_CHECKING:
    from rl_sglang.server.checkpoint import Checkpoint

__all__ = ["SET_IN_ROWS", "ServerFacts", "Weights", "check_facts", "read_facts"]

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
#: Of a prompt and its completion, beyond the longest prompt: SGLang keeps the last two to itself.
_BEYOND_PROMPT = 4


class Weights(msgspec.Struct, frozen=True):
    """Which weights a server has, as far as it says so.

    Attributes:
        version: The label that whoever loaded them gave them.
        path: The directory that they were loaded from.
    """

    version: str
    path: str


class ServerFacts(msgspec.Struct, frozen=True):
    """Of one start of a server.

    Attributes:
        version: Of SGLang.
        start: Tells this start of it from all others.
        loaded: What it started with.
        weights: What it has now.
        architectures: Of its model.
        model_type: Of its model.
        longest_prompt: Tokens.
        longest_row: Tokens of a prompt and its completion.
        dtype: Of the weights; ``"auto"`` if nobody said.
        deterministic: Whether the seed of a row decides what is drawn.
        incremental: Whether an event of a stream has the new tokens alone.
        without_refits: Why it can take none, or nothing.
        unusable: Why its answers do not mean what they should, or nothing.
    """

    version: str
    start: str
    loaded: Weights
    weights: Weights
    architectures: list[str]
    model_type: str
    longest_prompt: int
    longest_row: int
    dtype: str
    deterministic: bool
    incremental: bool
    without_refits: str
    unusable: str


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
    dtype: str = "auto"
    quantization: str | None = None
    enable_deterministic_inference: bool = False
    incremental_streaming_output: bool = False
    speculative_algorithm: str | None = None
    disaggregation_mode: str = "null"
    watermark_default_enabled: bool = False
    watermark_enforce_all: bool = False
    weight_cache_mode: str = "off"
    rl_on_policy_target: str | None = None


def read_facts(url: str, model_info: dict[str, Any], server_info: dict[str, Any]) -> ServerFacts:
    """Understands ``/model_info`` and ``/server_info``.

    Raises:
        IncompatiblePluginError: The server is of a release that was not tested.
        PluginError: It is no SGLang server, or says what no release of SGLang does.
    """
    try:
        version = Version(str(server_info.get("version")))
    except InvalidVersion:
        raise PluginError(
            f"the server at {url} does not report its version of SGLang",
            fix="check that server_url is the address of an SGLang server",
            url=url,
        ) from None
    if not SpecifierSet(VERSIONS).contains(version, prereleases=True):
        raise IncompatiblePluginError(
            f"the server at {url} is SGLang {version}; rl-sglang supports {VERSIONS}",
            fix=f'install "sglang{VERSIONS}" for the server, or a newer rl-sglang here',
            version=str(version),
            url=url,
        )
    try:
        model = msgspec.convert(model_info, _ModelInfo)
        server = msgspec.convert(server_info, _ServerInfo)
    except msgspec.ValidationError as error:
        raise PluginError(
            f"the server at {url} reports facts that SGLang {version} does not have: {error}",
            fix="check that server_url is the address of an SGLang server",
            url=url,
        ) from error
    refits = ""
    if server.quantization:
        refits = f"it is quantised with {server.quantization}"
    elif server.weight_cache_mode != "off":
        refits = f"its weights are in a cache (weight_cache_mode {server.weight_cache_mode})"
    return ServerFacts(
        version=str(version),
        start=json.dumps([server.startup_time, server.random_seed], sort_keys=True),
        loaded=Weights(server.weight_version or "", server.model_path),
        weights=Weights(model.weight_version or "", model.model_path),
        architectures=model.architectures or [],
        model_type=model.model_type or "",
        longest_prompt=server.max_req_input_len - 1,
        longest_row=server.max_req_input_len + _BEYOND_PROMPT,
        dtype=server.dtype,
        deterministic=server.enable_deterministic_inference,
        incremental=server.incremental_streaming_output,
        without_refits=refits,
        unusable=_unusable(model, server),
    )


def check_facts(url: str, facts: ServerFacts, checkpoint: Checkpoint, *, seeded: bool) -> None:
    """Makes sure that a server serves a model, and that its answers can be used.

    The model is the same if it was loaded from the same directory, or, where the server has
    another view of the file system, if architecture and type are equal.

    Args:
        url: Of the server.
        facts: What it says.
        checkpoint: The model that is meant.
        seeded: Whether a seed is asked for.

    Raises:
        ConfigError: It serves another model.
        CapabilityError: It was started in a way that changes what answers mean, or seeds have no
            effect.
    """
    same = Path(facts.loaded.path).resolve() == checkpoint.directory.resolve()
    theirs = (facts.architectures, facts.model_type)
    ours = (checkpoint.architectures, checkpoint.model_type)
    if not same and theirs != ours:
        raise ConfigError(
            f"the SGLang server at {url} serves {facts.loaded.path} "
            f"({', '.join(facts.architectures)}, {facts.model_type}), but model_name is "
            f"{checkpoint.directory} ({', '.join(checkpoint.architectures)}, "
            f"{checkpoint.model_type})",
            fix="set model_name to the checkpoint that the server serves, or server_url to a "
            "server of this checkpoint",
            key="model_name",
        )
    if facts.unusable:
        raise CapabilityError(
            f"the SGLang server at {url} cannot be used: {facts.unusable}",
            fix="start a server of a model that generates, without such arguments",
            url=url,
        )
    if seeded and not facts.deterministic:
        raise CapabilityError(
            f"seed has no effect: the SGLang server at {url} does not sample deterministically",
            fix="start it with --enable-deterministic-inference, or leave seed out",
            capability="seed",
            key="seed",
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
