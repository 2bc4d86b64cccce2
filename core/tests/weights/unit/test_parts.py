"""Parts: the cuts that boxes of many ranks make, against what single elements show."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_core.errors import ManifestMismatchError, RefitProtocolError
from rl_core.interfaces import Box, Piece, TensorSpec
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import (
    LanePlaces,
    Partition,
    box_of,
    check_layout,
    layout_of,
    narrowed,
    readers_of,
    runs_in,
)
from rl_core.weights.data.plan import ALIGN, DataMode, make_plan

SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@st.composite
def cut(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """What the ranks of a mesh have of a tensor: even or uneven chunks of some dimensions."""
    sides = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
        edges = [0, *sorted(inner), size]
        sides.append(list(pairwise(edges)))
    return [tuple(box) for box in product(*sides)]


@st.composite
def models(draw: st.DrawFn) -> tuple[WeightManifest, list[dict[int, list[Box]]]]:
    """Tensors, and the layouts of some processes: each has some boxes of its side's mesh."""
    specs = [
        TensorSpec(f"t{i}", shape, draw(st.sampled_from(["float32", "bfloat16", "int64"])))
        for i, shape in enumerate(draw(st.lists(SHAPES, min_size=1, max_size=4)))
    ]
    manifest = WeightManifest(tuple(specs))
    layouts: list[dict[int, list[Box]]] = []
    for _ in range(draw(st.integers(1, 3))):
        meshes = [draw(cut(spec.shape)) for spec in specs]
        layouts += [
            {
                index: draw(st.lists(st.sampled_from(mesh), unique=True))
                for index, mesh in enumerate(meshes)
                if draw(st.booleans())
            }
            for _ in range(draw(st.integers(1, 3)))
        ]
    return manifest, layouts


def elements(shape: tuple[int, ...], boxes: list[Box]) -> Counter[tuple[int, ...]]:
    return Counter(at for box in boxes for at in product(*(range(*ends) for ends in box)))


@given(models())
def test_the_parts_of_a_tensor_are_its_elements_once(model):
    manifest, layouts = model
    parts = Partition.of(manifest, layouts)
    for index, spec in enumerate(manifest.owned):
        boxes = [box_of(parts.manifest.owned[n]) for n in parts.of_tensor(index)]
        assert elements(spec.shape, boxes) == elements(spec.shape, [box_of(spec)])
        assert all(parts.tensor_of(n) is spec for n in parts.of_tensor(index))


@given(models())
def test_what_a_process_has_is_some_whole_parts_and_no_other_element(model):
    manifest, layouts = model
    parts = Partition.of(manifest, layouts)
    for layout in layouts:
        mask = parts.mask(layout)
        for index, spec in enumerate(manifest.owned):
            mine = [box_of(parts.manifest.owned[n]) for n in parts.of_tensor(index) if mask[n]]
            boxes = layout.get(index, [box_of(spec)])
            assert set(elements(spec.shape, mine)) == set(elements(spec.shape, boxes))


@given(models())
def test_both_sides_derive_the_same_parts_from_the_cuts(model):
    manifest, layouts = model
    parts = Partition.of(manifest, layouts)
    other = Partition.checked(WeightManifest(manifest.tensors), dict(parts.cuts))
    assert other.manifest.digest == parts.manifest.digest
    assert Partition.checked(manifest, dict(parts.cuts), parts) is parts


