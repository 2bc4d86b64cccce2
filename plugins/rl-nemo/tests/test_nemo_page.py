"""The page for those who come from NeMo RL, and the README: what they show works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nemo_loops
import pytest
import torch
from test_nemo_configuration import POLICY

from rl_conformance.models import make_tiny_model

PLUGIN = Path(__file__).parents[1]
PAGE = PLUGIN.parents[1] / "docs" / "nemo.md"
PROMPTS = torch.randint(3, 200, (2, 5), generator=torch.Generator().manual_seed(0))


def blocks(page: Path) -> list[str]:
    return re.findall(r"(?ms)^```python\n(.*?)^```$", page.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def section(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Their policy section, for a model that is there, and the engine that needs no other."""
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    engine = {**POLICY["generation"], "backend": "hf", "max_new_tokens": 4}
    small = {"train_global_batch_size": 4, "train_micro_batch_size": 2, "precision": "float32"}
    return {**POLICY, **small, "model_name": str(path), "generation": engine}


@pytest.fixture
def names(section: dict[str, Any]) -> dict[str, Any]:
    """What the pages take for granted."""
    history: list[dict[str, float]] = []

    def grpo_train(policy: Any, generation: Any, *_: Any) -> None:
        history.extend(
            nemo_loops.grpo_train(
                policy,
                generation,
                nemo_loops.ClippedPG(),
                PROMPTS,
                lambda output: (output["output_ids"] < 140).float().mean(1),
                steps=2,
                samples=2,
            )
        )

    own = {"policy": section, "cluster": None, "path": section["model_name"], "dataloader": None}
    return {"config": {"policy": section}, "history": history, "grpo_train": grpo_train, **own}


def end(names: dict[str, Any]) -> None:
    assert names["generation"].weights_version == len(names["history"]) == 2
    assert names["history"][-1]["apart"] < 1e-4
    names["generation"].shutdown()
    names["policy"].shutdown()


def test_the_page(names: dict[str, Any]) -> None:
    loop, _, elsewhere = blocks(PAGE)  # the second one needs NeMo RL
    exec(loop, names)
    end(names)
    exec(elsewhere, names)
    assert names["translated"].config["vllm_cfg"] == names["own"]


def test_the_readme(names: dict[str, Any], section: dict[str, Any]) -> None:
    names["policy_config"] = {"backend": "hf", "model_name": section["model_name"]}
    names["generation_config"] = {**names["policy_config"], "max_new_tokens": 4}
    [loop] = blocks(PLUGIN / "README.md")
    exec(loop, names)
    end(names)
