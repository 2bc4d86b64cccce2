"""The weights of the start: with a second model, swapped in from a file, or not at all."""

from __future__ import annotations

import tempfile

import pytest
import torch
from module_weights import weights
from simple_pair import same
from torch import nn

from rl_backends.torch.reference import make_reference
from rl_core.errors import CapabilityError, ConfigError


class Odd(nn.Module):
    """A tied weight, one that is not contiguous, and a view of a padded one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.b = self.a
        self.c = nn.Parameter(torch.arange(8.0)[:5])
        self.register_buffer("d", torch.tensor([7]))


def change(model: nn.Module) -> None:
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.add_(1)


@pytest.mark.parametrize("kind", ["swap", "copy"])
def test_the_weights_of_the_start_are_there_for_a_while(kind: str):
    model = Odd()
    start = weights(model)
    reference = make_reference(kind, model)
    for _ in range(2):
        reference.keep(model)
        change(model)
    own = weights(model)
    with reference.using(model) as found:
        assert same(weights(found), start)
    assert same(weights(model), own)
    with pytest.raises(RuntimeError, match="a fault"), reference.using(model):
        raise RuntimeError("a fault")
    assert same(weights(model), own)
    reference.close()


def test_before_any_step_a_swap_is_the_model_itself():
    model = Odd()
    with make_reference("swap", model).using(model) as found:
        assert found is model


def test_swapped_weights_come_back_where_tensors_overlap():
    model = torch.nn.Module()
    whole = torch.arange(6.0)
    model.a = torch.nn.Parameter(whole[:4])
    model.b = torch.nn.Parameter(whole[2:])
    reference = make_reference("swap", model)
    reference.keep(model)
    with torch.no_grad():
        whole += 10
    with reference.using(model):
        assert whole.tolist() == [0, 1, 2, 3, 4, 5]
    assert whole.tolist() == [10, 11, 12, 13, 14, 15]


def test_none_refuses():
    model = Odd()
    reference = make_reference("none", model)
    reference.keep(model)
    with pytest.raises(CapabilityError, match="reference='none'"):
        reference.using(model)


@pytest.mark.parametrize("failing", ["save_file", "tempfile.TemporaryDirectory"])
def test_a_file_that_cannot_be_written_is_named_and_tried_again(monkeypatch, failing):
    module = Odd()
    reference = make_reference("swap", module)
    with monkeypatch.context() as full:

        def no_room(*_: object, **__: object) -> None:
            raise OSError("No space left on device")

        full.setattr(f"rl_backends.torch.reference.{failing}", no_room)
        with pytest.raises(ConfigError, match=f"{tempfile.gettempdir()}: No space left"):
            reference.keep(module)
    reference.keep(module)
    with reference.using(module) as same:
        assert same is module
    reference.close()
