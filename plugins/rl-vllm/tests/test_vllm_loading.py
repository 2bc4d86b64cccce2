"""What vLLM makes of weights, and what it makes of its own configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch
from rl_vllm.loading import _SCALES


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


def test_every_copy_of_a_scale_of_the_cache_is_renewed_by_a_refit_and_is_no_derived_weight():
    attention = pytest.importorskip("vllm.model_executor.layers.attention.attention")
    from rl_vllm.weights import ModelSink

    layer = nn.Linear(2, 2)
    attention.set_default_quant_scales(layer, register_buffer=True)
    layer.kv_cache_dtype = "fp8_e4m3"
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"attn": layer})])})
    seen = LoadWatch(model, "vLLM", _SCALES)
    seen.weights_loaded(model)
    # As on a GPU, where loading makes them anew on another device.
    layer._k_scale_cpu, layer._v_scale_cpu = torch.tensor(3.0), torch.tensor(3.0)
    seen.hooks_finished(model)
    assert not seen.derived
    sink = ModelSink.__new__(ModelSink)  # without an engine
    sink._weights = SimpleNamespace(model=nn.ModuleDict({"model": model}), eager=True)
    sink.scale_kv({f"layer_0.{which}_scale": 0.5 for which in "qkv"})
    held = {
        name: one for name, one in {**vars(layer), **layer._buffers}.items() if "_scale" in name
    }
    others = {name for name, one in held.items() if float(one) != 0.5}
    assert others == {"_prob_scale", "_prob_scale_float"}
