"""What vLLM computes in another way than transformers is found when an engine is built."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from rl_core.errors import CapabilityError


class MambaMixer2(nn.Module):
    """Has the name of vLLM's."""


class Layer(nn.Module):
    def __init__(self, limit: tuple[float, float]) -> None:
        super().__init__()
        self.time_step_limit = limit


@pytest.mark.engine
@pytest.mark.parametrize("lowest", [0.001, 0.0, 1e-9])
def test_time_steps_that_only_transformers_limits_are_refused(lowest):
    from rl_vllm.weights import check_time_steps

    reference = nn.Sequential(Layer((lowest, math.inf)))
    check_time_steps(nn.Sequential(nn.Linear(2, 2)), reference)
    if lowest < 1e-6:
        check_time_steps(nn.Sequential(MambaMixer2()), reference)
        return
    with pytest.raises(CapabilityError, match=r"at least 0\.001") as caught:
        check_time_steps(nn.Sequential(MambaMixer2()), reference)
    assert "time_step_min" in caught.value.fix


@pytest.mark.engine
def test_attention_refuses_keys_of_more_heads_than_it_computes_with(imported, monkeypatch):
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.platforms import current_platform

    from rl_vllm.loading import watch_attention

    if not current_platform.is_cpu():
        pytest.skip("on the CPU alone")
    monkeypatch.setattr(Attention, "forward", lambda self, query, key, value: "computed")
    watch_attention()
    layer = SimpleNamespace(layer_name="model.layers.0.attn", num_heads=4, num_kv_heads=2)
    layer.head_size = 8
    query, key, repeated = torch.zeros(5, 32), torch.zeros(5, 16), torch.zeros(5, 32)
    assert Attention.forward(layer, query, key, key) == "computed"
    assert Attention.forward(layer, query, None, None) == "computed"
    with pytest.raises(CapabilityError, match=r"layers\.0\.attn gets keys of 4 heads"):
        Attention.forward(layer, query, repeated, repeated)
