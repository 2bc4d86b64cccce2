"""Loaders are followed: what they fuse, shard and pad is found, written and read back."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rl_backends.engine import loader
from rl_backends.engine.regions import Region
from rl_backends.engine.weights import CheckpointModel, LoadedSink, LoadedWeights
from rl_backends.tensors import same_bytes
from rl_core.errors import CapabilityError, RefitCorrupted
from rl_core.interfaces import TensorSpec

regions_of = partial(loader.regions_of, without_refits="build it without")


def spec(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name, shape, "float32")


def loaded(model: nn.Module, *specs: TensorSpec) -> LoadedWeights:
    """Of an engine; the checkpoint has these tensors, and no files."""
    checkpoint = CheckpointModel("", specs[0].torch_dtype, trust=False)
    vars(checkpoint)["specs"] = specs
    vars(checkpoint)["published"] = dict
    return LoadedWeights(model, checkpoint, workers=1, without_refits="build it without")


def filled(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


class Model(nn.Module):
    """Fuses two tensors, shards a third by columns, pads a fourth, ignores a fifth."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.fused = nn.Parameter(torch.full((8, 6), -1.0), requires_grad=False)
        self.columns = nn.Parameter(torch.full((4, 3), -1.0), requires_grad=False)
        self.padded = nn.Parameter(torch.full((7, 2), -1.0), requires_grad=False)
        self.bias = nn.Parameter(torch.full((2,), -1.0), requires_grad=False)
        self.scalar = nn.Parameter(torch.full((), -1.0), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            match name:
                case "q" | "k":
                    place = self.fused.data.narrow(0, 0 if name == "q" else 4, 4)
                    place.copy_(tensor.narrow(0, 4 * self.rank, 4))
                case "down":
                    self.columns.data.copy_(tensor[:, 3 * self.rank : 3 * self.rank + 3])
                case "embed":
                    self.padded[: len(tensor)].data.copy_(tensor)
                    self.padded[len(tensor) :].data.fill_(0)
                case "bias":
                    self.bias.data.copy_(tensor.to(torch.float32).narrow(0, 2 * self.rank, 2))
                case "scalar":
                    self.scalar.data.copy_(tensor)


SPECS = [
    spec("q", 8, 6),
    spec("k", 8, 6),
    spec("down", 4, 6),
    spec("embed", 5, 2),
    spec("bias", 4),
    spec("scalar"),
    spec("ignored", 3),
]


@pytest.mark.parametrize("rank", [0, 1])
def test_nothing_is_written_while_a_loader_is_asked(rank):
    model = Model(rank)
    regions_of(model, SPECS, torch.float32)
    assert all((parameter == -1).all() for parameter in model.parameters())


@settings(max_examples=50, deadline=None)
@given(rank=st.integers(0, 1), cuts=st.lists(st.integers(1, 47), max_size=6))
def test_what_is_written_piece_by_piece_is_what_the_loader_would_write(rank, cuts):
    ours, theirs = Model(rank), Model(rank)
    regions = regions_of(ours, SPECS, torch.float32)
    tensors = {one.name: filled(*one.shape) + i for i, one in enumerate(SPECS)}
    theirs.load_weights(tensors.items())
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        edges = sorted({0, len(flat), *(cut for cut in cuts if cut < len(flat))})
        for start, stop in pairwise(edges):
            for region in regions[name]:
                region.write(start, flat[start:stop])
    theirs.padded.data[5:] = -1  # padding is not a trainer's business
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other), name
    assert regions["ignored"] == []


def test_what_two_workers_read_makes_the_tensor_whole():
    models = [Model(rank) for rank in (0, 1)]
    for name, shape in (("q", (8, 6)), ("down", (4, 6)), ("bias", (4,))):
        tensor = filled(*shape) + 1
        whole = torch.zeros(tensor.numel())
        for model in models:
            for region in regions_of(model, SPECS, torch.float32)[name]:
                region.write(0, tensor.reshape(-1))
                part = torch.zeros(tensor.numel())
                region.read(part)
                whole = torch.maximum(whole, part)
        assert torch.equal(whole.view(shape), tensor)


