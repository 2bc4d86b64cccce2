"""What a refit of SGLang's weights begins with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch
from rl_backends.engine.rearranged import RearrangedLayers
from rl_backends.engine.weights import CheckpointModel
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import TensorSpec
from rl_sglang.cpu import stand_in
from rl_sglang.loading import DerivedTensors
from rl_sglang.weights import EngineWeights, ModelSink


class Weights(SimpleNamespace):
    """Of a model whose loader cannot be followed, if ``followed`` is False."""

    @property
    def pieces(self) -> list[Any]:
        if not self.followed:
            raise CapabilityError("its loader puts two tensors together")
        return []

    @property
    def layers(self) -> RearrangedLayers:
        """None: SGLang has all weights as its loader wrote them."""
        return RearrangedLayers(nn.Module(), None, lambda _: None, lambda _: None)

    def check(self) -> None:
        """Nothing was derived from weights."""

    def renew(self) -> None:
        """Its loader only copies."""

    def check_loaded(self) -> None:
        raise ConfigError("the files lack tensors")


@pytest.mark.parametrize(
    ("followed", "error"), [(False, CapabilityError), (True, ConfigError)], ids=str
)
def test_a_loader_that_cannot_be_followed_is_no_fault_of_the_files(followed, error):
    weights: Any = Weights(followed=followed, device=torch.device("cpu"))
    with pytest.raises(error):
        ModelSink(weights).begin(0)


class GemmaNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("gemma_weight", torch.ones(3))

    def refresh_gemma_weight(self) -> None:
        self.gemma_weight.copy_(self.weight).add_(1)


def test_what_norms_keep_of_their_weight_follows_a_refit():
    model = nn.Sequential(GemmaNorm(), nn.Linear(1, 1))
    ModelSink(Weights(model=model, device=torch.device("cpu"))).finish(1)
    assert model[0].gemma_weight.tolist() == [2.0, 2.0, 2.0]


def test_files_are_looked_at_before_the_first_refit_alone():
    weights: Any = Weights(followed=True, device=torch.device("cpu"))
    ModelSink(weights).begin(1)


class Latents(nn.Module):
    """Keeps two tensors that it computed of its weight; one of them is computed once alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3) + 1, requires_grad=False)
        self.once = self.weight * 2
        self.post_load_weights()

    def post_load_weights(self) -> None:
        self.turned = self.weight.T.contiguous()


def test_what_sglang_computes_again_is_renewed_in_place_and_nothing_else():
    model = Latents()
    turned, once = model.turned, model.once.clone()
    derived = DerivedTensors(model, ["turned", "once", "elsewhere.turned"])
    assert derived.renewed == ["turned"]
    assert torch.equal(model.once, once)
    model.weight.neg_()
    derived.renew()
    assert model.turned is turned
    assert torch.equal(turned, model.weight.T)


class Linear(nn.Module):
    """A layer of which SGLang's method, and it alone, knows how the weight is kept."""

    def __init__(self, method: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 6), requires_grad=False)
        self.quant_method = method


class Packed(nn.Module):
    def __init__(self, method: Any) -> None:
        super().__init__()
        self.proj = Linear(method)

    def load_weights(self, weights: Any) -> None:
        for _, tensor in weights:
            self.proj.weight.data.copy_(tensor)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_layer_that_sglang_rearranges_after_loading_is_renewed_by_its_method(monkeypatch):
    """As kernels of AMX have it; the packed weight has another shape than the checkpoint's."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    stand_in()
    from sglang.srt.layers.quantization.base_config import QuantizeMethodBase

    class Method(QuantizeMethodBase):
        def create_weights(self, layer: Any, *_: Any, **__: Any) -> None:
            """The layer has made its own."""

        def apply(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
            return x @ layer.weight.view(3, 4, 2).permute(1, 0, 2).reshape(4, 6).T

        def process_weights_after_loading(self, layer: Any) -> None:
            packed = layer.weight.view(4, 3, 2).permute(1, 0, 2).reshape(12, 2)
            layer.weight = nn.Parameter(packed, requires_grad=False)

    tensors = [torch.randn(4, 6, generator=torch.Generator().manual_seed(n)) for n in (0, 1)]
    model, method = Packed(Method()), Method()
    watch = LoadWatch(model, "SGLang")
    model.load_weights([("proj.weight", tensors[0])])
    watch.weights_loaded(model)
    method.process_weights_after_loading(model.proj)
    watch.hooks_finished(model)
    kept = model.proj.weight

    checkpoint = CheckpointModel("", torch.float32, trust=False)
    vars(checkpoint)["specs"] = [TensorSpec("proj.weight", (4, 6), "float32")]
    vars(checkpoint)["published"] = dict
    config = SimpleNamespace(quantization=None)
    server = SimpleNamespace(tp_size=1, load_format="dummy")
    runner = SimpleNamespace(model=model, model_config=config, server_args=server)
    sink = ModelSink(EngineWeights(runner, checkpoint))
    sink.begin(0)
    [spec] = sink.specs()
    sink.write("proj.weight", 0, tensors[1].flatten(), of=spec)
    sink.finish(1)
    assert model.proj.weight is kept
    x = torch.randn(3, 6)
    assert torch.allclose(method.apply(model.proj, x), x @ tensors[1].T)
