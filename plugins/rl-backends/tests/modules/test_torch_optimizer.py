"""Steps through masters, whoever brings the gradients there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_backends.torch.optimizer import Optimizer
from rl_core.errors import CapabilityError

SETTINGS = {"weight_decay": 0.1, "betas": (0.8, 0.9)}


def linear(dtype: torch.dtype) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3).to(dtype)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(step))


def optimizer_of(model: nn.Module, *, collects: bool = True) -> Optimizer:
    return Optimizer(dict(model.named_parameters()), SETTINGS, collects=collects)


def backward(model: nn.Linear, step: int) -> None:
    model(inputs(step).to(model.weight.dtype)).float().pow(2).sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_a_trainer_brings_are_as_good_as_those_that_are_collected(dtype):
    plain, own = linear(dtype), linear(dtype)
    collecting, given = optimizer_of(plain), optimizer_of(own, collects=False)
    for step in range(3):
        backward(plain, step)
        backward(own, step)
        for name, parameter in own.named_parameters():
            assert parameter.grad is not None
            given.masters[name].grad = parameter.grad.float()
        assert collecting.gradients().keys() == {"weight", "bias"}
        for optimizer in (collecting, given):
            optimizer.step(1e-2)
            optimizer.clear()
            assert not optimizer.gradients()
    for ours, theirs in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.grad is None
    for name, master in given.masters.items():
        assert torch.equal(master, collecting.masters[name])
        assert (master is given.parameters[name]) == (dtype == torch.float32)


def test_small_gradients_add_up_in_the_master():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = optimizer_of(model)
    for value in (256.0, 1.0, 1.0):  # in bfloat16 256 + 1 is 256
        (model.weight * value).sum().backward()
    assert model.weight.grad is None
    assert optimizer.gradients()["weight"].item() == 258


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_goes_on_where_it_was_taken(dtype):
    one, other = linear(dtype), linear(dtype)
    first, second = optimizer_of(one), optimizer_of(other)
    backward(one, 0)
    first.step(1e-2)
    first.clear()
    state = {name: tensor.clone() for name, tensor in first.state().items()}
    other.load_state_dict(one.state_dict())
    assert set(second.expected_state(state)) == {n for n in state if not n.startswith("step.")}
    second.load_state(state)
    for model, optimizer in ((one, first), (other, second)):
        backward(model, 1)
        optimizer.step(1e-2)
    assert all(map(torch.equal, one.parameters(), other.parameters()))


def test_weight_decay_leaves_biases_out():
    model = linear(torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model)
    optimizer.set_zero_gradients({"weight", "bias"})
    optimizer.step(0.5)
    torch.testing.assert_close(model.weight, before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.bias, before["bias"])


def test_float16_is_refused():
    with pytest.raises(CapabilityError, match="weight is float16"):
        optimizer_of(linear(torch.float16))
