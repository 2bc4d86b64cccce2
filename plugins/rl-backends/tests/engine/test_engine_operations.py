"""Activations of an engine that differ from those of transformers are found, and no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rl_backends.engine.operations import check_operations, left_out_settings
from rl_core.errors import CapabilityError


class Gated(nn.Module):
    """An activation of one half, times the other one, as engines fuse them."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return self.activation(first) * second


class Positions(nn.Module):
    """Takes more than one tensor, so that it is no activation."""

    def forward(self, positions: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return positions * query


def model(act: nn.Module, **others: nn.Module) -> nn.Module:
    parts = {"up": nn.Linear(2, 2), "act": act, **others}
    return nn.Sequential(nn.ModuleDict(parts))


def check(ours: nn.Module, theirs: nn.Module) -> None:
    theirs.config = getattr(theirs, "config", PretrainedConfig())
    check_operations(ours, theirs.to("meta"), engine="vLLM", without_refits="set it to False")


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (nn.GELU(), nn.GELU(approximate="tanh")),
        (Gated(nn.GELU()), nn.GELU(approximate="tanh")),
        (nn.SiLU(), nn.ReLU()),
    ],
)
def test_an_activation_by_another_formula_is_named(ours, theirs):
    with pytest.raises(CapabilityError, match=r"activation 0\.act .* differs") as caught:
        check(model(ours), model(theirs))
    assert "set it to False" in caught.value.fix


@pytest.mark.parametrize("ours", [nn.SiLU(), Gated(nn.SiLU())])
def test_the_same_activation_passes_also_with_a_gate(ours):
    check(model(ours), model(nn.SiLU()))


def test_what_is_no_activation_or_has_weights_is_not_compared():
    ours = model(nn.SiLU(), positions=Positions(), norm=nn.LayerNorm(4), only=nn.ReLU())
    check(ours, model(nn.SiLU(), positions=nn.ReLU(), norm=nn.LayerNorm(4)))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [
        ("olmoe", {"clip_qkv": 0.5}),
        ("olmoe", {"norm_topk_prob": True}),
        ("gpt2", {"scale_attn_weights": False}),
    ],
)
def test_a_setting_that_the_engine_never_looks_at_is_named(kind, asked):
    def made(**settings: object) -> nn.Module:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(kind, num_hidden_layers=1, **settings)
            )

    [(key, value)] = asked.items()
    with pytest.raises(CapabilityError, match=f"leaves out {key}={value}"):
        check(model(nn.SiLU()), made(**asked))
    check(model(nn.SiLU()), made())
    assert not [*left_out_settings(made(), made(**asked))]
