"""Files of JSON lines that stay whole: on a full disk, after a killed process, on going back."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_core.errors import RLError

__all__ = [
    "LogError",
    "append",
    "as_json",
    "as_number",
    "cut",
    "put_aside",
    "read_metrics",
    "replace",
]


class LogError(RLError, OSError):
    """A file of the log cannot be written. ``details`` has its ``path`` and the ``errno``."""


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a line per row; all of them, or none if it fails.

    Raises:
        LogError: The disk is full, or the file cannot be written.
    """
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = memoryview(text.encode("utf-8", "replace"))
    try:
        with path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except BaseException:
                with suppress(OSError):
                    file.truncate(size)
                raise
    except OSError as error:
        raise failed(path, error) from error


def cut(path: Path, step: float = math.inf) -> None:
    """Takes out lines beyond a step, and those that a killed process left half-written.

    Raises:
        LogError: The file cannot be written anew; it is as before.
    """
    if not path.exists():
        return
    data = path.read_bytes()
    kept = bytearray()
    for line in data.splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):  # no JSON, or no line of ours
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept += line
    if len(kept) < len(data):
        replace(path, bytes(kept))


def replace(path: Path, data: bytes) -> None:
    """Writes a file anew; after a crash it is the old one or the new one.

    Raises:
        LogError: The disk is full, or the file cannot be written; it is the old one.
    """
    new = path.with_name(f"{path.name}.new")
    try:
        with new.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except OSError as error:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise failed(path, error) from error


def put_aside(path: Path) -> None:
    """Renames a file or folder, if it is there, to ``NAME.before``; an older one of these goes.

    Raises:
        LogError: It cannot be renamed.
    """
    before = path.with_name(f"{path.name}.before")
    try:
        if path.exists():
            if before.is_dir():
                shutil.rmtree(before)
            path.replace(before)
    except OSError as error:
        raise failed(path, error) from error


def failed(path: Path, error: OSError) -> LogError:
    """What a person reads when ``path`` cannot be written."""
    fix = f"free space under {path.parent}, or make it writable; then resume the run"
    if isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError):
        fix = "choose another output: no folder can be made there"
    return LogError(
        f"{path} cannot be written: {error.strerror}; its earlier lines are intact",
        fix=fix,
        path=str(path),
        errno=error.errno,
    )


def read_metrics(folder: str | Path) -> list[dict[str, float]]:
    """The lines of a run's ``metrics.jsonl``, with NaN for null.

    A run that is going on may be read too: a half-written last line is left out.
    """
    path = Path(folder) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    rows = (json.loads(line) for line in lines if line.endswith(b"\n"))
    return [{name: as_number(value) for name, value in row.items()} for row in rows]


def as_number(value: float | None) -> float:
    """The number; NaN for None, which is how JSON has a number that is not finite."""
    return math.nan if value is None else value


def as_json(value: Any) -> Any:
    """The value as JSON has it: floats that are not finite are null, what it lacks is a string."""
    if isinstance(value, Mapping):
        return {str(key): as_json(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None
