"""``rl backends``: what is installed, what it can do, and what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rl_cli.command import Command
from rl_cli.listing import BackendListing, inspect_all, list_backends
from rl_cli.output import chatter_to_stderr, console_for_result
from rl_core.install import install_command
from rl_core.plugins.hookspecs import broken_hooks
from rl_core.plugins.manifest import CONTRACT_VERSION
from rl_core.plugins.registry import match_providers

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from rich.console import Console

    from rl_core.errors import RLError

__all__ = ["app"]

_STYLES = {"ready": "green", "no engine": "yellow", "wrong engine": "yellow"}
_STYLES |= {"incompatible": "red", "broken": "red"}


def show_all(options: argparse.Namespace) -> int:
    """Runs list."""
    with chatter_to_stderr():
        listings, hooks = list_backends(), broken_hooks()
    if options.json:
        return _print_json(listings, hooks)
    console = console_for_result()
    table = _columns("Backend", "Offers", "Plugin", "Engine", "Status")
    for item in listings:
        manifest, engine = item.manifest, _text(item.engine)
        if manifest is None:
            engine = _text("-")
        elif item.status != "ready":
            wanted = f"{manifest.engine.distributions[0]} {manifest.engine.versions}"
            engine = _text((wanted, "dim"))
        ambiguous = ", ambiguous" if item.duplicates else ""
        table.add_row(
            _text((item.provider.name, "bold")),
            ", ".join(manifest.kinds) if manifest else "-",
            _text(str(item.provider)),
            engine,
            _text((item.status, _STYLES[item.status]), (ambiguous, "red")),
        )
    none = _text(f"No backend is installed. Fix: {install_command('rl-hf')}")
    console.print(table if listings else none)
    for item in listings:
        _print_trouble(console, item)
    for error in hooks:
        print(f"\nhooks: {error}")
    return _exit_code(listings, hooks)


def show_one(options: argparse.Namespace) -> int:
    """Runs info."""
    with chatter_to_stderr():
        listings = inspect_all(match_providers(options.name))
    if options.json:
        return _print_json(listings)
    for listing in listings:
        console, manifest, provider = console_for_result(), listing.manifest, listing.provider
        facts = {"plugin": str(provider), "entry point": provider.value}
        facts |= {"location": provider.location, "status": listing.status}
        if manifest is not None:
            engine = manifest.engine
            source = provider.distribution + (f"[{engine.extra}]" if engine.extra else "")
            facts |= {
                "contract": manifest.contract,
                "engine": f"{' or '.join(engine.distributions)} {engine.versions}, from {source}",
                "installed": listing.engine or "no",
                "devices": ", ".join(manifest.devices),
                "environment": ", ".join(f"{k}={v}" for k, v in manifest.environment.items())
                or "-",
                **{f"{kind} factory": where for kind, where in manifest.factories.items()},
                **{f"{kind} config": where for kind, where in manifest.configs.items()},
            }
        table = _columns("", "")
        for key, value in facts.items():
            table.add_row(_text((key, "dim")), _text(value))
        console.print(_text((provider.name, "bold"), f"  {manifest.summary}" if manifest else ""))
        console.print(table)
        if manifest is not None:
            styles = {"full": "green", "versioned": "green", "not_implemented": "yellow"}
            table = _columns("Capability", "Of", "Level", "Devices", "Remark")
            for kind, capabilities in manifest.capabilities.items():
                for name, capability in capabilities.items():
                    level = capability.level
                    shown = _text((level.replace("_", " "), styles.get(level, "dim")))
                    devices = ", ".join(capability.devices) if styles.get(level) == "green" else "-"
                    remark = _text(f"{capability.engine} {capability.reason}".strip())
                    table.add_row(name, kind, shown, devices, remark)
            console.print()
            console.print(table)
        _print_trouble(console, listing)
    return _exit_code(listings)


def _print_json(listings: Sequence[BackendListing], hooks: Sequence[RLError] = ()) -> int:
    document = {
        "contract": CONTRACT_VERSION,
        "broken_hooks": [error.message for error in hooks],
        "backends": [
            {
                **_plain(item.provider),
                "qualified_name": item.provider.qualified_name,
                "status": item.status,
                "engine": item.engine or None,
                "duplicates": item.duplicates,
                "error": (error := item.error)
                and {"type": type(error).__name__, "message": error.message, "fix": error.fix},
                "manifest": item.manifest
                and {"kinds": item.manifest.kinds, **_plain(item.manifest)},
            }
            for item in listings
        ],
    }
    print(json.dumps(document, indent=2, default=_plain))
    return _exit_code(listings, hooks)


def _exit_code(listings: Sequence[BackendListing], hooks: Sequence[RLError] = ()) -> int:
    red = [item for item in listings if _STYLES[item.status] == "red" or item.duplicates]
    return int(bool(hooks or red))


def _plain(value: Any) -> Any:
    """For JSON: what plugins declare is shown as it is, whatever it is."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else repr(value)


_text = Text.assemble  # without markup: what a plugin declares may contain brackets


def _columns(*headings: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.show_header = any(headings)
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _print_trouble(console: Console, item: BackendListing) -> None:
    name, troubles = item.provider.name, []
    if item.error is not None:
        troubles.append((_STYLES[item.status], item.error.message, item.error.fix))
    if item.duplicates:
        text = f"{', '.join(item.duplicates)} also provides '{name}'"
        troubles.append(("red", text, f"write '{item.provider.qualified_name}'"))
    for style, text, fix in troubles:
        console.print(_text("\n", (f"{name}: ", f"bold {style}"), text))
        if fix:
            console.print(_text(("  Fix: ", "bold"), fix))


def examine(options: argparse.Namespace) -> int:
    """Runs doctor."""
    from rl_cli.doctor import diagnose

    with chatter_to_stderr():
        findings = list(diagnose(options.name))
    counts = Counter[str](finding.level for finding in findings)
    if options.json:
        print(json.dumps([finding._asdict() for finding in findings], indent=2))
        return int(counts["error"] > 0)
    table = _columns("", "", "")
    for level, subject, text, fix in findings:
        mark = {"ok": "green", "warning": "yellow", "error": "red"}[level]
        rest = (("\nFix: ", "bold"), fix) if fix else ()
        table.add_row(_text((level, f"bold {mark}")), _text((subject, "bold")), _text(text, *rest))
    console = console_for_result()
    console.print(table)
    total = (f"{counts[n]} {n}{'' if counts[n] == 1 else 's'}" for n in ("error", "warning"))
    console.print(_text((", ".join(total), "bold")))
    return int(counts["error"] > 0)


app = Command("rl backends", "List the installed backends, describe one, find faults")
_list = app.command(
    "list",
    "List all backends, with a fix for each that cannot be used",
    "rl backends list\nrl backends list --json",
    details="Exits with 1 if a backend is broken, incompatible or ambiguous.",
    run=show_all,
)
_info = app.command(
    "info",
    "Show the engine, devices and capabilities of one backend",
    "rl backends info vllm\nrl backends info rl-vllm:vllm --json",
    run=show_one,
)
_doctor = app.command(
    "doctor",
    "Find faults of the installed plugins, and how to repair them",
    "rl backends doctor\nrl backends doctor vllm",
    details="Exits with 1 if there is an error; a missing engine counts only with NAME.",
    run=examine,
)
_info.add_argument("name", metavar="NAME", help="such as vllm, or DISTRIBUTION:NAME")
_doctor.add_argument("name", nargs="?", metavar="NAME", help="one backend; by default all plugins")
for _command in (_list, _info, _doctor):
    _command.add_argument("--json", action="store_true", help="print JSON")
