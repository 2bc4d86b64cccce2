"""``rl new``: starts a plugin."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rl_core.commands import Command

if TYPE_CHECKING:
    import argparse

__all__ = ["app"]

_NEXT = """\
{directory} has a backend that works. Next:

  cd {directory}
  pip install -e ".[engine,test]"
  rl conformance run {name}

Then put your engine into src/{package}/engine.py; README.md says what to keep."""


def write(options: argparse.Namespace) -> None:
    from rl_conformance.scaffold.project import Project, clashes

    project = Project.named(options.name)
    for clash in clashes(project):
        print(f"Note: {clash}", file=sys.stderr)
    path = project.write(options.directory)
    print(_NEXT.format(directory=path, name=options.name, package=project.package))


app = Command("rl new", "Start a backend of your own from one that works")
_backend = app.command(
    "backend",
    "Write a plugin project, rl-NAME, with a small generation backend",
    "rl new backend mine\nrl new backend mine --directory ~/src",
    details="The backend keeps the whole contract as it is: it generates with a transformers model,"
    " takes refits, and has its conformance suite as tests and in CI. Its engine.py is what you "
    "replace.",
    run=write,
)
_backend.add_argument(
    "name", metavar="NAME", help="what users write in `backend`: lower-case words, hyphens"
)
_backend.add_argument(
    "--directory", type=Path, default=Path(), metavar="PATH", help="where rl-NAME is made"
)
