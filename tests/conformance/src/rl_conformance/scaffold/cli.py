"""``rl new``: starts a plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["app"]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Start a plugin from one that works."
)

_NEXT = """\
{directory} has a backend that works. Next:

  cd {directory}
  pip install -e ".[engine,test]"
  rl conformance run {name}

Then put your engine into src/{package}/engine.py; README.md says what to keep."""


@app.callback()
def main() -> None:
    """Start a plugin from one that works."""


@app.command()
def backend(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="What users write in `backend`: lower-case words, hyphens."
        ),
    ],
    directory: Annotated[
        Path, typer.Option(file_okay=False, help="Where rl-NAME is made.")
    ] = Path(),
) -> None:
    """Writes a plugin project, rl-NAME, with a small generation backend.

    The backend keeps the whole contract as it is: it generates with a transformers model, takes
    refits, and has its conformance suite as tests and in CI. Its engine.py is what you replace.
    """
    from rl_conformance.scaffold.project import Project, clashes

    project = Project.named(name)
    for clash in clashes(project):
        typer.echo(f"Note: {clash}", err=True)
    path = project.write(directory)
    typer.echo(_NEXT.format(directory=path, name=name, package=project.package))
