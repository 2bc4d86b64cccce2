"""What a refit of SGLang's weights begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_core.errors import CapabilityError, ConfigError
from rl_sglang.weights import ModelSink


class Weights(SimpleNamespace):
    """Of a model whose loader cannot be followed, if ``followed`` is False."""

    @property
    def regions(self) -> dict[str, Any]:
        if not self.followed:
            raise CapabilityError("its loader puts two tensors together")
        return {}

    def check(self) -> None:
        """Nothing was derived from weights."""

    def check_loaded(self) -> None:
        raise ConfigError("the files lack tensors")


@pytest.mark.parametrize(
    ("followed", "error"), [(False, CapabilityError), (True, ConfigError)], ids=str
)
def test_a_loader_that_cannot_be_followed_is_no_fault_of_the_files(followed, error):
    weights: Any = Weights(followed=followed, device=torch.device("cpu"))
    with pytest.raises(error):
        ModelSink(weights).begin(0)


def test_files_are_looked_at_before_the_first_refit_alone():
    weights: Any = Weights(followed=True, device=torch.device("cpu"))
    ModelSink(weights).begin(1)
