"""The plan: both sides derive from names and shapes alone where every byte is."""

from __future__ import annotations

from array import array
from contextlib import closing
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from simple_pair import DictSource, in_order

from rl_core.errors import ConfigError, RefitProtocolError
from rl_core.interfaces import TensorSpec
from rl_core.weights.connections import Connection
from rl_core.weights.data.digests import (
    BLOCK,
    BlockHash,
    DigestTable,
    Hasher,
    TensorHasher,
)
from rl_core.weights.data.manifest import WeightManifest
from rl_core.weights.data.parts import LanePlaces, Partition
from rl_core.weights.data.plan import (
    ALIGN,
    DataMode,
    Segment,
    TransferPlan,
    make_plan,
)
from rl_core.weights.data.runs import copy_run
from rl_core.weights.receiving.loading import copiers
from rl_core.weights.sending.sender import RefitSender
from rl_core.weights.sending.share import Share
from rl_core.weights.transports.base import CPU
from rl_core.weights.transports.ipc import IPC

W = TensorSpec("w", (4, 3), "float32")
TIED = TensorSpec("head", (4, 3), "float32", alias_of="w")
HASH = BlockHash("xxh3", b"")
DIRECT, PACKED = DataMode.DIRECT, DataMode.PACKED
MODES = st.sampled_from([DIRECT, PACKED])
DTYPES = ["float32", "bfloat16", "bool", "int64", "complex128"]


def manifest(*specs: TensorSpec) -> WeightManifest:
    return WeightManifest.of(specs)


def plan_of(model: WeightManifest, *args: Any, **options: Any) -> TransferPlan:
    """The plan of whole tensors, which in a direct lane lie one after another."""
    return make_plan(Partition(model), *args, places=in_order(model), **options)


def named(shapes: list[tuple[tuple[int, ...], str]]) -> WeightManifest:
    return manifest(*(TensorSpec(f"t{i}", s, dtype) for i, (s, dtype) in enumerate(shapes)))


SMALL = st.tuples(st.lists(st.integers(0, 9), max_size=3).map(tuple), st.sampled_from(DTYPES))
#: Up to some blocks: nothing of that size is allocated, for a plan has no bytes.
LARGE = st.tuples(st.tuples(st.integers(0, 3 * BLOCK)), st.sampled_from(DTYPES))
MANIFESTS = st.lists(SMALL, max_size=20).map(named)
LARGE_MANIFESTS = st.lists(LARGE | SMALL, max_size=6).map(named)
BUCKET_BYTES = st.integers(ALIGN, 2000)


@st.composite
def plans(draw: st.DrawFn) -> tuple[WeightManifest, set[int], TransferPlan]:
    """A plan for some tensors of a model, of either mode."""
    large = draw(st.booleans())
    model = draw(LARGE_MANIFESTS if large else MANIFESTS)
    wanted = draw(st.sets(st.sampled_from(range(len(model.owned))))) if model.owned else set()
    skip = bytes(index not in wanted for index in range(len(model.owned)))
    bucket_bytes = draw(st.integers(BLOCK // 2, 3 * BLOCK) if large else BUCKET_BYTES)
    plan = plan_of(model, bucket_bytes, draw(MODES), skip=skip)
    biggest = max((b.stop - b.start for b in plan.buckets), default=0)
    assert plan.mode is DIRECT or biggest <= bucket_bytes
    return model, wanted, plan


def segments(plan: TransferPlan) -> list[Segment]:
    return [segment for bucket in plan.buckets for segment in bucket.segments]


@given(plans())
def test_every_element_of_every_wanted_tensor_travels_once_and_in_order(planned):
    model, wanted, plan = planned
    assert plan.sent == tuple(sorted(wanted))
    expected = iter(plan.sent)
    index, position = None, 0
    for segment in segments(plan):
        if position == 0:
            index = next(expected)
        assert segment.tensor == index
        assert segment.spec is model.owned[index]
        assert segment.offset == position
        assert segment.elements > 0
        assert segment.whole == (segment.elements == segment.spec.numel)
        position += segment.elements
        assert segment.last == (position == segment.spec.numel)
        if segment.last:
            position = 0
    assert position == 0
    assert next(expected, None) is None


@given(plans())
def test_every_segment_is_aligned_and_inside_the_lane(planned):
    _, _, plan = planned
    for segment in segments(plan):
        assert segment.start % ALIGN == 0
        assert segment.stop - segment.start == segment.elements * segment.spec.torch_dtype.itemsize
        assert 0 <= segment.start < segment.stop <= plan.lane_bytes
    assert plan.nbytes == sum(planned[0].owned[index].nbytes for index in plan.sent)


@given(plans())
def test_segments_of_buckets_that_are_under_way_together_never_overlap(planned):
    """All of them in a direct plan, else as many as there are slots."""
    _, _, plan = planned
    together = len(plan.buckets) if plan.mode is DIRECT else plan.window
    for first in range(len(plan.buckets)):
        window = plan.buckets[first : first + together]
        spans = sorted((s.start, s.stop) for bucket in window for s in bucket.segments)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        if plan.mode is not DIRECT:
            spans = sorted((bucket.start, bucket.stop) for bucket in window)
            assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))


