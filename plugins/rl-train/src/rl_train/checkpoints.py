"""Checkpoints of a run: the policy, and the state from which the loop resumes exactly."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import CheckpointError, ConfigError
from rl_train.lines import put_aside, writing

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_core import ColocatablePolicyInterface
    from rl_train.config import RunConfig

__all__ = ["Checkpoints", "Found", "locked"]

_STATE = "run.json"
#: Sections that may differ between a run and the one that goes on with it.
_FREE = ("output", "steps", "epochs", "evaluation", "checkpoint", "log", "placement", "restarts")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from running in the same folder; a ConfigError if one does."""
    was_there = folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("w")
    with file:
        try:
            # A lock of the process: an engine that is forked does not keep it.
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):  # else the file system has no locks
                raise ConfigError(
                    f"another run writes to {folder}",
                    fix="choose another output, or wait for that run to end",
                    key="output",
                ) from None
        try:
            yield
        finally:
            if not was_there and os.listdir(folder) == [".lock"]:  # nothing was begun
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from: its folder, the steps that were done, and the loop's state."""

    path: Path
    step: int
    state: dict[str, Any]


class Checkpoints:
    """The folder ``checkpoints`` of a run: ``step-000100/policy`` and ``step-000100/run.json``.

    A checkpoint has its name once all of it is written: one that was interrupted is no checkpoint.
    It has the configuration and the digest of the data, which must be the same for a run to go on.
    """

    def __init__(self, config: RunConfig, data: str) -> None:
        self._options, self._output = config["checkpoint"], Path(config["output"])
        self.folder = self._output / "checkpoints"
        kept = {key: value for key, value in config.items() if key not in _FREE}
        self._config = json.loads(json.dumps(kept, default=str))
        self._data = data

    def all(self) -> list[Path]:
        """The checkpoints that are whole, the newest last."""
        return sorted(p.parent for p in self.folder.glob(f"step-*[0-9]/{_STATE}"))

    def find(self) -> Found | None:
        """The checkpoint to go on from, as ``checkpoint.resume`` has it.

        Raises:
            ConfigError: ``"never"`` and there is one; or the configuration or the data differ from
                those of the run that made it.
            CheckpointError: It is missing or not readable.
        """
        resume, there = self._options.get("resume", "never"), self.all()
        if resume == "never" and there:
            raise ConfigError(
                f"output {self._output} already has checkpoints of a run, up to {there[-1].name}",
                fix="continue that run with checkpoint.resume=auto, or set another output",
                key="checkpoint.resume",
            )
        if resume == "never" or (resume == "auto" and not there):
            return None
        path = there[-1] if resume == "auto" else Path(resume)
        try:
            written = json.loads((path / _STATE).read_text(encoding="utf-8"))
            found = Found(path, written["step"], written["state"])
            before, now = dict(_flat(written["config"])), dict(_flat(self._config))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(
                f"{path} is not a checkpoint of a run: {error!r}",
                fix="give the folder of one, such as runs/grpo/checkpoints/step-000100, or auto",
            ) from None
        keys = sorted(before.keys() | now.keys())
        changed = [key for key in keys if before.get(key) != now.get(key)]
        fix = f"start a new run with another output and model={path / 'policy'}"
        if changed:
            raise ConfigError(
                f"{path} is of a run with another configuration: "
                + "; ".join(f"{k} was {before.get(k)!r}, is {now.get(k)!r}" for k in changed),
                fix=f"set these keys as before, or {fix}",
                key=changed[0],
                keys=changed,
            )
        if written.get("data") != self._data:
            raise ConfigError(
                f"the rows of data differ from those with which {path} was made",
                fix=f"restore the data, or {fix}",
                key="data.path",
            )
        return found

    def rewind(self, step: int) -> None:
        """Renames checkpoints of later steps: those of the run that goes on will differ."""
        for path in self.all():
            if int(path.name.removeprefix("step-")) > step:
                put_aside(path)

    def save(self, step: int, policy: ColocatablePolicyInterface, state: dict[str, Any]) -> Path:
        """Writes a checkpoint, then deletes those that are too many.

        Raises:
            CheckpointError: It cannot be written, such as on a full disk; those before it stay.
        """
        path = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{path.name}.partial"
        try:
            for stale in self.folder.glob(".step-*.partial"):  # of a process that was killed
                shutil.rmtree(stale, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save_checkpoint(str(partial / "policy"))
            written = {"step": step, "state": state, "config": self._config, "data": self._data}
            with (partial / _STATE).open("w", encoding="utf-8") as file:
                json.dump(written, file)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(path, ignore_errors=True)
            partial.rename(path)
        except (OSError, CheckpointError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            there = self.all()
            raise CheckpointError(
                f"step {step} could not be saved in {self.folder}: "
                + (error.message if isinstance(error, CheckpointError) else str(error)),
                fix="free space there; "
                + (f"the newest checkpoint is {there[-1]}" if there else "there is no other"),
            ) from error
        for old in self.all()[: -self._options.get("keep", 2)]:
            shutil.rmtree(old, ignore_errors=True)
        return path


def _flat(config: Mapping[str, Any], section: str = "") -> Iterator[tuple[str, Any]]:
    """The keys with dots, and their values."""
    for key, value in config.items():
        if value and isinstance(value, dict):
            yield from _flat(value, f"{section}{key}.")
        else:
            yield f"{section}{key}", value
