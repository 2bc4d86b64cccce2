"""``rl new``: starts a plugin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cli.command import Command

if TYPE_CHECKING:
    import argparse

__all__ = ["app"]

_NEXT = """\
{directory} has a backend that works. Next:

  cd {directory}
  pip install -e ".[engine,test]"
  rl conformance run {name}

Then put your engine into src/{package}/engine.py; README.md lists what to keep."""


def write(options: argparse.Namespace) -> None:
    from rl_conformance.scaffold.project import Project, clashes

    project = Project.named(options.name)
    for clash in clashes(project):
        print(f"Note: {clash}", file=sys.stderr)
    path = project.write(options.directory)
    print(_NEXT.format(directory=path, name=options.name, package=project.package))


app = Command("rl new", "Write a small backend that works; then replace its engine with yours")
_backend = app.command(
    "backend",
    "Write a plugin project, rl-NAME, with a small generation backend",
    "rl new backend mine\nrl new backend mine --directory ~/src",
    details="The backend generates with a transformers model, takes refits, passes the conformance "
    "suite, and has it as its tests and in CI. Replace its engine.py with your engine.",
    run=write,
)
_backend.add_argument(
    "name", metavar="NAME", help="value of the key `backend`: lower-case words with hyphens"
)
_backend.add_argument(
    "--directory",
    type=Path,
    default=Path(),
    metavar="PATH",
    help="where rl-NAME is written; default: here",
)
