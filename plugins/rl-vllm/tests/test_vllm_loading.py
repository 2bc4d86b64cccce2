"""What vLLM makes of weights, and what it makes of its own configuration."""

from __future__ import annotations

import pytest
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch


def test_the_configuration_of_a_kernel_that_a_hook_makes_is_not_made_of_weights():
    activation = pytest.importorskip("vllm.model_executor.layers.fused_moe.activation")
    if not hasattr(activation, "ApplyMoEActivationConfig"):
        pytest.skip("an older vLLM, which has no such class")
    model = nn.Linear(2, 2)
    seen = LoadWatch(model, "vLLM")
    seen.weights_loaded(model)
    model.moe_kernel = {"fused_experts": activation.ApplyMoEActivationConfig()}
    seen.hooks_finished(model)
    assert not seen.derived
    model.moe_kernel = activation.ApplyMoEActivationConfig(alpha=float(model.weight.detach().max()))
    seen.hooks_finished(model)
    assert seen.derived == ["moe_kernel.alpha"]
