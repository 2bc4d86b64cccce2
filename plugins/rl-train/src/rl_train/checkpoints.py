"""Checkpoints of a run: the policy, and the state from which the loop resumes exactly."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core import ColocatablePolicyInterface
    from rl_train.config import RunConfig

__all__ = ["Checkpoints", "Found"]

_STATE = "run.json"
#: Sections that may differ between a run and the one that goes on with it.
_FREE = ("output", "steps", "epochs", "evaluation", "checkpoint", "log", "placement", "restarts")


@dataclass(frozen=True)
class Found:
    """A checkpoint to go on from.

    Attributes:
        path: Its folder.
        step: Steps that were done.
        state: What :meth:`Checkpoints.save` was given.
    """

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def policy(self) -> str:
        """The policy's part."""
        return str(self.path / "policy")


class Checkpoints:
    """The folder ``checkpoints`` of a run: ``step-000100/policy`` and ``step-000100/run.json``.

    A checkpoint has its name once all of it is written: one that was interrupted is no checkpoint.

    Args:
        config: Of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self.folder = Path(config["output"]) / "checkpoints"
        self.keep = config["checkpoint"].get("keep", 2)

    def all(self) -> list[Path]:
        """The checkpoints that are whole, the newest last."""
        return sorted(p.parent for p in self.folder.glob(f"step-*/{_STATE}"))

    def find(self) -> Found | None:
        """The checkpoint to go on from, as ``checkpoint.resume`` has it.

        Raises:
            ConfigError: ``"never"`` and there is one; or the run is configured otherwise than the
                one that made it.
            CheckpointError: It is missing or not readable.
        """
        resume, there = self._config["checkpoint"].get("resume", "never"), self.all()
        if resume == "never":
            if there:
                raise ConfigError(
                    f"output {self._config['output']} already has checkpoints of a run, up to "
                    f"{there[-1].name}",
                    fix="continue that run with checkpoint.resume=auto, or set another output",
                    key="checkpoint.resume",
                )
            return None
        if resume == "auto" and not there:
            return None
        path = there[-1] if resume == "auto" else Path(resume)
        try:
            written = json.loads((path / _STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"{path} is not a checkpoint of a run: {error}",
                fix="give the folder of one, such as runs/grpo/checkpoints/step-000100, or auto",
            ) from None
        before, now = _flat(written["config"]), _flat(_comparable(self._config))
        changed = sorted(
            key for key in before.keys() | now.keys() if before.get(key) != now.get(key)
        )
        if changed:
            raise ConfigError(
                f"{path} is of a run with another configuration: "
                + "; ".join(f"{k} was {before.get(k)!r}, is {now.get(k)!r}" for k in changed),
                fix="set these keys as before, or start a new run with another output and "
                f"model={path / 'policy'}",
                key=changed[0],
            )
        return Found(path, written["step"], written["state"])

    def save(self, step: int, policy: ColocatablePolicyInterface, state: dict[str, Any]) -> Path:
        """Writes a checkpoint, then deletes those that are too many.

        Raises:
            CheckpointError: It cannot be written, such as on a full disk; those before it stay.
        """
        path = self.folder / f"step-{step:06d}"
        partial = self.folder / f".{path.name}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save_checkpoint(str(partial / "policy"))
            written = {"step": step, "state": state, "config": _comparable(self._config)}
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
        for old in self.all()[: -self.keep]:
            shutil.rmtree(old)
        return path


def _flat(config: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        at = f"{section}{key}"
        flat |= _flat(value, f"{at}.") if value and isinstance(value, dict) else {at: value}
    return flat


def _comparable(config: RunConfig) -> dict[str, Any]:
    """What must be the same for a run to go on, as JSON has it."""
    kept = {key: value for key, value in config.items() if key not in _FREE}
    compared: dict[str, Any] = json.loads(json.dumps(kept, default=str))
    return compared