@given(models(), st.integers(ALIGN, 300), st.data())
def test_every_engine_receives_each_part_that_it_keeps_once_and_nothing_else(
    model, bucket_bytes, data
):
    """By the bytes of a lane, one by one: which segment each is of, and which runs have it."""
    manifest, layouts = model
    sides = st.lists(st.sampled_from(layouts), min_size=1, max_size=4)
    ranks, engines = [{}, *data.draw(sides)], data.draw(sides)
    parts = Partition.of(manifest, [*ranks, *engines])
    count = len(parts.manifest.owned)
    keeps = {f"e{n}": parts.mask(layout) for n, layout in enumerate(engines)}
    unneeded = bytes(not any(mask[n] for mask in keeps.values()) for n in range(count))
    drawn = data.draw(st.lists(st.booleans(), min_size=count, max_size=count))
    skip = data.draw(st.sampled_from([b"", bytes(map(max, unneeded, drawn))]))
    names = st.sampled_from("abc")
    hosts = {rank: data.draw(names) for rank in range(len(ranks))}
    where = {engine: (data.draw(names), mask) for engine, mask in keeps.items()}
    compared = data.draw(st.booleans())
    takes = parts.shared_out(dict(enumerate(ranks)), where, hosts, compared=compared)
    got: dict[str, Counter[int]] = {engine: Counter() for engine in keeps}
    for rank in hosts:
        idle = ["e0"] if rank == 0 else []
        left_out, readers = readers_of(takes[rank], skip, first=rank, idle=idle)
        plan = make_plan(parts, bucket_bytes, skip=left_out)
        assert rank or "e0" in readers
        for bucket in plan.buckets:
            of_byte = {at: s.tensor for s in bucket.segments for at in range(s.start, s.stop)}
            runs = {engine: bucket.runs(reads) for engine, reads in readers.items()}
            assert None not in runs.values() or not any(runs.values())  # all know of a broadcast
            for engine, its in runs.items():
                stretches = [(bucket.start, bucket.stop)] if its is None else its
                here = [at for start, stop in stretches for at in range(start, stop)]
                found = [of_byte[at] for at in here if at in of_byte]
                assert len(here) - len(found) < ALIGN * len(bucket.segments)  # what aligns them
                got[engine].update(found)
    for engine, mask in keeps.items():
        left = [n for n in range(count) if mask[n] and not (skip and skip[n])]
        wanted = Counter({n: parts.manifest.owned[n].nbytes for n in left})
        assert got[engine] == wanted


@given(models(), st.data())
def test_a_part_comes_from_the_nearest_rank_and_then_from_the_least_loaded(model, data):
    """By trying all ranks of each part, for each engine."""
    manifest, layouts = model
    sides = st.lists(st.sampled_from(layouts), min_size=1, max_size=5)
    ranks, layouts_of_engines = dict(enumerate(data.draw(sides))), data.draw(sides)
    parts = Partition.of(manifest, [*ranks.values(), *layouts_of_engines])
    names = data.draw(st.sampled_from(["a", "ab", "abc"]))
    unknown = data.draw(st.booleans())
    hosts = {rank: data.draw(st.sampled_from(names)) for rank in ranks}
    engines = {
        f"e{n}": ("" if unknown else data.draw(st.sampled_from(names)), parts.mask(layout))
        for n, layout in enumerate(layouts_of_engines)
    }
    takes = parts.shared_out(ranks, engines, hosts, compared=True)
    has = {rank: parts.mask(layout) for rank, layout in ranks.items()}
    loads, last = Counter[int](), dict[int, int]()
    for part, spec in enumerate(parts.manifest.owned):
        able = [rank for rank in ranks if has[rank][part]]
        targets: dict[int, set[str]] = {}
        for engine, (host, keeps) in engines.items():
            sources = [rank for rank in ranks if takes[rank][engine][part]]
            assert len(sources) == bool(able and keeps[part])
            near = [rank for rank in able if hosts[rank] == host]
            for rank in sources:
                assert rank in (near or able)
                targets.setdefault(rank, set()).add(host if near else "")
        assert len([rank for rank, to in targets.items() if "" in to]) <= 1  # all far ones share
        for rank, to in targets.items():
            loads[rank] += spec.nbytes * len(to)
            if len(able) > 1:
                last[rank] = part
        if len(able) == 1 and not targets:
            loads[able[0]] += spec.nbytes
    for rank, part in last.items() if len(names) == 1 else ():
        size = parts.manifest.owned[part].nbytes  # before this one, nobody had less who has it
        assert all(loads[rank] - size <= loads[other] for other in ranks if has[other][part])


@given(models())
def test_a_tensor_that_nobody_cuts_is_its_only_part(model):
    manifest, _ = model
    parts = Partition.of(manifest, [{}, {}])
    assert parts.manifest is manifest


