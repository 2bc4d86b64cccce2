"""What the backend for a running server is configured with, as data: nothing heavy is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired
from urllib.parse import urlsplit

from rl_core.config import check_config
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import Range

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["SglangServerConfig", "check_server_config"]

#: SGLang takes the argmax at what is lower.
_COLDEST = 1e-6


class SglangServerConfig(GenerationConfig):
    """Configuration of :class:`rl_sglang.server.generation.SglangServerGeneration`.

    ``model_name`` is the local directory of the checkpoint that the server serves: special tokens,
    the tokenizer for stop strings and the names of the tensors of a refit are read from it.

    Attributes:
        server_url: Address of the server, such as ``"http://127.0.0.1:30000"``.
        api_key: Key of the server; sent as a bearer token, and in no error.
        connect_timeout_s: Seconds for a connection, and for responses that need no generation.
            Default 10.
        request_timeout_s: Seconds without a token or a response, after which a server that has
            requests counts as hung. Default 300.
        load_timeout_s: Seconds for the server to load the weights of a refit. Default 120.
        max_requests: Rows that the server has at a time; others wait in this process. Default 256.
        weights_dir: A directory that the server has under the same path. A refit puts the weights
            into a private directory in it. Default: the directory for temporary files.
        torch_dtype: Dtype of the server's weights. Default: as the server reports, or the
            checkpoint's if it was started with ``auto``.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
    """

    server_url: str
    api_key: NotRequired[Any]  # a string; an error of check_config would show what else it is
    connect_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    request_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    load_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    max_requests: NotRequired[Annotated[int, Range(ge=1)]]
    weights_dir: NotRequired[str]
    torch_dtype: NotRequired[Literal["float32", "bfloat16", "float16"]]
    trust_remote_code: NotRequired[bool]


def check_server_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Checks what can be checked before anybody is asked.

    Raises:
        ConfigError: A key is unknown, ill-typed or of no use; the message has no ``api_key``.
        CapabilityError: No SGLang server can do what is asked for.
    """
    if not isinstance(config.get("api_key"), str | None):
        raise ConfigError(
            "api_key must be a string or None", fix="give the key as a string", key="api_key"
        )
    checked = check_config(SglangServerConfig, config, what="SglangServerGeneration")
    try:
        url = urlsplit(checked["server_url"])
        sound = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port that is no number
        sound = False
    if not sound or url.query or url.fragment or url.username or url.password:
        # Whatever it is, it may hold a password.
        raise ConfigError(
            "server_url is not the address of a server",
            fix='set it to an address such as "http://127.0.0.1:30000"; a key belongs in api_key',
            key="server_url",
        )
    temperature = checked.get("temperature", 1.0)
    if temperature < _COLDEST:
        raise ConfigError(
            f"temperature is {temperature}, but below {_COLDEST} SGLang takes the argmax",
            fix="use a higher temperature, or greedy=True",
            key="temperature",
        )
    if checked.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigError(
            "repetition_penalty is refused: SGLang penalises generated tokens but not the "
            "prompt, so the same number has another effect than in other backends",
            fix="leave it out, or use another backend",
            key="repetition_penalty",
        )
    truncated = (checked.get("top_k") or 0) > 0 or checked.get("top_p", 1.0) < 1.0
    sampled = checked.get("do_sample", True)
    if sampled and truncated and checked.get("logprobs_mode", "processed") == "processed":
        raise CapabilityError(
            "an SGLang server gives log-probs over all tokens, not over those that top_k and "
            "top_p leave, so it has no processed log-probs",
            fix='set logprobs_mode to "raw", leave top_k and top_p out, or use the backend '
            "'sglang', which starts its own engine",
            capability="logprobs_mode",
            key="logprobs_mode",
        )
    return checked
