"""Tiny checkpoints, made once per session, and policies that end with the test."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_conformance.models import make_tiny_model

with warnings.catch_warnings():  # megatron-core says at import what it does not find
    warnings.simplefilter("ignore")
    import rl_megatron.policy  # noqa: F401


#: Qwen3 with experts, on top of the suite's families.
EXPERTS = {
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}


def make(path: Path, family: str = "llama", **overrides: Any) -> Path:
    if family == "qwen3_moe":
        return make_tiny_model(path, "qwen3", **{**EXPERTS, **overrides})
    return make_tiny_model(path, family, **overrides)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``tiny(family="llama", **overrides)`` is the directory of such a model."""
    found: dict[str, Path] = {}

    def get(family: str = "llama", **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in found:
            found[key] = make(tmp_path_factory.mktemp("models") / family, family, **overrides)
        return found[key]

    return get


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Here as in workers: with more, sums are made in another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def built() -> Iterator[Callable[[Any], Any]]:
    """``built(backend)`` is that backend, which ends with the test."""
    made: list[Any] = []
    yield lambda backend: (made.append(backend), backend)[1]
    for backend in made:
        backend.shutdown()


def pytest_itemcollected(item: pytest.Item) -> None:
    """megatron-core warns of its own ways, as torch and transformers do."""
    for category in ("DeprecationWarning", "FutureWarning", "UserWarning"):
        item.add_marker(pytest.mark.filterwarnings(f"ignore::{category}:megatron.*"))
