"""What ``rl backends doctor`` finds: what is wrong with installed plugins, and how to repair it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from rl_cli import COMMANDS
from rl_cli.listing import inspect_all
from rl_core.errors import MissingEngineError
from rl_core.install import install_command
from rl_core.plugins.discovery import (
    BACKENDS,
    CONFORMANCE,
    HOOKS,
    TRANSPORTS,
    load_object,
    providers,
)
from rl_core.plugins.hookspecs import broken_hooks
from rl_core.plugins.registry import match_providers

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Finding", "diagnose"]

_GROUPS = (BACKENDS, TRANSPORTS, HOOKS, CONFORMANCE, COMMANDS)


class Finding(NamedTuple):
    """One line: ``ok``, ``warning`` or ``error``, what was looked at, what was found, the fix."""

    level: str
    subject: str
    text: str
    fix: str = ""


def diagnose(name: str | None = None) -> Iterator[Finding]:
    """Examines one backend (``"name"`` or ``"dist:name"``), or all of them and every other plugin.

    A missing engine is an error for a backend that is named, else a warning: a driver needs
    none. Functions in the group ``rl_core.doctor`` take a ``BackendListing`` and yield more faults.
    """
    listings = inspect_all(providers(BACKENDS) if name is None else match_providers(name))
    for each in listings:
        subject, error = each.provider.name, each.error
        if error is None:
            yield Finding("ok", subject, f"{each.provider} is ready with {each.engine}")
        else:
            tolerable = name is None and isinstance(error, MissingEngineError)
            level = "warning" if tolerable else "error"
            yield Finding(level, subject, error.message, error.fix or "")
        for examine in providers("rl_core.doctor"):
            for text in load_object(examine.value, examine)(each):
                fix = f"report this to the authors of {each.provider.distribution}"
                yield Finding("error", subject, text, fix)
    for group in _GROUPS if name is None else (BACKENDS,):
        known = providers(group) if name is None else [each.provider for each in listings]
        for this in known:
            if this.problem and group != BACKENDS:
                yield Finding("error", str(this), this.problem, "reinstall it")
            same = [each for each in known if each.name == this.name]
            if this is same[0] and same[1:]:
                text = f"several plugins provide it in {group}: {', '.join(map(str, same))}"
                form = f", or write '{this.qualified_name}'" if group == BACKENDS else ""
                yield Finding("error", this.name, text, f"uninstall one{form}")
    for broken in broken_hooks() if name is None else ():
        who = str(broken.details.get("distribution", ""))
        yield Finding("error", who, broken.message, broken.fix or "")
    if not listings:
        yield Finding("warning", "plugins", "no backend is installed", install_command("rl-hf"))