@given(LARGE_MANIFESTS, st.data())
def test_a_direct_segment_is_where_the_trainer_has_its_tensor(model, data):
    skip = bytes(data.draw(st.booleans()) for _ in model.owned)
    bucket_bytes = data.draw(st.integers(ALIGN, 2 * BLOCK).filter(lambda n: n > BLOCK // 64))
    starts = [16 * data.draw(st.integers(0, 1 << 20)) for _ in model.owned]
    places = LanePlaces(array("q", starts).tobytes())
    plan = make_plan(Partition(model), bucket_bytes, DIRECT, skip=skip, places=places)
    sent = zip(model.owned, starts, skip, strict=True)
    ends = [start + spec.nbytes for spec, start, left in sent if not left and spec.nbytes]
    assert plan.lane_bytes == max(ends, default=0)
    for segment in segments(plan):
        begin = starts[segment.tensor] + segment.offset * segment.spec.torch_dtype.itemsize
        assert segment.start == begin


def two_places(*starts: int, strides: tuple[tuple[int, tuple[int, ...]], ...] = ()) -> LanePlaces:
    return LanePlaces(array("q", starts).tobytes(), strides)


@pytest.mark.parametrize(
    "places",
    [
        LanePlaces(),
        two_places(0),
        LanePlaces(bytes(15)),
        two_places(0, 48, 96),
        two_places(0, -1),
        two_places(0, -48),
        two_places(0, 50),  # not a place of float32
        two_places(0, 48, strides=((1, (3,)),)),
        two_places(0, 48, strides=((1, (3, 1, 1)),)),
        two_places(0, 48, strides=((1, (3, -1)),)),
        two_places(0, 48, strides=((1, (1 << 63, 1)),)),
    ],
)
def test_places_that_are_not_those_of_the_parts_are_refused(places):
    """A receiver takes them from a message."""
    model = manifest(W, replace(W, name="v"))
    with pytest.raises(RefitProtocolError, match="has no place there"):
        make_plan(Partition(model), 1024, DIRECT, places=places)


def test_the_lane_of_a_plan_holds_the_last_element_of_a_part_with_strides():
    places = two_places(-1, 8, strides=((1, (1 << 40, 1)), (9, (1,))))
    plan = make_plan(Partition(manifest(W, replace(W, name="v"))), 1024, DIRECT,
                     skip=b"\1\0", places=places)  # fmt: skip
    assert plan.lane_bytes == 8 + 4 * (3 * (1 << 40) + 3)


@given(LARGE_MANIFESTS, st.integers(BLOCK, 4 * BLOCK), st.booleans())
def test_the_blocks_of_a_tensor_are_the_same_for_every_bucket_that_holds_one(
    model, bucket_bytes, mode
):
    """So that digests of two refits can be compared, whatever their buckets."""
    plan = plan_of(model, bucket_bytes, mode)
    found: dict[int, list[tuple[int, int]]] = {}
    for segment in segments(plan):
        shift = segment.offset * segment.spec.torch_dtype.itemsize - segment.start
        blocks = segment.blocks(plan.block_bytes)
        found.setdefault(segment.tensor, []).extend((a + shift, b + shift) for a, b in blocks)
    for index, spec in enumerate(model.owned):
        edges = [*range(0, spec.nbytes, BLOCK), spec.nbytes]
        assert found[index] == list(pairwise(edges))


@given(MANIFESTS, BUCKET_BYTES, MODES)
def test_the_digests_of_segments_in_a_lane_are_those_of_the_tensors(model, bucket_bytes, mode):
    """What a packer or a loader finds, bucket by bucket, is what a delta finds beforehand."""
    plan = plan_of(model, bucket_bytes, mode)
    tensors = [
        torch.arange(index, index + spec.numel).remainder(3).to(spec.torch_dtype).view(spec.shape)
        for index, spec in enumerate(model.owned)
    ]
    table = DigestTable(model)
    lane = torch.zeros(plan.lane_bytes, dtype=torch.uint8)
    for bucket in plan.buckets:
        for segment in bucket.segments:
            copy_run(segment.of(lane), tensors[segment.tensor], segment.offset)
        runs = [lane[segment.start : segment.stop] for segment in bucket.segments]
        table.add(bucket.segments, Hasher(runs, HASH, plan.block_bytes).digests(), plan.block_bytes)
    given = [(s.name, s, tensor) for s, tensor in zip(model.owned, tensors, strict=True)]
    assert table.known == TensorHasher(HASH, plan.block_bytes).digests(given, ())


@given(plans(), MODES)
def test_both_sides_derive_the_same_plan_and_digest(planned, mode):
    model, wanted, _ = planned
    theirs = WeightManifest.of(tuple(replace(spec) for spec in model.tensors))
    skip = bytes(index not in wanted for index in range(len(model.owned)))
    ours, other = (plan_of(side, BLOCK, mode, skip=skip, block=BLOCK) for side in (model, theirs))
    assert ours == other
    assert ours.digest == other.digest


ARGUMENTS = st.tuples(st.integers(0, 2), st.sampled_from([64, 128, 200]), st.booleans(),
                      st.binary(min_size=3, max_size=3) | st.just(b""))  # fmt: skip


@given(st.lists(ARGUMENTS, max_size=12))
def test_a_sender_that_remembers_never_gives_another_plan(asked):
    specs = [replace(W, name=name) for name in "abc"]
    models = [
        manifest(*specs),
        manifest(*reversed(specs)),
        manifest(replace(W, name="a", dtype="int32"), *specs[1:]),
    ]
    end, sender = IPC.sender(), RefitSender(lambda: DictSource({}), name="trainer")
    line = Connection(end)
    with closing(end), closing(sender):
        for which, bucket_bytes, direct, skip in asked:
            mode = DIRECT if direct else PACKED
            fresh = plan_of(models[which], bucket_bytes, mode, skip=skip)
            share: Any = Share(sender.kept, DictSource({}))
            share.parts, share.hash, share.readers = Partition(models[which]), HASH, {}
            share.connection, share.device = line, CPU
            share.places = partial(
                dict.get, dict.fromkeys([DIRECT, PACKED], in_order(models[which]))
            )
            buckets = share._make(mode, bucket_bytes, skip)
            assert (buckets.plan, buckets.plan.digest) == (fresh, fresh.digest)
            assert share._make(mode, bucket_bytes, skip) is buckets


@pytest.mark.parametrize(
    "other",
    [
        plan_of(manifest(W, replace(W, name="v")), 64),
        plan_of(manifest(W, replace(W, name="v")), 128, DIRECT),
        plan_of(manifest(W, replace(W, name="v")), 128, skip=b"\0\1"),
        plan_of(manifest(replace(W, name="v"), W), 128),
        plan_of(manifest(W, replace(W, name="v", dtype="int32")), 128),
    ],
)
def test_the_digest_tells_plans_apart(other: TransferPlan):
    plan = plan_of(manifest(W, replace(W, name="v")), 128)
    assert plan.digest != other.digest


def test_aliases_are_not_planned():
    plan = plan_of(manifest(W, TIED), 1024)
    assert [segment.spec.name for segment in segments(plan)] == ["w"]


def test_a_plan_of_nothing_has_no_bucket_and_needs_no_lane():
    plan = plan_of(manifest(W), 64, skip=b"\1")
    assert (plan.buckets, plan.sent, plan.nbytes, plan.lane_bytes) == ((), (), 0, 0)


def test_a_bucket_smaller_than_the_alignment_is_a_config_error():
    with pytest.raises(ConfigError, match="bucket_bytes"):
        plan_of(manifest(W), ALIGN - 1)


def test_so_small_buckets_that_a_plan_would_take_long_are_a_config_error_at_once():
    big = manifest(TensorSpec("w", (1 << 40,), "float32"))
    for mode in (DataMode.PACKED, DIRECT):
        with pytest.raises(
            ConfigError, match=r"bucket_bytes is 64; a model of \d+ bytes needs at least"
        ):
            plan_of(big, 64, mode)


@pytest.mark.parametrize("kind", ["xxh3", "fold"])
def test_the_digests_of_many_tensors_are_those_of_each(kind, monkeypatch):
    """Those that stay are digested together; another may be gone once the next is asked for."""
    how = BlockHash(kind, bytes(32))
    hasher = TensorHasher(how, 128)
    stay = {f"s{i}": torch.arange(i * 40, dtype=torch.float32) for i in range(5)}
    stay["turned"] = torch.arange(60.0).view(6, 10).t()
    passing = {f"p{i}": torch.full((i + 1,), float(i)) for i in range(4)}
    specs = {n: TensorSpec(n, tuple(t.shape), "float32") for n, t in (stay | passing).items()}
    made = []
    honest = Hasher.__init__

    def init(self, runs, *args):
        made.append(len(runs))
        honest(self, runs, *args)

    monkeypatch.setattr(Hasher, "__init__", init)

    def given():
        buffer = torch.empty(4)
        for name, spec in specs.items():
            if name in stay:
                yield name, spec, stay[name]
            else:
                part = buffer[: len(passing[name])]
                yield name, spec, part.copy_(passing[name])

    lasting = {tensor.data_ptr() for tensor in stay.values()}
    found = hasher.digests(given(), lasting)
    turned = 2  # blocks of the one that is not contiguous
    assert sorted(made) == [1] * (4 + turned) + [5]
    assert hasher.digests(given(), lasting) == found
    assert sorted(made) == [1] * 2 * (4 + turned) + [5]  # those that stay have one for ever
    each = ([(name, spec, (stay | passing)[name])] for name, spec in specs.items())
    alone = [TensorHasher(how, 128).digests(one, ()) for one in each]
    assert found == {name: digest for one in alone for name, digest in one.items()}


def test_small_tensors_on_a_device_are_copied_together():
    def blank(dtype, count):
        return torch.empty(count, dtype=dtype, device="meta")

    pairs = [(blank(t, n), blank(t, n)) for t in (torch.float32, torch.int8) for n in (1, 2, 3)]
    pairs.append((blank(torch.float32, 1 << 20), blank(torch.float32, 1 << 20)))
    pairs.append((blank(torch.float32, 8), blank(torch.bfloat16, 8)))
    calls = copiers(pairs)
    assert len(calls) == 4
    for call in calls:
        call()
