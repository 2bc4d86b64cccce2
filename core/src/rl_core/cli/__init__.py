"""The command ``rl``. Exit codes: 0 fine, 1 problems were found, 2 wrong usage.

A sub-command is a callable that takes its arguments as a list of strings and returns an exit code
or None, such as a :class:`typer.Typer` or a ``main(argv)`` on argparse; its program's name is in
``sys.argv[0]``. Plugins add their own through the entry-point group ``rl_core.commands``;
``backends.doctor`` there is ``rl backends doctor``. Each is imported when it is called (and for
``rl --help``); one that is broken is shown as broken and leaves the others alone. The command
itself is built on argparse, because it must start quickly.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

from rl_core.config import nearest
from rl_core.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    MissingEngineError,
    PluginError,
    RLError,
)
from rl_core.plugins.discovery import COMMANDS, load_object, providers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Command: TypeAlias = Callable[[list[str]], int | None]

__all__ = ["main"]

_OWN = {"backends": ("rl_core.cli.backends:main", "list and describe the installed backends")}
#: Commands of rl-conformance, so that users without it learn where they are.
_CONFORMANCE = ("backends.doctor", "check", "conformance", "new")
_FIX = "pip install ./plugins/rl-backends ./plugins/rl-collective ./tests/conformance"


class _Parser(argparse.ArgumentParser):
    """Lists the sub-commands in its help, the broken ones as broken."""

    def format_help(self) -> str:
        lines = {}
        for provider in providers(COMMANDS):
            words = provider.name.replace(".", " ")
            try:
                _load(provider.name)
                lines[words] = f"from {provider}"
            except PluginError as error:
                lines[words] = f"(broken) {error.message}"
        lines |= {name: summary for name, (_, summary) in _OWN.items()}
        width = max(map(len, lines))
        commands = (f"  {name:{width}}  {text}\n" for name, text in sorted(lines.items()))
        return f"{super().format_help()}\ncommands:\n{''.join(commands)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: The arguments after the program's name; those of the process if None.

    Returns:
        The exit code. Wrong usage and ``--help`` raise SystemExit, as argparse does.
    """
    parser = _Parser(
        prog="rl",
        usage="rl [--version] [--debug] COMMAND ...",
        description="Any trainer, any engine, proven to agree.",
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.version:
        import rl_core

        print(f"rl-core {rl_core.__version__}")
        return 0
    if options.command is None:
        parser.print_help(sys.stderr)
        return 2
    given = [options.command, *options.arguments]
    installed = {*_OWN, *(provider.name for provider in providers(COMMANDS))}
    names = installed | set(_CONFORMANCE)
    name = next((name for name in (".".join(given[:2]), given[0]) if name in names), None)
    if name is None:
        hint = (
            f"those that are installed: {', '.join(sorted(installed))}; packages add others "
            f"through the entry-point group {COMMANDS}; check, conformance and new come "
            f"with: {_FIX}"
        )
        if close := nearest(given[0], names):
            hint = f"did you mean {close.replace('.', ' ')!r}?"
        parser.error(f"there is no command {given[0]!r}; {hint}")
    words = name.split(".")
    sys.argv[0] = f"rl {' '.join(words)}"
    try:
        if name not in installed:
            raise MissingEngineError(
                f"'{sys.argv[0]}' is a command of rl-conformance, which is not installed", fix=_FIX
            )
        return _load(name)(given[len(words) :]) or 0
    except RLError as error:
        if options.debug:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _load(name: str) -> Command:
    if name in _OWN:
        own: Command = load_object(_OWN[name][0])
        return own
    found = [provider for provider in providers(COMMANDS) if provider.name == name]
    provider = found[0]
    if len(found) > 1:
        raise AmbiguousBackendError(
            f"several plugins provide 'rl {provider.name}': {', '.join(map(str, found))}",
            fix="uninstall all but one",
        )
    command: Command = load_object(provider.value, provider)
    if callable(command):
        return command
    raise provider.error(
        BrokenPluginError,
        f"{provider}: {provider.value!r} is of type {type(command).__name__}, not callable",
        fix=f"report this to the authors of {provider.distribution}",
    )