class Joining(nn.Module):
    """Joins two tensors before it copies them, in a thread, as DeepSeek's loader of SGLang does."""

    def __init__(self, dim: int, take) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((7, 2) if dim == 0 else (2, 7)), requires_grad=False)
        self.dim, self.take = dim, take

    def load_weights(self, weights) -> None:
        with ThreadPoolExecutor() as threads:
            whole = torch.cat([tensor for _, tensor in weights], dim=self.dim)
            threads.submit(lambda: self.take(self.weight.data).copy_(self.take(whole)))


@pytest.mark.parametrize("dim", [0, 1])
def test_tensors_that_are_joined_first_and_copied_in_a_thread_are_found(dim):
    model = Joining(dim, lambda x: x)
    shapes = {"a": [3, 2], "b": [4, 2]} if dim == 0 else {"a": [2, 3], "b": [2, 4]}
    regions = regions_of(model, [spec(name, *shapes[name]) for name in shapes], torch.float32)
    assert not model.weight.any()
    tensors = {name: filled(*shape) + 1 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        [region] = regions[name]
        region.write(0, tensor.flatten())
    assert torch.equal(model.weight, torch.cat(list(tensors.values()), dim))


@settings(max_examples=200, deadline=None)
@given(
    dim=st.integers(-2, 1),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    other=st.integers(1, 4),
    cuts=st.tuples(*[st.floats(0, 0.999)] * 4),
)
def test_rows_and_columns_of_joined_tensors_are_found(dim, sizes, other, cuts):
    names = [str(number) for number in range(len(sizes))]
    shapes = [(size, other) if dim % 2 == 0 else (other, size) for size in sizes]
    tensors = [filled(*shape) + 100 * number + 1 for number, shape in enumerate(shapes)]
    whole = torch.cat(tensors, dim)
    begins = [int(cut * size) for cut, size in zip(cuts, whole.shape, strict=False)]
    counts = [
        1 + int(cut * (size - begin))
        for cut, size, begin in zip(cuts[2:], whole.shape, begins, strict=True)
    ]

    model = One(None, *counts)

    def load_weights(weights) -> None:
        found = torch.cat([tensor for _, tensor in weights], dim)
        for axis, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            found = found.narrow(axis, begin, count)
        model.weight.data.copy_(found)

    model.load_weights = load_weights
    specs = [spec(name, *shape) for name, shape in zip(names, shapes, strict=True)]
    regions = regions_of(model, specs, torch.float32)
    model.weight.fill_(-1)
    for name, tensor in zip(names, tensors, strict=True):
        for region in regions[name]:
            region.write(0, tensor.flatten())
    wanted = whole[begins[0] :, begins[1] :][: counts[0], : counts[1]]
    assert torch.equal(model.weight, wanted)


@pytest.mark.parametrize(
    "change",
    [lambda x: x.mul_(2), lambda x: x.zero_(), lambda x: x[:1].copy_(torch.ones(1, 2))],
)
def test_joined_tensors_that_are_changed_are_refused(change):
    class Changing(Joining):
        def load_weights(self, weights) -> None:
            whole = torch.cat([tensor for _, tensor in weights])
            change(whole)
            self.weight.data.copy_(whole)

    model = Changing(0, None)
    with pytest.raises(CapabilityError, match="changes the values of a, b"):
        regions_of(model, [spec("a", 3, 2), spec("b", 4, 2)], torch.float32)


def test_joined_tensors_that_are_turned_are_refused():
    model = Joining(0, lambda x: x.flatten()[1:6])
    with pytest.raises(CapabilityError, match="changes the values of a, b"):
        regions_of(model, [spec("a", 3, 2), spec("b", 4, 2)], torch.float32)


class One(nn.Module):
    """A loader that does one thing."""

    def __init__(self, load, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape or (3, 2)), requires_grad=False)
        self.load = load

    def load_weights(self, weights) -> None:
        for _, tensor in weights:
            self.load(self, tensor)


