"""A policy whose weights are spread over ranks, and an engine, for the tests of several ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rl_conformance.reference import SHARDED
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_core.batch import BatchedDataDict
from rl_hosting.cluster import Cluster, RemotePolicy

ENTRY = "[rl_core.backends]\nreference-sharded=rl_conformance.reference:SHARDED\n"
TRAINING = {"optimizer": {"lr": 1e-2}, "torch_dtype": "float32"}


def manifest_in(site: Path) -> Any:
    """The manifest; workers find the backend by an entry point in a directory of its own."""
    info = site / "rl_sharded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-sharded\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY)
    path = os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    return replace(SHARDED, environment={"PYTHONPATH": path})


def config_of(model: Path, **more: Any) -> dict[str, Any]:
    return {"backend": "rl-sharded:reference-sharded", "model_name": str(model), **TRAINING, **more}


@contextmanager
def sharded_policy(
    cluster: Cluster, manifest: Any, model: Path, **config: Any
) -> Iterator[RemotePolicy]:
    policy = RemotePolicy(cluster, manifest, config_of(model, **config), call_deadline_s=120)
    try:
        yield policy
    finally:
        policy.shutdown()


def alone(model: Path) -> ReferencePolicy:
    return ReferencePolicy(str(model), **TRAINING)


def engine_of(model: Path) -> ReferenceGeneration:
    """An engine with other weights than the model's."""
    engine = ReferenceGeneration(str(model))
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    return engine


def batch() -> BatchedDataDict[Any]:
    ids = torch.randint(3, 269, (8, 20), generator=torch.Generator().manual_seed(7))
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.tensor([20, 3, 11, 7, 16, 5, 9, 12]),
            "token_mask": torch.ones(8, 20),
            "sample_mask": torch.ones(8),
        }
    )


def sources(policy: RemotePolicy) -> list[dict[str, int]]:
    return policy._group.attributes("sources")
