"""What moves control messages and tensors. Transports are plugins, found by name."""

from __future__ import annotations

from rl_core.errors import BrokenPluginError
from rl_core.plugins.discovery import TRANSPORTS, load_object
from rl_core.plugins.registry import find_provider
from rl_core.weights.transports.base import Transport

__all__ = ["find_transport"]


def find_transport(name: str) -> Transport:
    """The transport of that name."""
    provider = find_provider(name, TRANSPORTS)
    transport = load_object(provider.value, provider)
    if not isinstance(transport, Transport):
        raise provider.error(
            BrokenPluginError,
            f"{provider}: {provider.value!r} is a {type(transport).__name__}, not a Transport",
            fix=f"report this to the authors of {provider.distribution}",
        )
    return transport
