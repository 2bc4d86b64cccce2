"""A checkout of NeMo RL, importable on this interpreter without what its loops do not use here.

Nothing of it is changed. What is imported by it and not installed here is a test double: a module
whose classes can be named, in annotations and ``isinstance``, and raise when they are made.
"""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import os
import subprocess
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import typing_extensions

__all__ = ["DOUBLES", "commit_of", "export", "install"]

#: Names the checkout for the processes that this one starts, and the environment that they are of:
#: an engine in another one needs neither the checkout nor doubles of what it may have.
VARIABLE, ENVIRONMENT = "NEMO_RL_CHECKOUT", "NEMO_RL_ENVIRONMENT"
#: What is imported at the head of a module of theirs, and why it is not installed.
DOUBLES = {
    "absl": "a data set of theirs",
    "datasets": "data sets of theirs",
    "fastapi": "the web server of their vLLM worker, which is not used",
    "hydra": "overrides on the command line, and models of their trainers",
    "mlflow": "one of their loggers",
    "pandas": "a data set of theirs",
    "prometheus_client": "their monitor of GPUs",
    "pynvml": "their monitor of GPUs",
    "scipy": "a data set of theirs",
    "soundfile": "a data set of theirs",
    "swanlab": "one of their loggers",
    "tensordict": "their data plane, which is off unless it is asked for",
    "torch.utils.tensorboard": "one of their loggers",
    "uvicorn": "the web server of their vLLM worker, which is not used",
    "wandb": "one of their loggers, and its tables for rollouts of NeMo Gym",
}


def commit_of(path: Path) -> str:
    """The commit of a checkout, or what is known of one without a git directory.

    Raises:
        SystemExit: There is no NeMo RL.
    """
    if not (path / "nemo_rl" / "algorithms" / "grpo.py").is_file():
        raise SystemExit(
            f"{path} is no checkout of NeMo RL: it has no nemo_rl/algorithms/grpo.py. "
            "Give the directory of one: git clone https://github.com/NVIDIA-NeMo/RL"
        )
    if not (path / ".git").exists():
        return "unknown (it has no .git)"
    asked = ["git", "-C", str(path), "log", "-1", "--format=%h of %cs"]
    done = subprocess.run(asked, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def export(path: Path) -> None:
    """Makes the checkout importable here, and in all processes that this one starts."""
    here = Path(__file__).parent
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(here / "startup"), str(here), *([inherited] if inherited else [])]
    )
    os.environ[VARIABLE], os.environ[ENVIRONMENT] = str(path), sys.prefix
    install()


def install() -> None:
    """Makes the checkout that was exported importable in this process."""
    if os.environ.get(ENVIRONMENT) != sys.prefix:
        return
    sys.path.insert(0, os.environ[VARIABLE])
    sys.meta_path.insert(0, _Doubles())
    if sys.version_info < (3, 12):
        sys.meta_path.insert(0, _Theirs())


class _Doubles(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is in :data:`DOUBLES`, and nothing else."""

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in DOUBLES):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Double(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Double(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"

        def refuse(_: Any, *__: Any, **___: Any) -> None:
            raise NotImplementedError(f"{full} is a test double, and nothing here should make one")

        made = type(name, (), {"__init__": refuse, "__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Theirs(importlib.machinery.PathFinder):
    """Gives modules of theirs the ``TypedDict`` that pydantic wants before Python 3.12.

    Only them: what others make of ``typing.TypedDict`` stays what it is.
    """

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != "nemo_rl":
            return None
        spec = super().find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _TheirLoader(name, spec.origin)
        return spec


class _TheirLoader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__builtins__"] = {**vars(builtins), "__import__": _import}
        super().exec_module(module)


_TYPING = ModuleType("typing")
vars(_TYPING).update(vars(typing))
for _name in ("NotRequired", "Required", "TypedDict"):
    setattr(_TYPING, _name, getattr(typing_extensions, _name))


def _import(name: str, *arguments: Any, **more: Any) -> ModuleType:
    return _TYPING if name == "typing" else builtins.__import__(name, *arguments, **more)
