"""A checkpoint of an architecture that this package does not know by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_core.errors import ConfigError
from rl_megatron.policy import MegatronPolicy

OPTIONS: dict[str, Any] = {"optimizer": {"lr": 1e-3, "eps": 1e-3}}


@pytest.fixture
def acme(tiny: Callable[..., Path], tmp_path: Path) -> Path:
    """With the layout and the names of Llama."""
    path = tmp_path / "acme"
    shutil.copytree(tiny("llama"), path)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "acme", "architectures": ["AcmeForCausalLM"]}
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_it_trains_as_that_whose_layout_it_has_and_is_exported_as_itself(
    acme, tiny, built, tmp_path
):
    policy = built(MegatronPolicy(str(acme), architecture="llama", **OPTIONS))
    other = built(MegatronPolicy(str(tiny("llama")), **OPTIONS))
    data = training_batch((9, 4, 15, 2))
    found, expected = (p.train(data, NegativeLogLikelihood())["loss"] for p in (policy, other))
    assert found == expected
    policy.export_hf(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "acme"
    again = built(MegatronPolicy(str(tmp_path / "out"), architecture="llama"))
    assert again.get_logprobs(data)["logprobs"].equal(policy.get_logprobs(data)["logprobs"])


def test_without_the_architecture_it_is_named_and_what_to_do(acme):
    with pytest.raises(ConfigError, match=r"'acme'; rl-megatron supports") as raised:
        MegatronPolicy(str(acme))
    assert "set architecture" in raised.value.fix