@given(models(), st.integers(ALIGN, 300), st.data())
def test_a_plan_finds_every_part_in_a_direct_lane(model, bucket_bytes, data):
    """Parts are views of pieces, which are views of what has room in the lane for more."""
    manifest, layouts = model
    parts = Partition.of(manifest, layouts)
    layout = data.draw(st.sampled_from(layouts))
    here = parts.mask(layout)
    skip = bytes(1 - has for has in here)
    lane = torch.zeros(1 << 20, dtype=torch.uint8)
    whole, pieces, start = {}, [], 0
    for index, spec in enumerate(manifest.owned):
        whole[spec.name] = torch.arange(spec.numel).to(spec.torch_dtype).view(spec.shape)
        for box in layout.get(index, [box_of(spec)]):
            values = whole[spec.name][tuple(slice(*ends) for ends in box)]
            order = data.draw(st.permutations(range(values.dim())))
            sizes = [values.shape[dim] for dim in order] + [data.draw(st.integers(1, 2))]
            room = lane[start : start + math.prod(sizes) * values.itemsize].view(values.dtype)
            home = room.view(sizes)[..., 0].permute([order.index(dim) for dim in range(len(order))])
            pieces.append(Piece(spec.name, box, home.copy_(values)))
            start = -(-(start + room.nbytes) // ALIGN) * ALIGN
    places = LanePlaces.of(parts, pieces, lane.data_ptr())
    plan = make_plan(parts, bucket_bytes, DataMode.DIRECT, skip=skip, places=places)
    assert plan.lane_bytes <= start
    seen: dict[int, list[Any]] = {}
    for segment in (s for bucket in plan.buckets for s in bucket.segments):
        run = segment.part_in(lane).reshape(-1) if segment.strides else segment.of(lane)
        first = segment.offset if segment.strides else 0
        seen.setdefault(segment.tensor, []).extend(run[first : first + segment.elements].tolist())
    for number, part in enumerate(parts.manifest.owned):
        tensor = whole[parts.tensor_of(number).name]
        right = narrowed(tensor, box_of(parts.tensor_of(number)), part)
        assert seen.get(number, []) == (right.reshape(-1).tolist() if here[number] else [])


@given(models(), st.data())
def test_a_run_of_a_part_is_some_stretches_of_the_tensor(model, data):
    manifest, layouts = model
    parts = Partition.of(manifest, layouts)
    number = data.draw(st.integers(0, len(parts.manifest.owned) - 1))
    part, spec = parts.manifest.owned[number], parts.tensor_of(number)
    offset = data.draw(st.integers(0, part.numel - 1))
    count = data.draw(st.integers(1, part.numel - offset))
    whole = torch.arange(spec.numel).view(spec.shape)
    run = narrowed(whole, box_of(spec), part).reshape(-1)[offset : offset + count]
    found = torch.full((count,), -1)
    for place, some in runs_in(spec.shape, part, offset, count):
        assert (found[some] == -1).all()
        found[some] = whole.view(-1)[place : place + (some.stop - some.start)]
    assert torch.equal(found, run)


W = TensorSpec("w", (4, 6), "float32")


@pytest.mark.parametrize(
    "box", [((0, 5), (0, 6)), ((2, 2), (0, 6)), ((0, 4),), ((-1, 3), (0, 6)), ((0, 4), (0, 5))]
)
def test_a_piece_that_is_not_in_its_tensor_is_a_mismatch(box):
    with pytest.raises(ManifestMismatchError, match="w: a piece has the box"):
        layout_of(WeightManifest((W,)), [Piece("w", box, torch.zeros(4, 6))])


@pytest.mark.parametrize("layout", [{1: []}, {0: [((0, 5), (0, 6))]}, {0: [()]}, {-1: []}])
def test_boxes_of_another_model_are_refused(layout):
    with pytest.raises(RefitProtocolError, match="engine has boxes outside of"):
        check_layout(WeightManifest((W,)), layout, "engine")


@pytest.mark.parametrize(
    "cuts", [{1: ()}, {0: ((2,),)}, {0: ((0,), ())}, {0: ((3, 2), ())}, {0: ((4,), ())}]
)
def test_cuts_of_another_model_are_refused(cuts):
    with pytest.raises(RefitProtocolError, match="cuts do not fit these tensors"):
        Partition.checked(WeightManifest((W,)), cuts)


def test_pieces_that_would_make_too_many_parts_are_refused():
    manifest = WeightManifest((TensorSpec("w", (2000, 2000), "float32"),))
    boxes = [((n, n + 1), (n, n + 1)) for n in range(1, 1999)]
    with pytest.raises(RefitProtocolError, match="into 4000001 parts"):
        Partition.of(manifest, [{0: boxes}])


def test_a_layout_that_does_not_lie_on_the_cuts_is_noticed():
    manifest = WeightManifest((TensorSpec("w", (8, 4), "float32"),))
    parts = Partition.checked(manifest, {0: ((4,), ())})
    assert parts.has({})
    assert parts.has({0: [((0, 4), (0, 4))]})
    assert not parts.has({0: [((0, 3), (0, 4))]})
    assert not parts.has({0: [((0, 4), (0, 2))]})
