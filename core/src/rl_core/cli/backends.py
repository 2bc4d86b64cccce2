"""``rl backends list|info|doctor``: what is installed, what it can do, what is wrong with it."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_core.plugins.discovery import (
    BackendListing,
    inspect_backend,
    list_backends,
    site_packages,
)
from rl_core.plugins.manifest import CONTRACT_VERSION
from rl_core.plugins.registry import match_backends

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.text import Text

    from rl_core.plugins.hookspecs import Finding

__all__ = ["app"]

app = typer.Typer(
    help="List, describe and examine the installed backends.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_Env = Annotated[
    str | None,
    typer.Option("--env", metavar="PATH", help="Look into another environment, by metadata only."),
]
_STYLES = {
    "ready": "green",
    "no engine": "yellow",
    "not read": "dim",
    "incompatible": "red",
    "broken": "red",
}
_MARKS = {"ok": ("ok", "green"), "warning": ("warning", "yellow"), "error": ("error", "red")}
_ELSEWHERE = "Nothing is imported from another environment: this is what its metadata says."


@app.command("list")
def list_(env: _Env = None, as_json: _Json = False) -> None:
    """List the backends; exit with 1 if one is broken, incompatible or ambiguous."""
    listings = list_backends(site_packages(env) if env else None)
    if as_json:
        _print_json(listings, env)
    else:
        _print_table(listings, env)
    if any(_is_problem(listing) for listing in listings):
        raise typer.Exit(1)


@app.command()
def info(name: str, as_json: _Json = False) -> None:
    """Show everything that the manifest of NAME (or DIST:NAME) declares."""
    listings = [inspect_backend(provider) for provider in match_backends(name)]
    if len(listings) > 1:
        rivals = {listing.provider.distribution for listing in listings}
        listings = [
            dataclasses.replace(item, duplicates=tuple(rivals - {item.provider.distribution}))
            for item in listings
        ]
    if as_json:
        _print_json(listings, None)
    else:
        for listing in listings:
            _print_info(listing)
    if any(_is_problem(listing) for listing in listings):
        raise typer.Exit(1)


@app.command()
def doctor(
    name: Annotated[
        str | None, typer.Argument(help="One backend; all of them if left out.")
    ] = None,
    env: _Env = None,
    as_json: _Json = False,
) -> None:
    """Look for what is wrong and how to repair it; exit with 1 if there is an error."""
    from rl_core.plugins.doctor import diagnose

    findings = diagnose(name, site_packages(env) if env else None)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        _print_findings(findings, env)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(1)


def _is_problem(listing: BackendListing) -> bool:
    return listing.status in ("broken", "incompatible") or bool(listing.duplicates)


def _as_dict(listing: BackendListing) -> dict[str, Any]:
    provider, manifest, error = listing.provider, listing.manifest, listing.error
    facts: dict[str, Any] = {
        "name": provider.name,
        "qualified_name": provider.qualified_name,
        "distribution": provider.distribution,
        "version": provider.version,
        "entry_point": provider.value,
        "location": provider.location,
        "status": listing.status,
        "duplicates": list(listing.duplicates),
        "error": error
        and {"type": type(error).__name__, "message": error.message, "fix": error.fix},
        "manifest": None,
    }
    if manifest is not None:
        facts["manifest"] = {
            "summary": manifest.summary,
            "contract": manifest.contract,
            "kinds": list(manifest.kinds),
            "factories": dict(manifest.factories),
            "configs": dict(manifest.configs),
            "engine": {**dataclasses.asdict(manifest.engine), "installed": listing.engine or None},
            "environment": dict(manifest.environment),
            "devices": list(manifest.devices),
            "tolerances": {dtype: list(bound) for dtype, bound in manifest.tolerances.items()},
            "capabilities": {
                kind: {name: dataclasses.asdict(value) for name, value in capabilities.items()}
                for kind, capabilities in manifest.capabilities.items()
            },
        }
    return facts


def _print_json(listings: Sequence[BackendListing], env: str | None) -> None:
    document = {
        "contract": CONTRACT_VERSION,
        "environment": env,
        "backends": [_as_dict(listing) for listing in listings],
    }
    typer.echo(json.dumps(document, indent=2))


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width to fold to
    return console


def _styled(text: str, style: str) -> Text:
    """Text that is shown as it is: what plugins say may contain brackets."""
    from rich.text import Text

    return Text(text, style=style)


def _print_table(listings: Sequence[BackendListing], env: str | None) -> None:
    from rich.table import Table

    console = _console()
    if not listings:
        console.print("No backend is installed. Try: pip install rl-hf", markup=False)
        return
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("Backend", "Offers", "Plugin", "Engine", "Status"):
        table.add_column(column, overflow="fold")
    for item in listings:
        manifest = item.manifest
        wanted = (
            f"{manifest.engine.distributions[0]} {manifest.engine.versions}" if manifest else ""
        )
        status = _styled(item.status, _STYLES[item.status])
        if item.duplicates:
            status.append(", ambiguous", style="red")
        table.add_row(
            _styled(item.provider.name, "bold"),
            ", ".join(manifest.kinds) if manifest else "-",
            _styled(str(item.provider), ""),
            _styled(item.engine or wanted or "-", "" if item.engine else "dim"),
            status,
        )
    console.print(table)
    for item in listings:
        _print_trouble(console, item)
    if env:
        console.print(_styled(_ELSEWHERE, "dim"))


def _print_trouble(console: Console, item: BackendListing) -> None:
    name, duplicates = item.provider.name, item.duplicates
    if item.error is not None:
        _print_item(console, name, _STYLES[item.status], item.error.message, item.error.fix or "")
    if duplicates:
        text = f"{', '.join(duplicates)} also provides '{name}'"
        _print_item(console, name, "red", text, f"write '{item.provider.qualified_name}'")


def _print_item(console: Console, name: str, style: str, text: str, fix: str) -> None:
    console.print()
    console.print(_styled(f"{name}: ", f"bold {style}").append(text, style="default"))
    if fix:
        console.print(_styled("  Fix: ", "bold").append(fix, style="default"))


def _print_info(listing: BackendListing) -> None:
    from rich.table import Table

    console, manifest = _console(), listing.manifest
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim")
    grid.add_column(overflow="fold")
    facts = {
        "plugin": str(listing.provider),
        "entry point": listing.provider.value,
        "location": listing.provider.location,
        "status": listing.status,
    }
    if manifest is not None:
        engine = manifest.engine
        source = listing.provider.distribution + (f"[{engine.extra}]" if engine.extra else "")
        facts |= {
            "contract": manifest.contract,
            "engine": f"{' or '.join(engine.distributions)} {engine.versions}"
            f" ({listing.engine or 'not installed'}; comes with {source})",
            "devices": ", ".join(manifest.devices),
            "environment": ", ".join(f"{k}={v}" for k, v in manifest.environment.items()) or "-",
        }
        facts |= {f"{kind} factory": where for kind, where in manifest.factories.items()}
        facts |= {f"{kind} config": where for kind, where in manifest.configs.items()}
    for key, value in facts.items():
        grid.add_row(key, _styled(value, ""))
    title = _styled(listing.provider.name, "bold")
    console.print(title.append(f"  {manifest.summary}" if manifest else "", style="default"))
    console.print(grid)
    if manifest is not None:
        _print_capabilities(console, listing)
    _print_trouble(console, listing)


def _print_capabilities(console: Console, listing: BackendListing) -> None:
    from rich.table import Table

    styles = {"full": "green", "versioned": "green", "not_implemented": "yellow"}
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("Capability", "Of", "Level", "Devices", "Remark"):
        table.add_column(column, overflow="fold")
    for kind, capabilities in listing.manifest.capabilities.items() if listing.manifest else ():
        for name, capability in capabilities.items():
            level = capability.level.replace("_", " ")
            offered = capability.level in ("full", "versioned")
            table.add_row(
                name,
                kind,
                _styled(level, styles.get(capability.level, "dim")),
                ", ".join(capability.devices) if offered else "-",
                _styled(" ".join(filter(None, (capability.engine, capability.reason))), ""),
            )
    console.print()
    console.print(table)


def _print_findings(findings: Sequence[Finding], env: str | None) -> None:
    console = _console()
    for finding in findings:
        mark, style = _MARKS[finding.level]
        line = _styled(f"{mark:8}", f"bold {style}").append(finding.subject, style="bold")
        console.print(line.append(f"  {finding.text}", style="default"))
        if finding.fix:
            console.print(_styled(f"{'':8}Fix: ", "bold").append(finding.fix, style="default"))
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    console.print(_styled(f"{errors} errors, {warnings} warnings", "bold"))
    if env:
        console.print(_styled(_ELSEWHERE, "dim"))
