"""Hooks: what any number of plugins may add to every backend.

A plugin names a module (or an object) in the entry-point group ``rl_core.plugins`` and marks
functions of it with :data:`hookimpl`; each takes those arguments of the specification that it
needs.

A hook that raises is reported under the name of its plugin: as an error where the result matters
(``refit_end``, ``weight_source``), in the log for observers (``on_event``).
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pluggy

from rl_core.errors import CapabilityError, ConfigError, PluginError
from rl_core.plugins.discovery import HOOKS, load_object, providers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn

    from rl_core.interfaces import WeightSource

__all__ = ["Event", "HookSpecs", "broken_hooks", "emit", "hookimpl", "hookspec", "only_answer"]

_PROJECT = "rl_core"
hookspec = pluggy.HookspecMarker(_PROJECT)
hookimpl = pluggy.HookimplMarker(_PROJECT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened.

    Attributes:
        name: Such as ``"refit_committed"``.
        data: The facts: strings, numbers and lists of these.
    """

    name: str
    data: Mapping[str, Any] = field(default_factory=dict)


class HookSpecs:
    """The hooks. None as a result means: no answer."""

    @hookspec
    def refit_end(self, party: Any, sends: bool) -> Any:
        """Returns what sends, or takes, weights for a party of ``refit`` that is no backend.

        It has a policy's methods of a refit and an attribute ``rename``, or an engine's methods. It
        is the same as long as the party lives.
        """

    @hookspec
    def weight_source(self, module: nn.Module) -> WeightSource | None:
        """Returns what a refit reads of a module that this plugin knows, such as one with adapters.

        It is called for each ``refit(module, ...)``; tensors are under the checkpoint's names.
        """

    @hookspec
    def on_event(self, event: Event) -> None:
        """Observes an event."""


@functools.cache
def _manager() -> tuple[pluggy.PluginManager, tuple[PluginError, ...]]:
    """The registered plugins, and the errors of those that could not be."""
    manager = pluggy.PluginManager(_PROJECT)
    manager.add_hookspecs(HookSpecs)
    broken: list[PluginError] = []
    for provider in providers(HOOKS):
        name = f"{provider} ({provider.name})"
        try:
            manager.register(load_object(provider.value, provider), name=name)
            manager.check_pending()
        except PluginError as error:
            broken.append(error)
        except (ValueError, pluggy.PluginValidationError) as error:
            if manager.has_plugin(name):
                manager.unregister(name=name)
            text = f"{provider}: its hooks cannot be registered: {error}"
            broken.append(provider.error(PluginError, text, fix="report this to its authors"))
    return manager, tuple(broken)


def _outcomes(hook: str, **arguments: Any) -> Iterator[tuple[str, Any, Exception | None]]:
    """Calls one plugin after the other; yields its name with the result or the exception."""
    manager, broken = _manager()
    for error in broken:
        yield str(error.details.get("distribution", "")), None, error
    registered = manager.list_name_plugin()
    for name, plugin in registered:
        others = [other for _, other in registered if other is not plugin]
        try:
            for result in manager.subset_hook_caller(hook, others)(**arguments):
                yield name, result, None
        except Exception as error:
            named: Exception  # the same failure under the name of its plugin
            if isinstance(error, ConfigError | CapabilityError):  # the caller's to mend
                named = type(error)(f"{name}: {error.message}", fix=error.fix, **error.details)
            else:
                named = PluginError(
                    f"{name}: its hook {hook} raised {type(error).__name__}: {error}",
                    fix="report this to the plugin's authors, or uninstall it",
                    plugin=name,
                )
            named.__cause__ = error
            yield name, None, named


def only_answer(hook: str, **arguments: Any) -> Any:
    """What the one plugin answers that knows the first argument; None if none does.

    Raises:
        PluginError: Two plugins answer, or one is broken.
    """
    found: list[tuple[str, Any]] = []
    for plugin, answer, error in _outcomes(hook, **arguments):
        if error is not None:
            raise error
        found.append((plugin, answer))
    if len(found) > 1:
        for _, answer in found:
            if close := getattr(answer, "close", None):
                close()
        subject, *_ = arguments.values()
        raise PluginError(
            f"the plugins {' and '.join(plugin for plugin, _ in found)} all provide {hook} for a "
            f"{type(subject).__name__}, and only one may",
            fix="uninstall one of them",
        )
    return found[0][1] if found else None


def emit(name: str, /, **data: Any) -> None:
    """Tells every plugin that something happened. An observer that raises is logged, not fatal.

    Args:
        name: The event, such as ``"refit_committed"``.
        **data: Its facts.
    """
    for plugin, _, error in _outcomes("on_event", event=Event(name, data)):
        if error is not None:
            _log.error("%s failed to observe %s: %s", plugin, name, error, exc_info=error)


def broken_hooks() -> list[PluginError]:
    """The errors of plugins with hooks that cannot be registered."""
    return list(_manager()[1])
