"""The command ``rl``. Exit codes: 0 fine, 1 problems were found, 2 wrong usage, 130 interrupted.

Plugins add commands through the entry-point group ``rl_core.commands``: a
:class:`~rl_cli.command.Command`, or any callable that takes the arguments as a list of strings
and returns an exit code or None. Each is imported when it is called, and for ``rl --help``; one
that is broken is shown as broken and leaves the others alone.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import rl_core
from rl_cli.command import Command
from rl_core.config import nearest
from rl_core.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    MissingEngineError,
    PluginError,
    RLError,
)
from rl_core.install import install_command
from rl_core.plugins.discovery import load_object, providers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    AnyCommand: TypeAlias = Callable[[list[str]], int | None]

__all__ = ["COMMANDS", "main"]

#: The entry-point group of sub-commands.
COMMANDS = "rl_core.commands"

_OWN = {
    "backends": "rl_cli.backends:app",
    "env": "rl_cli.environment:app",
    "refit": "rl_cli.refit:app",
}
#: Commands of other distributions, so that users without these learn where they are.
_ELSEWHERE = {
    **dict.fromkeys(("check", "conformance", "explain", "new"), "rl-conformance"),
    **dict.fromkeys(("config", "train"), "rl-train"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` (else the process) names. Wrong usage raises SystemExit."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = next((i for i, word in enumerate(given) if not word.startswith("-")), len(given))
    options, words = given[:at], given[at:]
    parser = Command("rl", "RL post-training with any trainer and engine", "rl backends list")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    try:
        try:
            installed = {*_OWN, *(provider.name for provider in providers(COMMANDS))}
            if not words and "--version" not in options:
                for name in sorted(installed):
                    try:
                        shown: Any = _load(name)
                        doc = getattr(getattr(shown, "info", None), "help", None) or shown.__doc__
                        text = getattr(shown, "summary", "") or (doc or "").partition("\n")[0]
                    except PluginError as error:
                        text = f"(broken) {error.message}"
                    parser.command(name, text)
            if parser.parse_args(options).version:
                print(f"rl-core {rl_core.__version__}")
                return 0
            if not words:
                return parser([])
            name, names = words[0], installed | set(_ELSEWHERE)
            if name not in names:
                close = nearest(name, names)
                there = ", ".join(sorted(installed))
                hint = f"did you mean {close!r}?" if close else f"there are: {there}"
                parser.error(f"there is no command {name!r}; {hint}")
            command = _load(name)
            sys.argv[0] = f"rl {name}"
            return command(words[1:]) or 0
        finally:
            sys.stdout.flush()
    except RLError as error:
        if "--debug" in options:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _load(name: str) -> AnyCommand:
    if name in _OWN:
        return cast("AnyCommand", load_object(_OWN[name]))
    found = [each for each in providers(COMMANDS) if each.name == name]
    if not found:
        raise MissingEngineError(
            f"'rl {name}' is a command of {_ELSEWHERE[name]}, which is not installed",
            fix=install_command(_ELSEWHERE[name]),
        )
    provider, *others = found
    if others:
        raise AmbiguousBackendError(
            f"several plugins provide 'rl {name}': {', '.join(map(str, found))}",
            fix="uninstall all but one",
        )
    command: AnyCommand = load_object(provider.value, provider)
    if callable(command):
        return command
    raise provider.error(
        BrokenPluginError,
        f"{provider}: {provider.value!r} is of type {type(command).__name__}, not callable",
        fix=f"report this to the authors of {provider.distribution}",
    )
