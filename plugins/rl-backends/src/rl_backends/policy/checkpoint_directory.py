"""Checkpoints: a Hugging Face directory with the training state beside it, whole or not there.

A save writes into a hidden sibling, then a manifest of every file's size and digest, and renames
the sibling into place last. What lacks its manifest, or disagrees with it, is not a checkpoint.
The steps and the random states are JSON; tensors are the backend's.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from rl_core.errors import CheckpointError, RLError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    import torch

__all__ = [
    "STATE_FILE",
    "check_fit",
    "fingerprint",
    "read_json",
    "verified",
    "write_directory",
    "writing",
]

MANIFEST_FILE = "rl_checkpoint.json"
#: In a separate folder: engines read every safetensors file beside the model's.
STATE_FILE = "rl_training/state.json"
FORMAT = 1
_ANOTHER = "use another checkpoint; this one cannot be trusted"
#: Ends of the names of what engines read or run wherever they find it.
_LOADED = (".safetensors", ".index.json", ".bin", ".pt", ".py")


@contextmanager
def write_directory(path: str | Path) -> Generator[Path]:
    """A directory to write into, which becomes ``path`` at the end, as a whole.

    If the body raises, nothing stays. If the process is killed, ``path`` is what it was before (or
    its former content is found and put back by the next load or save), and what was half written
    goes with the next save.

    Args:
        path: A checkpoint or nothing; a checkpoint is replaced.

    Raises:
        CheckpointError: ``path`` is there and is not a checkpoint, or it cannot be written.
    """
    path = Path(os.path.abspath(path))
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        recover(path)
        replaceable = not path.exists() or (path / MANIFEST_FILE).exists()
        if not replaceable and not (path.is_dir() and not any(path.iterdir())):
            what = f"{path} exists and is not a checkpoint, so it is not replaced"
            raise _refused(path, what, "save to another path, or remove it")
        for stale in path.parent.glob(f".{path.name}.*.partial"):
            shutil.rmtree(stale, ignore_errors=True)
        partial = path.parent / f".{path.name}.{uuid.uuid4().hex}.partial"
        partial.mkdir()
        try:
            yield partial
            _seal(partial)
            former = _former(path)
            if path.exists():
                path.rename(former)
            partial.rename(path)
            _sync(path.parent)
            shutil.rmtree(former, ignore_errors=True)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            recover(path)


@contextmanager
def writing(path: str | Path) -> Generator[None]:
    """Whatever goes wrong in it, such as a full disk, is an error that names the checkpoint.

    Raises:
        CheckpointError: It is not written.
    """
    try:
        yield
    except RLError:
        raise
    except Exception as error:  # each format's library has its own classes
        fix = "free space there, or save to another directory; an older checkpoint there is intact"
        cause = getattr(error, "strerror", None) or error  # without the name of a part
        what = f"{path} was not written: {type(error).__name__}: {cause}"
        raise _refused(path, what, fix) from error


def recover(path: Path) -> None:
    """Puts the former checkpoint back if a save was killed between its two renames."""
    former = _former(path)
    if former.exists():
        if path.exists():
            shutil.rmtree(former, ignore_errors=True)
        else:
            former.rename(path)


def verified(path: str | Path) -> Path:
    """Verifies every file of a checkpoint.

    Returns:
        Its directory.

    Raises:
        CheckpointError: Something is missing, incomplete, altered or added; names the file.
    """
    path = Path(path)
    with suppress(OSError):  # where nothing may be written, what is there may be whole
        recover(path)
    if not path.is_dir():
        raise _refused(path, f"there is no checkpoint at {path}", "check the path")
    listed = path / MANIFEST_FILE
    manifest = read_json(listed)
    if (found := manifest.get("format")) != FORMAT:
        what = f"{path} has the checkpoint format {found}; this rl-backends reads format {FORMAT}"
        raise _refused(listed, what, "load it with the version of rl-backends that wrote it")
    try:
        files = msgspec.convert(manifest.get("files"), dict[str, tuple[int, str]])
    except msgspec.ValidationError as error:
        raise _refused(listed, f"{listed} is not the manifest of a checkpoint: {error}") from error
    if STATE_FILE not in files:
        what = f"{path} holds a model but no training state: {STATE_FILE} is missing"
        fix = "give a directory that save_checkpoint wrote; to start from a model, set model_name"
        raise _refused(path / STATE_FILE, what, fix)
    for name, (size, digest) in files.items():
        file, problem = path / name, None
        try:
            if name.startswith("/") or ".." in file.parts[len(path.parts) :]:
                problem = "is outside of it"
            elif (actual := file.stat().st_size) != size:
                problem = f"has {actual} bytes instead of {size}"
            elif _digest(file) != digest:
                problem = "was changed: its digest differs"
        except FileNotFoundError:
            problem = "is missing"
        except (OSError, ValueError) as error:  # the latter where it is no name of a file
            problem = f"cannot be read: {error}"
        if problem is not None:
            raise _refused(file, f"the checkpoint is incomplete: {file} {problem}")
    for file in path.rglob("*"):
        if file.name.endswith(_LOADED) and file.relative_to(path).as_posix() not in files:
            what = f"{file} was added to the checkpoint, and would be loaded with it"
            raise _refused(file, what, "remove it, or use another checkpoint")
    return path


def _refused(file: Path | str, what: str, fix: str = _ANOTHER) -> CheckpointError:
    return CheckpointError(what, fix=fix, file=str(file))


def fingerprint(directory: Path) -> str:
    """Digest of a checkpoint's manifest, and so of all its files."""
    return _digest(directory / MANIFEST_FILE)


def check_fit(
    expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor], where: Path
) -> None:
    """Compares names and shapes before anything is written.

    Raises:
        CheckpointError: Names the tensors that are missing or of another shape.
    """
    missing = [name for name in expected if name not in found]
    shapes = [
        f"{name} is {list(found[name].shape)}, the model has {list(tensor.shape)}"
        for name, tensor in expected.items()
        if name in found and found[name].shape != tensor.shape
    ]
    if missing or shapes:
        wrong = [f"{name} is missing" for name in missing] + shapes
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"the checkpoint {where} does not fit the model: {'; '.join(wrong[:5])}{more}",
            fix="build the policy from the model that the checkpoint was saved from",
            file=str(where),
            names=missing,
        )


def _seal(directory: Path) -> None:
    """Writes the manifest and waits until all of it is on disk."""
    files = {}
    for file in sorted(p for p in directory.rglob("*") if p.is_file()):
        files[file.relative_to(directory).as_posix()] = [file.stat().st_size, _digest(file)]
        _sync(file)
    manifest = directory / MANIFEST_FILE
    manifest.write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    _sync(manifest)
    for inner in (directory, *(p for p in directory.rglob("*") if p.is_dir())):
        _sync(inner)


def _former(path: Path) -> Path:
    return path.parent / f".{path.name}.former"


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        CheckpointError: It is missing, or holds no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("it is not a JSON object")  # noqa: TRY004 - it is the file's value
    except FileNotFoundError as error:
        what = f"{file.parent} is not a checkpoint, or an incomplete one: it has no {file.name}"
        raise _refused(file, what, "give a directory that save_checkpoint wrote") from error
    except (OSError, ValueError) as error:
        raise _refused(file, f"{file} cannot be read, or is not valid JSON: {error}") from error
    result: dict[str, Any] = content
    return result


def _digest(file: Path) -> str:
    hasher = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            hasher.update(block)
    return hasher.hexdigest()


def _sync(path: Path) -> None:
    with suppress(PermissionError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
