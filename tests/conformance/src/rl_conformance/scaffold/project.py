"""A plugin project made from the templates: its name, its files, where it goes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from jinja2 import Environment, PackageLoader, StrictUndefined
from packaging.version import Version

from rl_conformance.reports.files import write_text
from rl_core.errors import ConfigError
from rl_core.plugins.discovery import BACKENDS, providers

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TRANSFORMERS", "Project", "clashes"]

#: The engine of a new project, at the versions that this suite is made for.
TRANSFORMERS = ">=5.5,<6"

_LONGEST = 20
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
#: Their distributions ``rl-...`` are this project's own.
_RESERVED = ("conformance", "core", "hf", "losses", "megatron", "reference", "sglang", "vllm")


@dataclass(frozen=True, slots=True)
class Project:
    """A project named after its backend.

    Attributes:
        name: Of the backend; see :meth:`named`.
    """

    name: str

    @classmethod
    def named(cls, name: str) -> Project:
        """The project of a backend.

        Args:
            name: Lower-case words of letters and digits, joined by hyphens.

        Raises:
            ConfigError: The name cannot be that of a backend and of a distribution.
        """
        if problem := _problem(name):
            words = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
            near = re.sub(r"^(rl-)+|^[^a-z]+", "", words)[:_LONGEST].rstrip("-")
            fix = "choose another name, such as 'mine'" if _problem(near) else f"write {near!r}"
            raise ConfigError(f"no backend can be named {name!r}: {problem}", fix=fix, key="name")
        return cls(name)

    @property
    def distribution(self) -> str:
        """What is installed, and the name of the directory."""
        return f"rl-{self.name}"

    @property
    def package(self) -> str:
        """What is imported."""
        return self.distribution.replace("-", "_")

    def files(self) -> dict[str, str]:
        """The text of every file by its path."""
        environment = Environment(
            loader=PackageLoader("rl_conformance.scaffold"),
            autoescape=False,  # it is source code, and the name is checked
            undefined=StrictUndefined,
            keep_trailing_newline=True,
        )
        # Semantic versioning, also before 1.0: the range in which nothing breaks.
        major, minor = (*Version(version("rl-core")).release, 0)[:2]
        following = f"{major + 1}" if major else f"0.{minor + 1}"
        values = {
            "name": self.name,
            "distribution": self.distribution,
            "package": self.package,
            "title": self.name.title().replace("-", ""),
            "ours": f">={major}.{minor},<{following}",
            "transformers": TRANSFORMERS,
        }
        files = {}
        for template in environment.list_templates():
            path = template.removesuffix(".j2").replace("PACKAGE", self.package)
            files[path.replace("dot_", ".")] = environment.get_template(template).render(values)
        return files

    def write(self, parent: Path) -> Path:
        """Writes the project into a new directory.

        Args:
            parent: Where that directory is made.

        Returns:
            The directory.

        Raises:
            ConfigError: It is there and not empty, or cannot be written.
        """
        directory = parent / self.distribution
        if directory.exists() and not (directory.is_dir() and not any(directory.iterdir())):
            raise ConfigError(
                f"{directory} is there already, and nothing is overwritten",
                fix="choose another --directory, or move it away",
                key="directory",
            )
        for path, text in self.files().items():
            write_text(directory / path, text)
        return directory


def clashes(project: Project) -> list[str]:
    """What is installed under the same name, and what follows from it, a sentence for each.

    It may be an earlier life of the same project, so this is no error.
    """
    both = f"with both, users must write {project.distribution}:{project.name}"
    consequences = {project.distribution: "installing the new project takes its place"}
    return [
        f"{found} is installed and provides {found.name!r}, too: "
        f"{consequences.get(found.distribution, both)}"
        for found in providers(BACKENDS)
        if found.name == project.name
    ]


def _problem(name: str) -> str:
    """Why a name cannot be used, or ""."""
    if not _NAME.fullmatch(name):
        return "a name has lower-case letters, digits and single hyphens, and begins with a letter"
    if name.startswith("rl-"):
        return "the distribution is called rl-NAME anyway"
    if name in _RESERVED:
        return f"rl-{name} is a part of rl-core's own project"
    if len(name) > _LONGEST:
        return f"it has {len(name)} characters, and {_LONGEST} is the limit"
    return ""
