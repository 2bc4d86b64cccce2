"""The command ``rl``. Exit codes: 0 fine, 1 problems were found, 2 wrong usage.

Plugins add sub-commands through the entry-point group ``rl_core.commands``, whose values are
:class:`typer.Typer` instances. Each is imported when it is asked for (and for ``rl --help``); one
that is broken is shown as broken and leaves the others alone.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from rl_core.errors import AmbiguousBackendError, BrokenPluginError, PluginError, RLError
from rl_core.plugins.discovery import COMMANDS, load_object, providers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.plugins.discovery import Provider

__all__ = ["app", "main"]

_OWN = {"backends": "rl_core.cli.backends:app"}


class _LazyGroup(TyperGroup):
    """Imports a sub-command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        return sorted({*_OWN, *(provider.name for provider in providers(COMMANDS))})

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _OWN:
            return _group(cmd_name, load_object(_OWN[cmd_name]))
        found = [provider for provider in providers(COMMANDS) if provider.name == cmd_name]
        if not found:
            return None
        try:
            return _group(cmd_name, _load(found))
        except PluginError as error:
            return _broken(cmd_name, error)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except RLError as error:
            if ctx.params.get("debug"):
                raise
            typer.secho(f"Error: {error.message}", err=True, fg="red")
            if error.fix:
                typer.echo(f"Fix: {error.fix}", err=True)
            raise typer.Exit(1) from error


def _load(found: Sequence[Provider]) -> typer.Typer:
    provider = found[0]
    if len(found) > 1:
        raise AmbiguousBackendError(
            f"several plugins provide 'rl {provider.name}': {', '.join(map(str, found))}",
            fix="uninstall all but one",
        )
    loaded = load_object(provider.value, provider)
    if isinstance(loaded, typer.Typer):
        return loaded
    raise provider.error(
        BrokenPluginError,
        f"{provider}: {provider.value!r} is of type {type(loaded).__name__}, not a typer.Typer",
        fix=f"report this to the authors of {provider.distribution}",
    )


def _group(name: str, sub_app: typer.Typer) -> Any:
    group = typer.main.get_group(sub_app)
    group.name = name
    return group


def _broken(name: str, error: PluginError) -> Any:
    """A command in the place of one that cannot be loaded; it raises when called."""
    stand_in = typer.Typer(add_completion=False)

    @stand_in.command(
        name,
        help=f"(broken) {error.message}",
        context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    )
    def command() -> None:
        raise error

    return typer.main.get_command(stand_in)


app = typer.Typer(
    name="rl",
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Any trainer, any engine, proven to agree.",
)


def _print_version(asked: bool) -> None:
    if asked:
        import rl_core

        typer.echo(f"rl-core {rl_core.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    del debug, version  # read from the context, and handled by its callback


def main() -> None:
    """Runs the command line and exits."""
    sys.exit(app())
