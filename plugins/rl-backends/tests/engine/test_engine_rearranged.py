"""Layers that an engine rearranges or quantises: refits leave what a new engine would have."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from rl_backends.engine.derived_weights import LoadWatch
from rl_backends.engine.rearranged import RearrangedLayer
from rl_backends.engine.weights import CheckpointModel, LoadedSink, LoadedWeights
from rl_conformance.doubles import Engine, Trainer
from rl_core.errors import CapabilityError, RefitCorrupted, RefitError, WeightsTornError
from rl_core.interfaces import TensorSpec
from rl_core.weights import refit

WIDTH, EXPERTS = 6, 3
SHAPES = {
    "norm": (WIDTH,),
    "0.q": (4, WIDTH),
    "0.k": (2, WIDTH),
    "1.q": (4, WIDTH),
    "1.k": (2, WIDTH),
    **{f"experts.{index}": (5, WIDTH) for index in range(EXPERTS)},
    "packed": (8, WIDTH),
    "latent": (4, WIDTH),
}
SPECS = [TensorSpec(name, shape, "float32") for name, shape in SHAPES.items()]


class Kernel:
    """As a kernel that an engine's hook makes: it computes with the scale that it was given."""

    def __init__(self, scale: torch.Tensor) -> None:
        self.quant_config = {"scale": scale}


class Method(nn.Module):
    """As the ``quant_method`` of an engine's layer; one hook serves several kinds of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Kernel | None = None

    def process(self, layer: Any) -> None:
        if self.kernel is not None:  # as hooks that run once do
            return
        scale = layer.weight.abs().amax(-1, keepdim=True) / 127
        numbers = (layer.weight / scale).round().to(torch.int8)
        layer.weight = nn.Parameter(numbers.transpose(-1, -2), requires_grad=False)
        layer.scale = nn.Parameter(scale, requires_grad=False)
        self.kernel = Kernel(layer.scale * 2)


class Quantised(nn.Module):
    """Numbers of 8 bits, transposed, with a scale per row; ``online`` while it is loaded."""

    def __init__(self, *shape: int, online: bool) -> None:
        super().__init__()
        device = "meta" if online else "cpu"
        weight = torch.full(shape, -1.0, device=device)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.method, self.online, self.left = Method(), online, weight.numel()

    def load(self, place: Any, tensor: torch.Tensor) -> None:
        if self.weight.is_meta and self.online:
            self.weight = nn.Parameter(torch.empty(self.weight.shape), requires_grad=False)
        self.weight.data[place].copy_(tensor)
        self.left -= tensor.numel()
        if self.online and not self.left:
            self.method.process(self)


class Packed(nn.Module):
    """Its hook puts the weight in another order, in place; shape and dtype stay."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)

    def process(self) -> None:
        self.weight.data = self.weight.detach().view(2, -1).t().contiguous().view(self.weight.shape)


class Latent(nn.Module):
    """Keeps the weight, and computes with copies that its hook makes where there are none."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, -1.0), requires_grad=False)
        self.impl = {"absorbed": None}

    def process(self) -> None:
        if self.impl["absorbed"] is None:
            self.impl["absorbed"] = (self.weight.detach() * 3).t().contiguous()
        if not hasattr(self, "wide"):
            self.wide = nn.Parameter(self.weight.double(), requires_grad=False)


class Model(nn.Module):
    """A test double of an engine's model."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.full(SHAPES["norm"], -1.0), requires_grad=False)
        self.fused = nn.ModuleList(Quantised(6, WIDTH, online=bool(i)) for i in (0, 1))
        self.experts = Quantised(EXPERTS, 5, WIDTH, online=True)
        self.packed, self.latent = Packed(*SHAPES["packed"]), Latent(*SHAPES["latent"])

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            layer, _, part = name.partition(".")
            if name == "norm":
                self.norm.data.copy_(tensor)
            elif layer == "experts":
                self.experts.load(int(part), tensor)
            elif part:
                self.fused[int(layer)].load(slice(0, 4) if part == "q" else slice(4, 6), tensor)
            else:
                getattr(self, name).weight.data.copy_(tensor)

    def run_hooks(self) -> None:
        for module in self.modules():
            if isinstance(module, Quantised):
                module.method.process(module)
            elif isinstance(module, Packed | Latent):
                module.process()


