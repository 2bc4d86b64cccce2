"""Files of JSON lines that stay whole: on a full disk, after a killed process, on going back."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
    "writing",
]


class LogError(RLError, OSError):
    """A file of the log cannot be written. ``details`` has its ``path`` and the ``errno``."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an error of the system into a :class:`LogError` that names the file."""
    try:
        yield
    except OSError as error:
        fix = f"free space under {path.parent}, or make it writable; then resume the run"
        if isinstance(error, FileExistsError | FileNotFoundError | NotADirectoryError):
            fix = "choose another output: no folder can be made there"
        raise LogError(
            f"{path} cannot be written: {error.strerror}; its earlier lines are intact",
            fix=fix,
            path=str(path),
            errno=error.errno,
        ) from error


def append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Writes a line per row; all of them, or none if it fails."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    data = memoryview(text.encode("utf-8", "replace"))
    with writing(path), path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while data:
                data = data[file.write(data) :]
        except BaseException:
            with suppress(OSError):
                file.truncate(size)
            raise


def cut(path: Path, step: float = math.inf) -> None:
    """Takes out lines beyond a step, and those that a killed process left half-written."""
    data = path.read_bytes() if path.exists() else b""
    kept = bytearray()
    for line in data.splitlines(keepends=True):
        with suppress(ValueError, KeyError, TypeError):  # no JSON, or no line of ours
            if line.endswith(b"\n") and json.loads(line)["step"] <= step:
                kept += line
    if len(kept) < len(data):
        replace(path, bytes(kept))


def replace(path: Path, data: bytes) -> None:
    """Writes a file anew; after a crash or an error it is the old one or the new one."""
    new = path.with_name(f"{path.name}.new")
    with writing(path):
        try:
            with new.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            new.replace(path)
        finally:
            with suppress(OSError):
                new.unlink(missing_ok=True)


def put_aside(path: Path) -> None:
    """Renames a file or folder, if it is there, to ``NAME.before``, in place of an older one."""
    before = path.with_name(f"{path.name}.before")
    with writing(path):
        if path.exists():
            if before.is_dir():
                shutil.rmtree(before)
            path.replace(before)


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
        return float(value) if math.isfinite(value) else None
    except (TypeError, ValueError):
        return str(value)
