"""What is made of weights while a model is loaded is seen, wherever it is kept."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch, check_derived
from rl_core.errors import CapabilityError


@dataclass
class Kernel:
    """As the ``quant_method`` or ``impl`` of an engine's layer."""

    scale: object = None


@dataclass(frozen=True)
class Activation:
    """As vLLM's ``ApplyMoEActivationConfig``, which a layer's hook makes of its configuration."""

    limit: float | None = None
    alpha: float = 1.0
    beta: float = 0.0


class Experts:
    """As vLLM's ``FusedMoEExperts`` in its ``moe_kernel``."""

    def __init__(self, activation: Activation) -> None:
        self.activation_config = activation


class Slotted:
    __slots__ = ("kept",)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 6), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(4), requires_grad=False)
        self.register_buffer("cos_sin", torch.arange(8.0).cos(), persistent=False)
        self.register_buffer("scratch", torch.zeros(4))
        self.impl = Kernel()
        self.caches: dict[str, object] = {"positions": torch.arange(8)}
        self.eps = 1e-6
        self.moe_config = Kernel({"swiglu": (7.0, 1.702)})


def loaded(hook) -> tuple[nn.Module, LoadWatch]:
    """A model of one layer whose loading was watched, with what an engine's hooks would do."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer())
    loading = LoadWatch(model, "the engine", {"packed"})
    for parameter in model.parameters():
        parameter.normal_()
    loading.weights_loaded(model)
    hook(model[0])
    loading.hooks_finished(model)
    return model, loading


def copy(layer: Layer) -> torch.Tensor:
    return layer.weight.detach().clone()


def in_a_closure(layer: Layer) -> None:
    weight = copy(layer)
    layer.forward = lambda x: x @ weight.t()


def in_a_slot(layer: Layer) -> None:
    layer.helper = Slotted()
    layer.helper.kept = copy(layer)


def in_a_hidden_module(layer: Layer) -> None:
    hidden = nn.Linear(6, 4)
    hidden.weight.data.copy_(layer.weight)
    layer.hidden = [hidden]


MADE = {
    "an attribute": lambda layer: setattr(layer, "cached", copy(layer)),
    "another dtype": lambda layer: setattr(layer, "cached", layer.weight.to(torch.bfloat16)),
    "a buffer, in place": lambda layer: layer.scratch.copy_(layer.bias),
    "a dict": lambda layer: layer.caches.update(weight=copy(layer)),
    "a list in a dict": lambda layer: layer.caches.update(weights=[(copy(layer),)]),
    "a dataclass": lambda layer: setattr(layer.impl, "scale", layer.weight.abs().max()),
    "a number": lambda layer: setattr(layer.impl, "scale", float(layer.weight.abs().max())),
    "an array": lambda layer: setattr(layer, "cached", copy(layer).numpy()),
    "a number of a kernel": lambda layer: setattr(
        layer.impl, "scale", Experts(Activation(alpha=float(layer.weight.abs().max())))
    ),
    "a closure": in_a_closure,
    "a partial function": lambda layer: setattr(layer, "f", functools.partial(int, copy(layer))),
    "a slot": in_a_slot,
    "a hidden module": in_a_hidden_module,
}


@pytest.mark.parametrize("where", list(MADE))
def test_what_was_made_of_weights_is_found(where):
    _, loading = loaded(MADE[where])
    assert len(loading.derived) >= 1
    assert all(path.startswith("0.") for path in loading.derived)
    assert loading.rearranged == []


def follow(layer: Layer) -> None:
    layer.absorbed = layer.weight.view(2, 2, 6).transpose(1, 2)
    layer.first = [layer.weight[0]]


ALLOWED = {
    "nothing": lambda layer: None,
    "views of a parameter": follow,
    "packed weights that are packed again": lambda layer: setattr(layer, "packed", copy(layer)),
    "a buffer that is made anew": lambda layer: layer.register_buffer("packed", copy(layer)),
    "the same in a wider dtype": lambda layer: setattr(layer.bias, "data", layer.bias.double()),
    "a table that was there before": lambda layer: setattr(layer, "eps", 1e-6),
    "a kernel with its defaults": lambda layer: setattr(layer.impl, "scale", Experts(Activation())),
    "a kernel with the model's settings": lambda layer: setattr(
        layer.impl, "scale", Experts(Activation(*layer.moe_config.scale["swiglu"]))
    ),
}


@pytest.mark.parametrize("what", list(ALLOWED))
def test_what_follows_the_weights_or_does_not_depend_on_them_is_allowed(what):
    _, loading = loaded(ALLOWED[what])
    assert loading.derived == loading.rearranged == []


REARRANGED = {
    "0.weight": lambda layer: setattr(layer.weight, "data", layer.weight.t().contiguous()),
    "0.bias": lambda layer: layer.bias.data.mul_(2),
}


@pytest.mark.parametrize("name", list(REARRANGED))
def test_weights_that_hooks_rearrange_are_found(name):
    _, loading = loaded(REARRANGED[name])
    assert loading.rearranged == [name]


def test_a_copy_that_a_layer_makes_while_it_computes_is_found_and_memory_to_work_in_is_not():
    model, loading = loaded(lambda layer: None)
    layer = model[0]
    layer.workspace = torch.randn(4, 6)
    layer.impl.cache = [layer.weight.view(-1)]
    loading.find_new_copies(model)
    assert loading.derived == []
    layer.impl.scale = {"turned": layer.weight.t().contiguous().to(torch.float64)}
    loading.find_new_copies(model)
    assert loading.derived == ["0.impl.scale['turned']"]


def test_the_error_names_module_and_attribute_and_the_way_out():
    model, loading = loaded(MADE["a dataclass"])
    with pytest.raises(
        CapabilityError, match=r"the engine's Sequential.*0\.impl\.scale\n"
    ) as caught:
        loading.check(model, fix="use another")
    assert caught.value.fix == "use another"


def test_a_model_that_was_not_watched_and_one_that_keeps_more_are_refused():
    model, how = nn.Linear(2, 2), {"fix": "use another", "without_refits": "set my_cfg.refit"}
    with pytest.raises(CapabilityError, match="how MyEngine loaded it was not recorded") as caught:
        check_derived(model, "MyEngine", **how)
    assert "rl-myengine" in caught.value.fix
    seen = LoadWatch(model, "MyEngine")
    seen.weights_loaded(model)
    model.kept = torch.ones(2)
    seen.hooks_finished(model)
    with pytest.raises(CapabilityError, match=r"MyEngine keeps other tensors .*: kept\n") as caught:
        check_derived(model, "MyEngine", **how)
    assert caught.value.fix == "use another; to generate without refits, set my_cfg.refit"