class Weights(LoadedWeights):
    """Where the double keeps the tensors."""

    def check(self) -> None:
        self.check_derived("The double", fix="use another")

    def hook(self, module: nn.Module) -> Any:
        if isinstance(module, Quantised):
            return partial(module.method.process, module)
        return module.process if isinstance(module, Packed | Latent) else None

    @contextmanager
    def loading(self):
        layers = [one for one in self.model.modules() if isinstance(one, Quantised)]
        was = [one.online for one in layers]
        for one in layers:
            one.online = False  # the loader writes at once
        yield
        for one, online in zip(layers, was, strict=True):
            one.online = online


def new_weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def loaded(tensors: dict[str, torch.Tensor]) -> Weights:
    """An engine that was started with a checkpoint."""
    model = Model()
    watch = LoadWatch(model, "The double")
    model.load_weights(tensors.items())
    watch.weights_loaded(model)
    model.run_hooks()
    watch.hooks_finished(model)
    checkpoint = CheckpointModel("", torch.float32, trust=False)
    vars(checkpoint)["specs"] = SPECS
    vars(checkpoint)["published"] = dict
    return Weights(model, checkpoint, workers=1, without_refits="build it without")


def held(weights: Weights) -> dict[str, torch.Tensor]:
    """All that the double computes with."""
    model = weights.model
    found = dict(model.named_parameters()) | {"absorbed": model.latent.impl["absorbed"]}
    layers = [one for one in model.modules() if isinstance(one, Quantised)]
    kernels = {f"kernel{i}": one.method.kernel for i, one in enumerate(layers)}
    return found | {name: kernel.quant_config["scale"] for name, kernel in kernels.items()}


def same(weights: Weights, tensors: dict[str, torch.Tensor]) -> bool:
    wanted, got = held(loaded(tensors)), held(weights)
    assert wanted.keys() == got.keys()
    return all(torch.equal(got[name], one) for name, one in wanted.items())


@pytest.fixture
def pair():
    """``pair(weights)`` is a trainer and an engine of them."""
    ends = []

    def make(weights: Weights) -> tuple[Trainer, Engine]:
        trainer = Trainer(new_weights(1))
        engine = Engine({}, sink=lambda: LoadedSink(weights))
        ends.extend((trainer, engine))
        return trainer, engine

    yield make
    for end in ends:
        end.close()


def update(trainer: Trainer, seed: int, *names: str) -> None:
    for name, tensor in new_weights(seed).items():
        if not names or name in names:
            trainer.tensors[name].copy_(tensor)


def test_layers_are_found_by_what_their_hooks_do():
    layers = loaded(new_weights(0)).layers
    assert sorted(layers.collected) == ["experts", "fused.0", "fused.1", "packed"]
    assert sorted(layers.derived) == ["latent"]


