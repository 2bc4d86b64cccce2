"""Manifest, plan and messages: what both sides agree on before any weight moves."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl_core.errors import ConfigError, ManifestMismatchError, RefitProtocolError
from rl_core.interfaces import TensorSpec
from rl_core.refit.manifest import WeightManifest, compare, dtype_of, numel
from rl_core.refit.messages import (
    MAX_FRAME_BYTES,
    BucketReady,
    Codec,
    FromReceiver,
    FromSender,
    Hello,
    Loaded,
)
from rl_core.refit.packing import copy_run
from rl_core.refit.plan import ALIGN, make_plan

W = TensorSpec("w", (4, 3), "float32")
TIED = TensorSpec("head", (4, 3), "float32", alias_of="w")


def manifest(*specs: TensorSpec) -> WeightManifest:
    return WeightManifest.of(specs)


# -- manifest ----------------------------------------------------------------------------------


def test_a_name_that_occurs_twice_is_reported():
    with pytest.raises(ManifestMismatchError) as caught:
        manifest(W, TIED, W)
    assert caught.value.details["duplicate"] == ["w"]


@pytest.mark.parametrize(
    "spec",
    [
        replace(TIED, alias_of="nothing"),
        replace(TIED, shape=(3, 4)),
        replace(TIED, dtype="bfloat16"),
        replace(W, name="x", dtype="float31"),
        replace(W, name="x", shape=(-1,)),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(spec: TensorSpec):
    with pytest.raises(RefitProtocolError, match=spec.name):
        manifest(W, spec)


def test_every_difference_is_listed_by_kind_and_name():
    theirs = manifest(W, replace(W, name="typed"), replace(W, name="extra"))
    ours = manifest(
        replace(W, shape=(3, 4)), replace(W, name="typed", dtype="int64"), replace(W, name="gone")
    )
    with pytest.raises(ManifestMismatchError) as caught:
        compare(theirs, ours, casts=True)
    details = caught.value.details
    assert details["misshaped"] == ["w"]
    assert details["mistyped"] == ["typed"]
    assert details["unexpected"] == ["extra"]
    assert details["missing"] == ["gone"]
    assert "trainer [4, 3], engine [3, 4]" in str(caught.value)


def test_a_long_list_is_cut_in_the_message_and_whole_in_the_details():
    many = manifest(*(replace(W, name=f"w{i}") for i in range(1000)))
    with pytest.raises(ManifestMismatchError) as caught:
        compare(manifest(), many)
    assert len(caught.value.details["missing"]) == 1000
    assert "and 995 more" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_dtypes_must_be_equal_unless_the_engine_casts():
    theirs, ours = manifest(W), manifest(replace(W, dtype="bfloat16"))
    with pytest.raises(ManifestMismatchError) as caught:
        compare(theirs, ours)
    assert caught.value.details["mistyped"] == ["w"]
    assert compare(theirs, ours, casts=True) == {"w": "bfloat16"}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bool"])
def test_nothing_is_cast_to_a_format_that_needs_scales(dtype: str):
    with pytest.raises(ManifestMismatchError):
        compare(manifest(W), manifest(replace(W, dtype=dtype)), casts=True)


def test_an_engine_that_ties_what_the_trainer_does_not_is_refused():
    with pytest.raises(ManifestMismatchError) as caught:
        compare(manifest(W, replace(W, name="head")), manifest(W, TIED))
    assert caught.value.details["untied"] == ["head"]


def test_either_name_of_a_tied_pair_may_be_the_owner():
    other = manifest(replace(TIED, alias_of=None), replace(W, alias_of="head"))
    assert compare(manifest(W, TIED), other) == {}


@pytest.mark.parametrize(
    "change",
    [
        {"name": "v"},
        {"shape": (3, 4)},
        {"dtype": "int32"},
        {"role": "buffer"},
        {"trainable": False},
    ],
)
def test_the_digest_covers_every_field(change: dict[str, object]):
    assert manifest(W).digest != manifest(replace(W, **change)).digest


def test_the_digest_covers_the_order():
    other = replace(W, name="v")
    assert manifest(W, other).digest != manifest(other, W).digest


def test_the_info_names_alias_groups_and_converts_back():
    info = manifest(W, TIED, replace(W, name="free")).to_info()
    assert [entry["alias_group"] for entry in info] == ["w", "w", None]
    assert msgspec.convert(info, list[TensorSpec]) == [W, TIED, replace(W, name="free")]


# -- plan --------------------------------------------------------------------------------------

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(
    st.builds(
        TensorSpec,
        name=st.uuids().map(str),
        shape=SHAPES,
        dtype=st.sampled_from(["float32", "bfloat16", "bool", "int64", "complex128"]),
    ),
    max_size=20,
    unique_by=lambda spec: spec.name,
)


@given(specs=SPECS, bucket_bytes=st.integers(ALIGN, 2000), direct=st.booleans())
def test_every_element_is_planned_once_and_in_order(specs, bucket_bytes, direct):
    plan = make_plan(manifest(*specs), bucket_bytes, direct=direct)
    planned: dict[str, list[tuple[int, int]]] = {}
    for segment in (segment for bucket in plan.buckets for segment in bucket.segments):
        planned.setdefault(segment.spec.name, []).append((segment.offset, segment.elements))
    for spec in specs:
        position = 0
        for offset, count in planned.get(spec.name, []):
            assert offset == position
            position += count
        assert position == numel(spec)


@given(specs=SPECS, bucket_bytes=st.integers(ALIGN, 2000), direct=st.booleans())
def test_segments_are_aligned_and_lie_in_the_lane_one_after_the_other(specs, bucket_bytes, direct):
    plan = make_plan(manifest(*specs), bucket_bytes, direct=direct)
    for bucket in plan.buckets:
        end = bucket.start
        for segment in bucket.segments:
            assert segment.start % ALIGN == 0
            assert segment.start >= end
            end = segment.stop
            assert end - segment.start == segment.elements * dtype_of(segment.spec).itemsize
        assert 0 <= bucket.start < end == bucket.stop <= plan.lane_bytes


@given(specs=SPECS, bucket_bytes=st.integers(ALIGN, 2000))
def test_a_bucket_fits_its_slot_and_leaves_the_one_before_alone(specs, bucket_bytes):
    plan = make_plan(manifest(*specs), bucket_bytes)
    assert plan.lane_bytes <= 2 * bucket_bytes
    for before, bucket in pairwise(plan.buckets):
        assert bucket.start >= before.stop or bucket.stop <= before.start
    assert all(bucket.stop - bucket.start <= bucket_bytes for bucket in plan.buckets)


@given(specs=SPECS, bucket_bytes=st.integers(ALIGN, 2000), data=st.data())
def test_a_direct_plan_gives_every_tensor_a_place_whatever_is_sent(specs, bucket_bytes, data):
    model = manifest(*specs)
    wanted = data.draw(
        st.sets(st.sampled_from(range(len(model.owned))) if model.owned else st.nothing())
    )
    whole = make_plan(model, bucket_bytes, direct=True)
    some = make_plan(model, bucket_bytes, direct=True, wanted=wanted.__contains__)
    starts = {(s.spec.name, s.offset): s.start for b in whole.buckets for s in b.segments}
    assert some.sent == tuple(sorted(wanted))
    assert some.lane_bytes == whole.lane_bytes
    for segment in (segment for bucket in some.buckets for segment in bucket.segments):
        assert starts[segment.spec.name, segment.offset] == segment.start
    ends = sorted((s.start, s.stop) for b in whole.buckets for s in b.segments)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(ends))


@given(specs=SPECS, bucket_bytes=st.integers(ALIGN, 2000))
def test_a_tensor_that_fits_in_a_bucket_is_not_split(specs, bucket_bytes):
    plan = make_plan(manifest(*specs), bucket_bytes)
    pieces = [segment.spec for bucket in plan.buckets for segment in bucket.segments]
    for spec in specs:
        fits = numel(spec) * dtype_of(spec).itemsize <= bucket_bytes // ALIGN * ALIGN
        assert not fits or pieces.count(spec) == (numel(spec) > 0)


def test_aliases_are_not_planned():
    plan = make_plan(manifest(W, TIED), 1024)
    assert [s.spec.name for s in plan.buckets[0].segments] == ["w"]


def test_the_plans_digest_depends_on_the_bucket_size():
    specs = manifest(W, replace(W, name="v"))
    assert make_plan(specs, 64).digest != make_plan(specs, 128).digest


def test_a_bucket_smaller_than_the_alignment_is_a_config_error():
    with pytest.raises(ConfigError, match="bucket_bytes"):
        make_plan(manifest(W), ALIGN - 1)


@given(data=st.data())
def test_a_run_is_copied_in_logical_order_whatever_the_strides(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    source = torch.arange(2 * torch.Size(shape).numel()).view(*shape, 2)[..., 1].permute(*order)
    offset = data.draw(st.integers(0, source.numel() - 1))
    count = data.draw(st.integers(1, source.numel() - offset))
    target = torch.empty(count, dtype=source.dtype)
    copy_run(target, source, offset)
    assert torch.equal(target, source.reshape(-1)[offset : offset + count])


# -- messages ----------------------------------------------------------------------------------

TOKEN = "secret"
HELLO = Hello(1, "id", "engine", 2)


def test_a_message_survives_the_wire():
    codec = Codec[FromReceiver](FromReceiver, TOKEN)
    assert codec.decode(codec.encode(HELLO)) == HELLO


def test_a_message_of_the_other_direction_is_refused():
    frame = Codec[FromReceiver](FromReceiver, TOKEN).encode(Loaded("s", 1))
    with pytest.raises(RefitProtocolError, match="malformed"):
        Codec[FromSender](FromSender, TOKEN).decode(frame)


def test_a_frame_written_with_another_token_is_refused():
    frame = Codec[FromReceiver](FromReceiver, "guess").encode(HELLO)
    with pytest.raises(RefitProtocolError, match="token"):
        Codec[FromReceiver](FromReceiver, TOKEN).decode(frame)


@given(position=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_noticed(position: int, bit: int):
    codec = Codec[FromSender](FromSender, TOKEN)
    frame = bytearray(codec.encode(BucketReady("session", 7, b"digest")))
    frame[position % len(frame)] ^= 1 << bit
    with pytest.raises(RefitProtocolError):
        codec.decode(bytes(frame))


@given(cut=st.integers(0, 40))
def test_a_truncated_frame_is_refused(cut: int):
    codec = Codec[FromSender](FromSender, TOKEN)
    frame = codec.encode(BucketReady("session", 7, b"digest"))
    with pytest.raises(RefitProtocolError):
        codec.decode(frame[: max(0, len(frame) - 1 - cut)])


def test_an_oversized_frame_is_refused_unread():
    with pytest.raises(RefitProtocolError, match="bytes"):
        Codec[FromSender](FromSender, TOKEN).decode(bytes(MAX_FRAME_BYTES + 1))


def test_an_oversized_message_is_not_sent():
    with pytest.raises(RefitProtocolError, match="Hello"):
        Codec[FromReceiver](FromReceiver, TOKEN).encode(Hello(1, "i", "x" * MAX_FRAME_BYTES, 2))


@given(frame=st.binary(max_size=300))
def test_noise_is_refused_with_a_typed_error(frame: bytes):
    with pytest.raises(RefitProtocolError):
        Codec[FromSender](FromSender, TOKEN).decode(frame)


@given(body=st.binary(max_size=200) | st.builds(msgspec.msgpack.encode, st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
    | st.fixed_dictionaries({"type": st.sampled_from(["Offer", "Abort", "Seal"])}),
)))  # fmt: skip
def test_whoever_holds_the_token_can_send_nothing_but_messages(body: bytes):
    """The decoder behind the code: any body, authentic, is a message or a typed error."""
    codec = Codec[FromSender](FromSender, TOKEN)
    key = hashlib.blake2b(TOKEN.encode()).digest()
    frame = hashlib.blake2b(body, key=key, digest_size=16).digest() + body
    try:
        message = codec.decode(frame)
    except RefitProtocolError:
        return
    assert codec.decode(codec.encode(message)) == message
