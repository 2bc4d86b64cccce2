"""The configuration of every backend for a running server, as data: nothing heavy is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, NotRequired
from urllib.parse import urlsplit

from rl_core.config import check_config
from rl_core.errors import ConfigError
from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import AlsoCalled, Range

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ServerConfig", "check_server_config"]


class ServerConfig(GenerationConfig):
    """Configuration of a :class:`rl_hosting.server.ServerGeneration`.

    ``model_name`` is the local directory of the checkpoint that the server serves: special tokens
    and the tokenizer for stop strings are read from it. Its weights may be missing.

    Attributes:
        temperature: Divides the logits before sampling; 0 stands for ``do_sample=False``, as in the
            APIs of the servers. Default 1.0.
        url: Address of the server, such as ``"http://127.0.0.1:8000"``.
        api_key: Key of the server; sent as a bearer token, and in no error.
        connect_timeout_s: Seconds for a connection, and for responses that need no generation.
            Default 10.
        request_timeout_s: Seconds in which the server decodes no token, for no client, and nobody
            has paused it: then it counts as hung, and its rows fail. Default 300.
        max_requests: Rows that the server has at a time; others wait in this process. Default 256.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
    """

    temperature: NotRequired[Annotated[float, Range(ge=0)]]
    url: Annotated[str, AlsoCalled("server_url base_url")]
    api_key: NotRequired[Any]  # a string; an error of check_config would show what else it is
    connect_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    request_timeout_s: NotRequired[Annotated[float, Range(gt=0)]]
    max_requests: NotRequired[Annotated[int, Range(ge=1)]]
    trust_remote_code: NotRequired[bool]


def check_server_config(spec: type, config: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Checks what can be checked without the server.

    Args:
        spec: A TypedDict that extends :class:`ServerConfig`.
        config: What the user wrote.
        what: The backend's class, for messages.

    Raises:
        ConfigError: A key is unknown, ill-typed or of no use; the message has no ``api_key``.
    """
    api_key = config.get("api_key")
    if not isinstance(api_key, str | None):
        raise ConfigError(
            "api_key must be a string or None", fix="give the key as a string", key="api_key"
        )
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError(
            "api_key has a line break, or another character that an HTTP header cannot have",
            fix="give the key alone, of printable ASCII characters: text that was read from a file "
            "may end with a line break (use strip())",
            key="api_key",
        )
    checked = check_config(spec, config, what=what)
    if checked.get("temperature") == 0:
        checked = {key: it for key, it in checked.items() if key != "temperature"}
        checked["do_sample"] = False
    try:
        url = urlsplit(checked["url"])
        sound = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError:  # a port that is no number
        sound = False
    if not sound or url.query or url.fragment or url.username or url.password:
        raise ConfigError(  # without the address, which may hold a password
            "url is not the address of a server",
            fix='set it to an address such as "http://127.0.0.1:8000"; a key belongs in api_key',
            key="url",
        )
    return checked