WAYS = {
    "wire": {},
    "installed": {"verify": "installed"},
    "pieces": {"bucket_bytes": 128, "mode": "packed"},
    "delta": {"verify": "installed", "delta": True},
    "staged": {"verify": "installed", "isolation": "staged"},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_refit_leaves_what_a_new_engine_has_in_the_same_memory(way, pair):
    weights = loaded(new_weights(0))
    trainer, engine = pair(weights)
    addresses = {name: one.data_ptr() for name, one in held(weights).items()}
    for seed in (1, 2, 3):
        update(trainer, seed)
        refit(trainer, engine, **WAYS[way])
        assert same(weights, trainer.tensors)
    assert addresses == {name: one.data_ptr() for name, one in held(weights).items()}


def test_a_delta_sends_all_of_a_layer_when_one_of_its_tensors_has_changed(pair):
    weights = loaded(new_weights(0))
    trainer, engine = pair(weights)
    refit(trainer, engine)
    update(trainer, 2, "0.k", "experts.1")
    report = refit(trainer, engine, delta=True, verify="installed")
    assert report.skipped == 2  # of norm and latent, which are written in place
    assert same(weights, trainer.tensors)


def test_one_layer_after_the_other_has_memory_for_plain_weights(pair):
    weights = loaded(new_weights(0))
    refit(*pair(weights))
    layers = weights.layers.collected.values()
    largest = max(sum(one.nbytes for one in layer.plain.values()) for layer in layers)
    assert weights.layers.most_open_bytes == largest
    assert sum(layer.open_bytes for layer in layers) == 0


def fails_at(trainer: Trainer, name: str) -> None:
    def fail() -> None:
        raise RuntimeError("the trainer failed")

    trainer.on[name] = fail


def test_a_refit_that_fails_half_way_is_repaired_by_the_next(pair):
    weights = loaded(new_weights(0))
    trainer, engine = pair(weights)
    fails_at(trainer, "experts.2")
    with pytest.raises(RefitError):
        refit(trainer, engine, bucket_bytes=128)
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    trainer.on.clear()
    refit(trainer, engine, delta=True, verify="installed")
    assert same(weights, trainer.tensors)


def test_a_retry_counts_no_element_twice(pair):
    weights = loaded(new_weights(0))
    trainer, engine = pair(weights)
    left = [None, None]

    def fail_once() -> None:
        if left:
            left.pop()
            raise RefitError("the connection broke")

    trainer.on["experts.2"] = fail_once
    report = refit(trainer, engine, retries=3, bucket_bytes=128, verify="installed")
    assert report.attempts > 1
    assert same(weights, trainer.tensors)


def test_a_staged_refit_that_fails_gives_back_what_the_engine_had(pair):
    before = new_weights(0)
    weights = loaded(before)
    trainer, engine = pair(weights)
    engine.on["commit"] = lambda: 1 / 0
    sink = LoadedSink(weights)

    class Fails(LoadedSink):
        def finish(self, version: int) -> None:
            super().finish(version)
            if version:
                raise RuntimeError("the engine failed")

    engine._receiver._new_sink = lambda: Fails(weights)
    with pytest.raises(RefitError):
        refit(trainer, engine, isolation="staged")
    engine.receiver.check()
    assert same(weights, before)
    assert sink.always_sent


def write_all(sink: LoadedSink, tensors: dict[str, torch.Tensor], *without: str) -> None:
    sink.begin(1)
    for spec in SPECS:
        if spec.name not in without:
            sink.write(spec.name, 0, tensors[spec.name].flatten(), of=spec)


def test_a_layer_that_lacks_a_tensor_is_an_error_that_names_both():
    weights = loaded(new_weights(0))
    sink = LoadedSink(weights)
    write_all(sink, new_weights(1), "experts.1")
    with pytest.raises(RefitCorrupted, match=r"experts: .*experts\.1"):
        sink.finish(1)
    assert sum(layer.open_bytes for layer in weights.layers.collected.values()) > 0
    sink.fail()
    assert sum(layer.open_bytes for layer in weights.layers.collected.values()) == 0


def test_a_layer_of_which_nothing_came_is_an_error():
    sink = LoadedSink(loaded(new_weights(0)))
    write_all(sink, new_weights(1), "0.q", "0.k")
    with pytest.raises(RefitCorrupted, match=r"fused\.0"):
        sink.finish(1)


def test_elements_that_come_twice_do_not_make_a_layer_whole():
    weights = loaded(new_weights(0))
    sink, tensors = LoadedSink(weights), new_weights(1)
    sink.begin(1)
    by_name = {spec.name: spec for spec in SPECS}
    run = tensors["0.q"].flatten()
    for start, stop in ((0, 16), (8, 16), (0, 16), (20, 24), (16, 20)):
        assert not weights.layers.collected["fused.0"].renewed
        sink.write("0.q", start, run[start:stop], of=by_name["0.q"])
    assert weights.layers.collected["fused.0"].lacking() == ["0.k"]
    sink.write("0.k", 0, tensors["0.k"].flatten(), of=by_name["0.k"])
    assert weights.layers.collected["fused.0"].renewed


# -- mutants: each is noticed when what is installed is read --------------------------------------


def twice(monkeypatch: Any, weights: Weights) -> None:
    made = RearrangedLayer.renew

    def renew(self: RearrangedLayer, parameters: Any) -> None:
        made(self, parameters)
        if self.name == "packed":
            self.module.process()

    monkeypatch.setattr(RearrangedLayer, "renew", renew)


def not_at_all(monkeypatch: Any, weights: Weights) -> None:
    def renew(self: RearrangedLayer, parameters: Any) -> None:
        for key, one in self.plain.items():
            live = self.module._parameters[key]
            if live.shape == one.shape and live.dtype == one.dtype:
                live.copy_(parameters[key])
        self.drop()
        self.renewed = True

    monkeypatch.setattr(RearrangedLayer, "renew", renew)


def all_but_one(monkeypatch: Any, weights: Weights) -> None:
    made = RearrangedLayer.renew

    def renew(self: RearrangedLayer, parameters: Any) -> None:
        if self.name == "fused.1":
            self.drop()
            self.renewed = True
        else:
            made(self, parameters)

    monkeypatch.setattr(RearrangedLayer, "renew", renew)


def after_renewal(change: Any) -> Any:
    """A mutant that changes what the engine has once a layer is processed."""

    def mutant(monkeypatch: Any, weights: Weights) -> None:
        made = RearrangedLayer.renew

        def renew(self: RearrangedLayer, parameters: Any) -> None:
            before = self.copy()
            made(self, parameters)
            change(self, before)

        monkeypatch.setattr(RearrangedLayer, "renew", renew)

    return mutant


def old_scale(layer: RearrangedLayer, before: dict[str, torch.Tensor]) -> None:
    if layer.name == "fused.0":
        layer.tensors()["scale"].copy_(before["scale"])


def old_scale_of_a_kernel(layer: RearrangedLayer, before: dict[str, torch.Tensor]) -> None:
    for key, one in layer.tensors().items():
        if "kernel" in key:
            one.copy_(before[key])


def swapped_experts(layer: RearrangedLayer, before: dict[str, torch.Tensor]) -> None:
    if layer.name == "experts":
        numbers = layer.tensors()["weight"]
        numbers[[0, 1]] = numbers[[1, 0]]


def stale_part(layer: RearrangedLayer, before: dict[str, torch.Tensor]) -> None:
    if layer.name == "fused.1":
        layer.tensors()["weight"][:, 4:].copy_(before["weight"][:, 4:])


def old_copy(layer: RearrangedLayer, before: dict[str, torch.Tensor]) -> None:
    if layer.name == "latent":
        for key, one in layer.tensors().items():
            one.copy_(before[key])


MUTANTS = {
    "rearranged twice": twice,
    "not at all": not_at_all,
    "all layers but one": all_but_one,
    "a scale that stays": after_renewal(old_scale),
    "a scale of a kernel that stays": after_renewal(old_scale_of_a_kernel),
    "an expert in the place of another": after_renewal(swapped_experts),
    "a fused group with one part stale": after_renewal(stale_part),
    "a derived copy that stays": after_renewal(old_copy),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_a_hook_did_not_make_is_noticed(mutant, pair, monkeypatch):
    weights = loaded(new_weights(0))
    trainer, engine = pair(weights)
    refit(trainer, engine, verify="installed")
    update(trainer, 2)
    MUTANTS[mutant](monkeypatch, weights)
    with pytest.raises(RefitCorrupted) as caught:
        refit(trainer, engine, verify="installed")
    assert caught.value.fix


# -- what is refused when the engine starts -------------------------------------------------------


class Counting(Packed):
    """Its hook makes something else each time."""

    def process(self) -> None:
        super().process()
        COUNT.append(None)
        self.weight.data = self.weight.detach() + len(COUNT)


COUNT: list[None] = []


class Growing(Packed):
    """Its hook makes a shape that depends on how often it ran."""

    def process(self) -> None:
        COUNT.append(None)
        self.weight = nn.Parameter(torch.zeros(len(COUNT), 2), requires_grad=False)


class Raising(Packed):
    """Its hook runs once."""

    def process(self) -> None:
        if COUNT:
            raise RuntimeError("it has run")
        COUNT.append(None)
        super().process()


class Once(Packed):
    """Its hook does nothing the second time, and raises nothing."""

    def process(self) -> None:
        if not COUNT:
            super().process()
        COUNT.append(None)


class Numbering(Packed):
    """Its hook leaves a number that graphs would have in them."""

    def process(self) -> None:
        self.alpha = float(self.weight.max())


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (Counting, "makes other numbers in weight"),
        (Growing, "makes weight with"),
        (Once, "makes other numbers in weight"),
        (Raising, "fails: RuntimeError: it has run"),
        (Numbering, r"packed\.alpha"),
    ],
)
def test_a_hook_that_cannot_run_again_is_refused_with_the_reason(kind, why, monkeypatch):
    COUNT.clear()
    monkeypatch.setitem(globals(), "Packed", kind)
    weights = loaded(new_weights(0))
    with pytest.raises(CapabilityError, match=why) as caught:
        LoadedSink(weights).begin(0)
    assert "packed" in str(caught.value)
