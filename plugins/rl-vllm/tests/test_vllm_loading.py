"""What vLLM makes of weights is refused with the way out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch
from rl_core.errors import CapabilityError
from rl_vllm import loading


def test_a_model_that_was_not_watched_and_one_that_keeps_more_are_refused(monkeypatch):
    model = nn.Linear(2, 2)
    with pytest.raises(CapabilityError, match="nobody saw how vLLM loaded its Linear"):
        loading.check_derived(model)
    seen = LoadWatch(model, "vLLM")
    seen.weights_loaded(model)
    model.kept = torch.ones(2)
    seen.hooks_finished(model)
    monkeypatch.setitem(loading._watched, model, seen)
    with pytest.raises(CapabilityError, match=r"vLLM keeps something .*: kept\n") as caught:
        loading.check_derived(model)
    assert "vllm_cfg.refit" in caught.value.fix


def test_the_configuration_of_a_kernel_that_a_hook_makes_is_not_made_of_weights():
    activation = pytest.importorskip("vllm.model_executor.layers.fused_moe.activation")
    model = nn.Linear(2, 2)
    seen = LoadWatch(model, "vLLM")
    seen.weights_loaded(model)
    model.moe_kernel = {"fused_experts": activation.ApplyMoEActivationConfig()}
    seen.hooks_finished(model)
    assert not seen.derived
    model.moe_kernel = activation.ApplyMoEActivationConfig(alpha=float(model.weight.detach().max()))
    seen.hooks_finished(model)
    assert seen.derived == ["moe_kernel.alpha"]
