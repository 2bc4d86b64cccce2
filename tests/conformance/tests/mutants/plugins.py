"""Mutants of what is installed: how it is found, how it fails, what is said of it by name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from mutants.mutant import breaks
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.target import Target
from rl_core.errors import WorkerError

_METADATA = "Metadata-Version: 2.1\nName: rl-heavy\nVersion: 1\n"
_ENTRY_POINT = "[rl_core.backends]\nheavy = rl_heavy_manifest:BACKEND\n"
_MANIFEST = """
import dataclasses
import torch
from rl_conformance.reference import MANIFEST

BACKEND = dataclasses.replace(MANIFEST, name="heavy")
"""


@breaks("D1", checks="D1 or D2", of=lambda: Target.find("heavy"))
@contextmanager
def the_manifest_imports_torch() -> Iterator[None]:
    """What describes the backend brings in what it runs on."""
    with TemporaryDirectory() as folder:
        info = Path(folder, "rl_heavy-1.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(_METADATA)
        (info / "entry_points.txt").write_text(_ENTRY_POINT)
        Path(folder, "rl_heavy_manifest.py").write_text(_MANIFEST)
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        with (
            mock.patch.object(sys, "path", [folder, *sys.path]),
            mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(paths)),
        ):
            try:
                yield
            finally:
                sys.modules.pop("rl_heavy_manifest", None)


@breaks("D5", checks="D5", of=lambda: Target.find("reference"))
def the_workers_traceback_is_lost() -> AbstractContextManager[Any]:
    """Of an error in a worker, its message is all that arrives."""
    return mock.patch.object(WorkerError, "remote_traceback", "")


@breaks("A2", checks="A2 and (decoding or context)", of=lambda: Target.find("reference"))
def long_outputs_drift() -> AbstractContextManager[Any]:
    """Each token that an output has makes the engine a little more certain."""
    honest = ReferenceGeneration.step

    def step(engine: Any, row: Any, logits: Any, sampling: Any) -> None:
        honest(engine, row, logits * (1 + 0.05 * len(row.new)), sampling)

    return mock.patch.object(ReferenceGeneration, "step", step)
