"""The command ``rl``. Exit codes: 0 fine, 1 problems were found, 2 wrong usage, 130 interrupted.

Plugins add commands through the entry-point group ``rl_core.commands``: a
:class:`~rl_core.commands.Command`, or any callable that takes the arguments as a list of strings
and returns an exit code or None. Each is imported when it is called, and for ``rl --help``; one
that is broken is shown as broken and leaves the others alone.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from rl_core.commands import Command
from rl_core.config import nearest
from rl_core.errors import (
    AmbiguousBackendError,
    BrokenPluginError,
    MissingEngineError,
    PluginError,
    RLError,
)
from rl_core.install import install_command
from rl_core.plugins.discovery import COMMANDS, load_object, providers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    AnyCommand: TypeAlias = Callable[[list[str]], int | None]

__all__ = ["main"]

_OWN = {"backends": "rl_core.cli.backends:app"}
#: Commands of other distributions, so that users without these learn where they are.
_ELSEWHERE = {
    **dict.fromkeys(("check", "conformance", "explain", "new"), "rl-conformance"),
    **dict.fromkeys(("config", "train"), "rl-train"),
    "env": "rl-backends",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command that ``argv`` (else the process) names. Wrong usage raises SystemExit."""
    given = list(sys.argv[1:] if argv is None else argv)
    at = next((i for i, word in enumerate(given) if not word.startswith("-")), len(given))
    parser = Command("rl", "RL post-training with any trainer and engine", "rl backends list")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--debug", action="store_true", help="show tracebacks of errors")
    try:
        try:
            return _run(parser, given[:at], given[at:])
        finally:
            sys.stdout.flush()
    except RLError as error:
        if "--debug" in given[:at]:
            raise
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the interpreter flushes once more at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1


def _run(parser: Command, options: list[str], words: list[str]) -> int:
    installed = {*_OWN, *(provider.name for provider in providers(COMMANDS))}
    if not words and "--version" not in options:
        for name in sorted(installed):
            try:
                shown: Any = _load(name)
                doc = getattr(getattr(shown, "info", None), "help", None) or shown.__doc__ or ""
                text = getattr(shown, "summary", "") or doc.partition("\n")[0]
            except PluginError as error:
                text = f"(broken) {error.message}"
            parser.command(name, text)
    if parser.parse_args(options).version:
        from rl_core import __version__

        print(f"rl-core {__version__}")
        return 0
    if not words:
        return parser([])
    name, names = words[0], installed | set(_ELSEWHERE)
    if name not in names:
        close = nearest(name, names)
        hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(sorted(installed))}"
        parser.error(f"there is no command {name!r}; {hint}")
    if name not in installed:
        raise MissingEngineError(
            f"'rl {name}' is a command of {_ELSEWHERE[name]}, which is not installed",
            fix=install_command(_ELSEWHERE[name]),
        )
    sys.argv[0] = f"rl {name}"
    return _load(name)(words[1:]) or 0


def _load(name: str) -> AnyCommand:
    if name in _OWN:
        return cast("AnyCommand", load_object(_OWN[name]))
    provider, *others = (each for each in providers(COMMANDS) if each.name == name)
    if others:
        raise AmbiguousBackendError(
            f"several plugins provide 'rl {name}': {', '.join(map(str, (provider, *others)))}",
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