#: What loaders do to a tensor before they copy it: transpose, split, take heads apart, shard, cast.
STEPS = {
    "turn": lambda x: x.movedim(0, -1),
    "split": lambda x: x.unflatten(0, (2, -1)) if len(x) % 2 == 0 else x,
    "heads": lambda x: x.reshape(2, -1, x.shape[-1]).transpose(0, 1),
    "join": lambda x: x.flatten(0, 1) if x.dim() > 1 else x,
    "rows": lambda x: x[len(x) // 3 :],
    "every second": lambda x: x[..., ::2],
    "last": lambda x: x.narrow(-1, x.shape[-1] // 2, x.shape[-1] - x.shape[-1] // 2),
    "copy": torch.clone,
    "gapless": lambda x: x.contiguous(),
    "cast": lambda x: x.to(torch.float64),
}


@settings(max_examples=300, deadline=None)
@given(
    shape=st.sampled_from([(12,), (4, 6), (6, 4), (2, 8, 3), (4, 3, 4)]),
    steps=st.lists(st.sampled_from(sorted(STEPS)), max_size=6),
    turned=st.booleans(),
    run=st.integers(1, 13),
)
def test_what_a_loader_moves_about_is_followed(shape, steps, turned, run):
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        for step in steps:
            tensor = STEPS[step](tensor)
        return tensor

    def load(model: One, tensor: torch.Tensor) -> None:
        place = model.weight.data
        (place.movedim(0, -1) if turned else place).copy_(moved(tensor))

    whole = filled(*shape)
    try:
        layout = moved(whole)
    except RuntimeError:  # no such view
        return
    made = (layout.movedim(-1, 0) if turned else layout).shape
    ours, theirs = One(load, *made), One(load, *made)
    theirs.load_weights([("w", whole)])
    try:
        [region] = regions_of(ours, [spec("w", *shape)], torch.float32)["w"]
    except CapabilityError:
        assert "split" in steps or "heads" in steps or "join" in steps  # across what was cut
        return
    for start in range(0, whole.numel(), run):
        region.write(start, whole.flatten()[start : start + run])
    assert ours.weight.equal(theirs.weight)
    back = torch.full((whole.numel(),), -1.0)
    region.read(back)
    kept = torch.isin(whole.flatten(), layout.float().contiguous())
    assert back.equal(torch.where(kept, whole.flatten(), torch.tensor(-1.0)))


def test_a_loader_that_cannot_be_followed_is_named():
    model = One(lambda model, tensor: model.weight.data.copy_(tensor[:, :1]))
    with pytest.raises(
        CapabilityError, match="repeated: the engine stores this tensor in an order"
    ):
        regions_of(model, [spec("repeated", 3, 2)], torch.float32)


def write_over(model: One, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.weight.data.copy_(-torch.exp(model.weight))


def change_in_place(model: One, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.weight.data.mul_(2)


def change_what_comes(model: One, tensor: torch.Tensor) -> None:
    tensor += 1  # as loaders do for norms that multiply by one plus their weight
    model.weight.data.copy_(tensor)


def cast_and_change(model: One, tensor: torch.Tensor) -> None:
    model.weight.data[1:].copy_(-tensor.t().to(torch.bfloat16)[1:, 1:].float().exp())


@pytest.mark.parametrize("load", [write_over, change_in_place, change_what_comes, cast_and_change])
def test_what_a_loader_computes_of_each_element_is_followed(load):
    ours, theirs = One(load), One(load)
    whole = torch.rand(9) + 1
    shape = (3, 3) if load is cast_and_change else (3, 2)
    whole = whole[: shape[0] * shape[1]]
    [region] = regions_of(ours, [spec("w", *shape)], torch.float32)["w"]
    theirs.load_weights([("w", whole.view(shape).clone())])
    for start in range(0, whole.numel(), 4):
        region.write(start, whole[start : start + 4])
    assert ours.weight.eq(1).all()  # until the refit is whole
    region.renew()
    assert ours.weight.equal(theirs.weight)
    back = torch.zeros_like(whole)
    region.read(back)
    assert back[back != 0].equal(whole[back != 0])
    assert back.count_nonzero() == region.target.numel()
    region.fill(whole + 1)  # not what the engine was loaded with
    assert region.place.eq(0).all()
    region.fill(whole)
    assert region.computed.equal(region.target)


def empty_what_comes(model: One, tensor: torch.Tensor) -> None:
    tensor[0].zero_()
    model.weight.data.copy_(tensor)


def copy_into_what_comes(model: One, tensor: torch.Tensor) -> None:
    tensor[0].copy_(tensor[1])
    model.weight.data.copy_(tensor)


def keep(model: One, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.scale = tensor.abs().max()


def keep_in_a_buffer(model: One, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    model.register_buffer("scale", tensor[0].clone())


def exchange_storage(model: One, tensor: torch.Tensor) -> None:
    model.weight.data = tensor * 2


def does_not_know(model: One, tensor: torch.Tensor) -> None:
    model.weight.data.copy_(tensor)
    raise KeyError("experts.gate_up_proj")


@pytest.mark.parametrize(
    ("load", "says"),
    [
        (does_not_know, "fails on the tensors .*: KeyError: 'experts.gate_up_proj'"),
        (empty_what_comes, "changes the values of w"),
        (copy_into_what_comes, "changes the values of w"),
        (keep, r"keeps copies of what it loads in \.scale"),
        (keep_in_a_buffer, r"keeps copies of what it loads in \.scale"),
        (exchange_storage, "storage of a parameter"),
    ],
)
def test_a_loader_that_does_more_than_copy_is_named_and_changes_nothing(load, says):
    model = One(load)
    weight, before = model.weight, set(vars(model))
    with pytest.raises(CapabilityError, match=says):
        regions_of(model, [spec("w", 3, 2)], torch.float32)
    assert model.weight is weight
    assert torch.equal(weight, torch.ones(3, 2))
    assert set(vars(model)) == before
    assert not model._buffers


def test_a_parameter_that_a_loader_makes_anew_stays_and_is_the_target():
    def load(model: One, tensor: torch.Tensor) -> None:
        model.weight = nn.Parameter(torch.empty(3, 2), requires_grad=False)
        model.weight.data[1:].copy_(tensor)

    model = One(load)
    weight = model.weight
    [region] = regions_of(model, [spec("w", 2, 2)], torch.float32)["w"]
    region.write(0, torch.arange(4.0))
    assert model.weight is weight
    assert weight.tolist() == [[1, 1], [0, 1], [2, 3]]


def test_what_an_engine_would_round_is_refused():
    model = One(lambda model, tensor: model.weight.data.copy_(tensor))
    model.weight.data = model.weight.data.to(torch.bfloat16)
    with pytest.raises(
        CapabilityError, match=r"w: the engine keeps this tensor in torch\.bfloat16"
    ):
        regions_of(model, [spec("w", 3, 2)], torch.float32)
    assert regions_of(model, [spec("w", 3, 2)], torch.bfloat16)["w"]


def test_a_region_takes_only_its_part():
    region = Region(torch.zeros(2, 2), 5, (4, 1))
    region.write(3, torch.arange(3.0, 10.0))
    assert region.target.tolist() == [[5, 6], [9, 0]]


def test_what_an_engine_keeps_wider_than_the_model_is_read_in_the_dtype_of_the_model():
    weights = loaded(nn.Module(), TensorSpec("bias", (3,), "bfloat16"))
    kept = torch.tensor([0.5, -2.0, 3.0])  # float32: kernels for AMX take biases so
    vars(weights)["regions"] = {"bias": [Region(kept, 0, (1,))]}
    assert [piece.tensor for piece in weights.pieces] == [None]  # it is not the engine's own
    [(name, tensor)] = weights.read(["bias"])
    assert (name, tensor.dtype, tensor.tolist()) == ("bias", torch.bfloat16, [0.5, -2.0, 3.0])


@pytest.mark.parametrize("first", [0.0, math.nan])
def test_what_a_loader_computes_is_read_only_where_the_engine_has_it(first):
    whole = torch.tensor([first, 1, 2, 3, 4, 5])
    model = One(write_over)
    weights = loaded(model, spec("w", 3, 2))
    weights.renew()  # nothing was looked for yet
    [region] = weights.regions["w"]
    assert model.weight.eq(1).all()
    with pytest.raises(RefitCorrupted, match="w: the engine has other values"):
        list(weights.read(["w"]))  # what it was loaded with is not known
    sink = LoadedSink(weights)
    sink.begin(1)
    sink.fail()  # before anything was written
    assert model.weight.eq(1).all()
    sink.write("w", 0, whole, of=spec("w", 3, 2))
    assert same_bytes(region.place.flatten(), whole)
    sink.finish(1)
    [(_, tensor)] = weights.read(["w"])
    assert same_bytes(tensor, whole.view(3, 2))
    model.weight[1, 0] += 1
    with pytest.raises(RefitCorrupted):
        list(weights.read(["w"]))


class Dropping(nn.Module):
    """Has no bias for its output, and too few rows of it: its loader says nothing of either."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Parameter(torch.zeros(4, 2), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            if name == "head":
                self.head.data.copy_(tensor[: len(self.head)])


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([spec("head", 4, 2), spec("bias", 4)], r"bias \(0 of 4 elements\)"),
        ([spec("head", 5, 2)], r"head \(8 of 10 elements\)"),
        ([TensorSpec("head", (5, 2), "float32", trainable=False)], r"head \(8 of 10 elements\)"),
        ([spec("head", 4, 2), TensorSpec("mask", (4,), "float32", role="buffer")], ""),
        ([spec("head", 4, 2), TensorSpec("mask", (4,), "float32", trainable=False)], ""),
    ],
)
def test_what_the_engine_does_not_use_of_the_trainer_is_refused(specs, says):
    weights = loaded(Dropping(), *specs)
    if not says:
        assert set(weights.regions) == {"head", "mask"}
        return
    with pytest.raises(CapabilityError, match=says):
        _ = weights.regions


class Experts(nn.Module):
    """Knows experts one by one, as files have them; keeps its share of each beside the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(2, 4, 3), requires_grad=False)
        self.w2 = nn.Parameter(torch.zeros(2, 3, 2), requires_grad=False)

    def load_weights(self, weights) -> None:
        for name, tensor in weights:
            number, which = name.split(".")[1:]
            if which == "down":
                self.w2.data[int(number)].copy_(tensor.contiguous()[:, 2:])
            else:
                place = self.w13.data[int(number)].narrow(0, 0 if which == "gate" else 2, 2)
                place.copy_(tensor.to(torch.float64).narrow(0, 2, 2))


def one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As transformers takes stacks of experts apart when it saves them."""
    found = {}
    for place, which in enumerate(("gate", "up")):
        part = tensors["gate_up"].chunk(2, dim=1)[place].contiguous()
        found |= {f"experts.{n}.{which}": one.clone() for n, one in enumerate(part.unbind())}
    return found | {f"experts.{n}.down": one for n, one in enumerate(tensors["down"].unbind())}


def test_a_loader_that_knows_parts_of_a_tensor_by_names_of_their_own_is_followed():
    model, specs = Experts(), [spec("gate_up", 2, 8, 3), spec("down", 2, 3, 4)]
    found = regions_of(model, specs, torch.float32, published=one_by_one)
    sent = {"gate_up": filled(2, 8, 3), "down": filled(2, 3, 4)}
    for name, tensor in sent.items():
        for start in range(0, tensor.numel(), 5):
            for region in found[name]:
                region.write(start, tensor.flatten()[start : start + 5])
    gate, up = sent["gate_up"].chunk(2, dim=1)
    assert model.w13.equal(torch.cat([gate[:, 2:], up[:, 2:]], dim=1))
    assert model.w2.equal(sent["down"][:, :, 2:])
    for name, tensor in sent.items():
        whole = torch.full((tensor.numel(),), -1.0)
        for region in found[name]:
            region.read(whole)
        assert whole.ne(-1).sum() == tensor.numel() // 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_worker_keeps_are_boxes_with_views_of_its_own(rank):
    model = Model(rank)
    weights = loaded(model, *SPECS)
    tensors = {one.name: filled(*one.shape) + 1 + i for i, one in enumerate(SPECS)}
    for name, regions in regions_of(model, SPECS, torch.float32).items():
        for region in regions:
            region.write(0, tensors[name].reshape(-1))
            one = next(one for one in SPECS if one.name == name)
            piece = region.piece(one)
            right = tensors[name][tuple(slice(*ends) for ends in piece.box)]
            assert piece.tensor.equal(right), name
            assert piece.tensor.untyped_storage().data_ptr() == (
                region.target.untyped_storage().data_ptr()
            )
    assert weights.model is model


def test_a_region_that_is_no_box_has_no_piece():
    every_other_row = Region(torch.zeros(2, 3), 0, (6, 1))
    assert every_other_row.piece(spec("w", 4, 3)) is None
    [whole] = [Region.of(torch.zeros(4, 3), 0, (3, 1))]
    assert whole.piece(spec("w", 4, 3)).box == ((0, 4), (0, 3))
