"""What moves control messages and tensors. Transports are plugins, found by name."""

from __future__ import annotations

from rl_core.errors import AmbiguousBackendError, BackendNotFoundError, BrokenPluginError
from rl_core.plugins.discovery import TRANSPORTS, load_object, providers
from rl_core.refit.transports.base import Transport

__all__ = ["find_transport"]


def find_transport(name: str) -> Transport:
    """The transport of that name.

    Raises:
        BackendNotFoundError: No installed plugin provides it.
        AmbiguousBackendError: Several do.
        BrokenPluginError: It cannot be imported, or is not a :class:`Transport`.
    """
    known = providers(TRANSPORTS)
    found = [provider for provider in known if provider.name == name]
    if not found:
        names = ", ".join(sorted({provider.name for provider in known})) or "none"
        raise BackendNotFoundError(
            f"no installed plugin provides the refit transport {name!r}; installed are: {names}",
            fix="install the plugin that provides it, or reinstall rl-core if none is listed",
            name=name,
        )
    if len(found) > 1:
        raise AmbiguousBackendError(
            f"several plugins provide the transport {name!r}: {', '.join(map(str, found))}",
            fix="uninstall all but one",
            name=name,
        )
    transport = load_object(found[0].value, found[0])
    if not isinstance(transport, Transport):
        raise found[0].error(
            BrokenPluginError,
            f"{found[0]}: {found[0].value!r} is a {type(transport).__name__}, not a Transport",
            fix=f"report this to the authors of {found[0].distribution}",
        )
    return transport
