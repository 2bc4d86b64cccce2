"""``rl backends list|info``: what is installed, and what it can do."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from rl_core.cli.output import chatter_to_stderr, console_for_result
from rl_core.plugins.discovery import (
    BackendListing,
    inspect_all,
    list_backends,
)
from rl_core.plugins.manifest import CONTRACT_VERSION
from rl_core.plugins.registry import match_providers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

__all__ = ["main"]

_STYLES = {
    "ready": "green",
    "no engine": "yellow",
    "wrong engine": "yellow",
    "incompatible": "red",
    "broken": "red",
}
_A_BACKEND = "pip install ./plugins/rl-backends ./plugins/rl-hf"


def main(argv: list[str]) -> int:
    """Runs ``rl backends`` with the arguments after these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rl backends", description="List and describe the installed backends."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    listing = commands.add_parser(
        "list",
        help="list the backends, whole and broken",
        description="Exits with 1 if a backend is broken, incompatible or ambiguous. A missing "
        "engine is no problem here, because a driver needs none.",
    )
    info = commands.add_parser(
        "info",
        help="show everything that a backend declares",
        description="Exits with 1 if the backend is broken, incompatible or ambiguous.",
    )
    # For the help alone: rl-conformance runs it.
    commands.add_parser("doctor", help="look for faults and how to repair them (rl-conformance)")
    info.add_argument("name", help="NAME, or DISTRIBUTION:NAME")
    for command in (listing, info):
        command.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    with chatter_to_stderr():
        if options.command == "list":
            listings = list_backends()
        else:
            listings = inspect_all(match_providers(options.name))
    if options.json:
        document = {
            "contract": CONTRACT_VERSION,
            "backends": [
                {
                    **_plain(item.provider),
                    "qualified_name": item.provider.qualified_name,
                    "status": item.status,
                    "engine": item.engine or None,
                    "duplicates": item.duplicates,
                    "error": item.error
                    and {
                        "type": type(item.error).__name__,
                        "message": item.error.message,
                        "fix": item.error.fix,
                    },
                    "manifest": item.manifest
                    and {"kinds": item.manifest.kinds, **_plain(item.manifest)},
                }
                for item in listings
            ],
        }
        print(json.dumps(document, indent=2, default=_plain))
    elif options.command == "list":
        _print_table(listings)
    else:
        for item in listings:
            _print_info(item)
    return int(
        any(item.status in ("broken", "incompatible") or item.duplicates for item in listings)
    )


def _plain(value: Any) -> Any:
    """For JSON: what plugins declare is shown as it is, whatever it is."""
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, Mapping) else repr(value)


# Text has no markup: what a plugin declares may contain brackets.
_text = Text.assemble


def _columns(*headings: str) -> Table:
    table = Table(
        box=None,
        header_style="bold",
        pad_edge=False,
        padding=(0, 2, 0, 0),
        show_header=any(headings),
    )
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _print_table(listings: Sequence[BackendListing]) -> None:
    console = console_for_result()
    if not listings:
        console.print(_text(f"No backend is installed. Try: {_A_BACKEND}"))
        return
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
    console.print(table)
    for item in listings:
        _print_trouble(console, item)


def _print_trouble(console: Console, item: BackendListing) -> None:
    name, troubles = item.provider.name, []
    if item.error is not None:
        troubles.append((_STYLES[item.status], item.error.message, item.error.fix))
    if item.duplicates:
        text = f"{', '.join(item.duplicates)} also provides '{name}'"
        troubles.append(("red", text, f"write '{item.provider.qualified_name}'"))
    for style, text, fix in troubles:
        console.print()
        console.print(_text((f"{name}: ", f"bold {style}"), text))
        if fix:
            console.print(_text(("  Fix: ", "bold"), fix))


def _print_info(listing: BackendListing) -> None:
    console, manifest, provider = console_for_result(), listing.manifest, listing.provider
    facts = {
        "plugin": str(provider),
        "entry point": provider.value,
        "location": provider.location,
        "status": listing.status,
    }
    if manifest is not None:
        engine = manifest.engine
        source = provider.distribution + (f"[{engine.extra}]" if engine.extra else "")
        facts |= {
            "contract": manifest.contract,
            "engine": f"{' or '.join(engine.distributions)} {engine.versions}, from {source}",
            "installed": listing.engine or "no",
            "devices": ", ".join(manifest.devices),
            "environment": ", ".join(f"{k}={v}" for k, v in manifest.environment.items()) or "-",
        }
        facts |= {f"{kind} factory": where for kind, where in manifest.factories.items()}
        facts |= {f"{kind} config": where for kind, where in manifest.configs.items()}
    table = _columns("", "")
    for key, value in facts.items():
        table.add_row(_text((key, "dim")), _text(value))
    summary = f"  {manifest.summary}" if manifest else ""
    console.print(_text((provider.name, "bold"), summary))
    console.print(table)
    if manifest is not None:
        styles = {"full": "green", "versioned": "green", "not_implemented": "yellow"}
        table = _columns("Capability", "Of", "Level", "Devices", "Remark")
        for kind, capabilities in manifest.capabilities.items():
            for name, capability in capabilities.items():
                offered = capability.level in ("full", "versioned")
                table.add_row(
                    name,
                    kind,
                    _text(
                        (capability.level.replace("_", " "), styles.get(capability.level, "dim"))
                    ),
                    ", ".join(capability.devices) if offered else "-",
                    _text(" ".join(filter(None, (capability.engine, capability.reason)))),
                )
        console.print()
        console.print(table)
    _print_trouble(console, listing)
