"""A command of ``rl``: one look of the help, and usage errors that name what was meant.

In the entry-point group ``rl_core.commands``, ``greet = "my_package.cli:app"`` adds a command::

    app = Command("rl greet", "Greet backends")
    one = app.command("one", "Greet one backend", "rl greet one vllm", run=greet_one)
    one.add_argument("name", metavar="NAME")
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from rl_core.config import nearest

__all__ = ["Command"]


class Command(argparse.ArgumentParser):
    """A command and its help. A call with the arguments runs it and returns the exit code.

    Args:
        prog: What users write, such as ``"rl greet"``.
        summary: What it does, in one line; lists of commands show it.
        examples: Lines for a shell.
        details: What its own help explains besides.
        run: Takes the parsed options, returns the exit code; None if only commands below it run.
        **more: As for :class:`argparse.ArgumentParser`.
    """

    def __init__(
        self,
        prog: str,
        summary: str = "",
        examples: str = "",
        details: str = "",
        run: Any = None,
        **more: Any,
    ) -> None:
        text = f"{summary}\n\n{details}".strip()
        super().__init__(prog, None, text, formatter_class=_Help, allow_abbrev=False, **more)
        self.summary = summary
        self._below: Any = None
        self._show(examples)
        self.set_defaults(run=run)

    def _show(self, examples: str) -> None:
        for line in examples.splitlines():
            self.epilog = f"{self.epilog or 'examples:'}\n  {line}"

    def command(self, name: str, summary: str, examples: str = "", **more: Any) -> Command:
        """Adds a command below this one; for the arguments see the class."""
        self._below = self._below or self.add_subparsers(
            title="commands", metavar="COMMAND", prog=self.prog
        )
        self._show(examples.partition("\n")[0])
        more |= {"summary": summary, "examples": examples}
        below: Command = self._below.add_parser(name, help=summary.replace("%", "%%"), **more)
        return below

    def __call__(self, argv: list[str]) -> int:
        """Runs the command. ``--help`` and wrong usage raise SystemExit."""
        options = self.parse_args(argv)
        if options.run is None:
            self.print_help(sys.stderr)
            return 2
        return options.run(options) or 0

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does; what is unknown is an error of this command, not of the one above."""
        known = self._option_string_actions
        places = {f"--{a.dest}": a.metavar for a in self._actions if not a.option_strings}
        for word in args:
            name = word.partition("=")[0]
            if word == "--" or (self._below and word[0:1] != "-"):
                break
            if word[0:1] == "-" and name not in known and name[:2] not in known:
                close = nearest(name, [*known, *places], 0.8)
                hint = f"; did you mean {close}?" if close else ""
                hint = f"; write {places[close]} without {close}" if close in places else hint
                if not close and "KEY=VALUE" in places.values():
                    hint = f"; write {' '.join(map(str, places.values()))} without dashes"
                self.error(f"there is no option {name}{hint}")
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unexpected argument {unknown[0]!r}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        known = [str(choice) for choice in action.choices or ()]
        if known and value not in known:
            what = "command" if action is self._below else "/".join(action.option_strings)
            close = nearest(value, known)
            hint = f"did you mean {close!r}?" if close else f"there are: {', '.join(known)}"
            raise argparse.ArgumentError(None, f"there is no {what} {value!r}; {hint}")

    def error(self, message: str) -> Any:
        """Prints usage and message on standard error and exits with 2."""
        self.print_usage(sys.stderr)
        self.exit(2, f"Error: {message}\nFix: see {self.prog} --help\n")


class _Help(argparse.HelpFormatter):
    """The usage in one line, commands without a line above them, lines of examples kept."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any = None) -> None:
        places = (
            self._format_args(each, str(each.metavar or each.dest))
            for each in actions
            if not each.option_strings
        )
        super().add_usage(" ".join(("%(prog)s [OPTIONS]", *places)), (), groups, prefix)

    def _format_action(self, action: argparse.Action) -> str:
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        fill = super()._fill_text
        lines = (
            each if each[0:1] == " " else fill(each, width, indent) for each in text.splitlines()
        )
        return "\n".join(lines)
