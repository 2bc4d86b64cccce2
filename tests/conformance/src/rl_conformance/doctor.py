"""``rl backends doctor``: what is wrong with the installed plugins, and how to repair it."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, is_typeddict

import importlib_metadata

from rl_core.cli.output import chatter_to_stderr, console_for_result
from rl_core.errors import MissingEngineError, PluginError
from rl_core.plugins.discovery import (
    BACKENDS,
    GROUPS,
    Provider,
    inspect_all,
    load_object,
    providers,
)
from rl_core.plugins.hookspecs import broken_hooks
from rl_core.plugins.registry import match_providers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rl_core.plugins.manifest import BackendManifest

__all__ = ["Finding", "diagnose", "main"]

_LEVELS = {"ok": "green", "warning": "yellow", "error": "red"}
_HEAVY = ("torch", "ray", "transformers", "vllm", "sglang", "megatron")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``rl backends doctor``.

    Attributes:
        level: ``error`` makes the doctor exit with 1.
        subject: What was looked at.
        text: What was found.
        fix: What to do about it.
    """

    level: Literal["ok", "warning", "error"]
    subject: str
    text: str
    fix: str = ""


def main(argv: list[str]) -> int:
    """Runs ``rl backends doctor`` with the arguments after these words; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="rl backends doctor",
        description="Look for faults and how to repair them. Exits with 1 if there is an error. A "
        "missing engine is an error only for a backend that is given by name.",
    )
    parser.add_argument("name", nargs="?", help="NAME, or DISTRIBUTION:NAME; all if left out")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)
    with chatter_to_stderr():
        findings = diagnose(options.name)
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        _print(findings)
    return int(any(finding.level == "error" for finding in findings))


def diagnose(name: str | None = None) -> list[Finding]:
    """Examines one backend, or all of them and every other plugin.

    Args:
        name: A backend's name or ``dist:name``; its engine must then be installed here. Without a
            name a missing engine is only a warning, because a driver needs none.

    Raises:
        BackendNotFoundError: Nothing installed provides ``name``.
    """
    findings: list[Finding] = []
    chosen = providers(BACKENDS) if name is None else match_providers(name)
    for provider in chosen:
        findings += _examine(provider, strict=name is not None)
    findings += _collisions(BACKENDS, chosen)
    if name is None:
        for group in GROUPS[1:]:
            others = providers(group)
            findings += _collisions(group, others)
            findings += (
                Finding("error", str(provider), provider.problem, "reinstall it")
                for provider in others
                if provider.problem
            )
        findings += (
            Finding(
                "error", str(error.details.get("distribution", "")), error.message, error.fix or ""
            )
            for error in broken_hooks()
        )
    return findings or [
        Finding("warning", "plugins", "no plugin is installed", "pip install ./plugins/rl-hf")
    ]


def _collisions(group: str, found: Sequence[Provider]) -> Iterator[Finding]:
    counts = Counter(provider.name for provider in found)
    for name, count in counts.items():
        if count > 1:
            rivals = [provider for provider in found if provider.name == name]
            forms = " or ".join(repr(p.qualified_name) for p in rivals)
            yield Finding(
                "error",
                name,
                f"several plugins provide it in {group}: {', '.join(map(str, rivals))}",
                f"uninstall one{f', or write {forms}' if group == BACKENDS else ''}",
            )


def _examine(provider: Provider, *, strict: bool) -> Iterator[Finding]:
    before = set(sys.modules)
    [listing] = inspect_all([provider])
    imported = [name for name in _HEAVY if name in sys.modules and name not in before]
    error = listing.error
    if error is None:
        yield Finding("ok", provider.name, f"{provider} is ready with {listing.engine}")
    else:
        tolerable = isinstance(error, MissingEngineError) and not strict
        fix = error.fix or ""
        yield Finding("warning" if tolerable else "error", provider.name, error.message, fix)
    if imported:
        yield Finding(
            "error",
            provider.name,
            f"loading its manifest imports {', '.join(imported)}",
            "its authors must keep the manifest's module (and package) light",
        )
    if listing.manifest is not None:
        yield from _references(provider, listing.manifest)
        extra = listing.manifest.engine.extra
        try:
            metadata = importlib_metadata.metadata(provider.distribution)
            offered = metadata.get_all("Provides-Extra") or []
        except importlib_metadata.PackageNotFoundError:  # its metadata has no name
            yield _authors(provider, "its metadata is incomplete")
        else:
            if extra and extra not in offered:
                text = f"its manifest names the extra {extra!r}, which it does not have"
                yield _authors(provider, text)


def _references(provider: Provider, manifest: BackendManifest) -> Iterator[Finding]:
    """Configurations must be TypedDicts; factories must exist, and are not imported here."""
    for kind, reference in manifest.configs.items():
        try:
            if not is_typeddict(load_object(reference, provider)):
                yield _authors(provider, f"its {kind} configuration {reference} is no TypedDict")
        except PluginError as error:
            yield Finding("error", provider.name, error.message, error.fix or "")
    for kind, reference in manifest.factories.items():
        module = reference.partition(":")[0]
        try:
            missing = importlib.util.find_spec(module) is None
        except ImportError:
            missing = True
        if missing:
            yield _authors(provider, f"its {kind} factory {reference} has no such module")


def _authors(provider: Provider, text: str) -> Finding:
    fix = f"report this to the authors of {provider.distribution}"
    return Finding("error", provider.name, text, fix)


def _print(findings: Sequence[Finding]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for finding in findings:
        fix = (("\nFix: ", "bold"), finding.fix) if finding.fix else ()
        table.add_row(  # without markup: what plugins say may contain brackets
            Text(finding.level, f"bold {_LEVELS[finding.level]}"),
            Text(finding.subject, "bold", overflow="fold"),
            Text.assemble(finding.text, *fix, overflow="fold"),
        )
    counts = Counter[str](finding.level for finding in findings)
    levels = ("error", "warning")
    console = console_for_result()
    console.print(table)
    total = ", ".join(f"{counts[n]} {n}{'' if counts[n] == 1 else 's'}" for n in levels)
    console.print(Text(total, "bold"))
