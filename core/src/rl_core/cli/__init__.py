"""The command ``rl``. Exit codes: 0 fine, 1 problems were found, 2 wrong usage.

A sub-command is a callable that takes its arguments as a list of strings and returns an exit code
or None, such as a :class:`typer.Typer` or a ``main(argv)`` on argparse; its program's name is in
``sys.argv[0]``. Plugins add their own through the entry-point group ``rl_core.commands``. Each is
imported when it is asked for (and for ``rl --help``); one that is broken is shown as broken and
leaves the others alone. The command itself is built on argparse, because it must start quickly.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, TypeAlias

from rl_core.errors import AmbiguousBackendError, BrokenPluginError, PluginError, RLError
from rl_core.plugins.discovery import COMMANDS, load_object, providers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_core.plugins.discovery import Provider

    Command: TypeAlias = Callable[[list[str]], int | None]

__all__ = ["main"]

_OWN = {
    "backends": ("rl_core.cli.backends:main", "list, describe and examine the installed backends"),
    "check": ("rl_core.cli.check:main", "check a model: log-probs, context length, decoding"),
}
#: Where commands come from that are not installed.
_OTHERS = (
    f"packages add others through the entry-point group {COMMANDS}; "
    "conformance, new and refit come with: pip install ./tests/conformance"
)


class _Parser(argparse.ArgumentParser):
    """Lists the sub-commands in its help, the broken ones as broken."""

    def format_help(self) -> str:
        lines = {provider.name: _summary(provider.name) for provider in providers(COMMANDS)}
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
    return _run(parser, options)


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    try:
        command = _find(options.command)
        if command is None:
            from rl_core.config import nearest

            names = [*_OWN, *(provider.name for provider in providers(COMMANDS))]
            close = nearest(options.command, names)
            known = f"those that are installed: {', '.join(sorted(names))}; {_OTHERS}"
            hint = f"did you mean {close!r}?" if close else known
            parser.error(f"there is no command {options.command!r}; {hint}")
        sys.argv[0] = f"rl {options.command}"
        return command(options.arguments) or 0
    except RLError as error:
        if options.debug:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 1


def _find(name: str) -> Command | None:
    if name in _OWN:
        command: Command = load_object(_OWN[name][0])
        return command
    found = [provider for provider in providers(COMMANDS) if provider.name == name]
    return _load(found) if found else None


def _load(found: Sequence[Provider]) -> Command:
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


def _summary(name: str) -> str:
    found = [provider for provider in providers(COMMANDS) if provider.name == name]
    try:
        _load(found)
    except PluginError as error:
        return f"(broken) {error.message}"
    return f"from {found[0]}"
