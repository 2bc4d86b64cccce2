"""The manifest: what both sides agree on, by name, before any weight moves."""

from __future__ import annotations

import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rl_core.errors import ManifestMismatchError, RefitProtocolError
from rl_core.interfaces import TensorSpec
from rl_core.weights.data.manifest import WeightManifest, compare

W = TensorSpec("w", (4, 3), "float32")
TIED = TensorSpec("head", (4, 3), "float32", alias_of="w")


def manifest(*specs: TensorSpec) -> WeightManifest:
    return WeightManifest.of(specs)


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
        replace(W, name="x", shape=(1.5,)),
        replace(W, name="x", shape=(1 << 62, 8)),
        replace(W, name="x", shape=(1 << 70, 0)),
        replace(W, name="x\ud800"),
        replace(W, name="x", role="\udfff"),
    ],
)
def test_a_spec_that_makes_no_sense_is_refused_by_name(spec: TensorSpec):
    with pytest.raises(RefitProtocolError, match=re.escape(repr(spec.name))) as caught:
        manifest(W, spec)
    str(caught.value).encode()


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


def test_storages_of_two_dtypes_for_what_the_trainer_ties_are_refused_by_name():
    ours = manifest(replace(W, dtype="bfloat16"), replace(TIED, alias_of=None))
    with pytest.raises(
        ManifestMismatchError, match="tied to w, but the engine wants float32 and bfloat16"
    ) as e:
        compare(manifest(W, TIED), ours, casts=True)
    assert e.value.details["mistyped"] == ["head"]
    both = manifest(replace(W, dtype="bfloat16"), replace(TIED, alias_of=None, dtype="bfloat16"))
    assert compare(manifest(W, TIED), both, casts=True) == {"w": "bfloat16", "head": "bfloat16"}


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
    info = manifest(W, TIED, replace(W, name="free")).info
    assert [entry["alias_group"] for entry in info] == ["w", "w", None]
    assert msgspec.convert(info, list[TensorSpec]) == [W, TIED, replace(W, name="free")]


def test_a_manifest_that_did_not_change_is_not_made_again():
    known = manifest(W, TIED)
    assert WeightManifest.of([W, TIED], known) is known
    assert WeightManifest.of([W], known) is not known


def test_a_cast_changes_some_dtypes_and_nothing_else():
    model = manifest(W, replace(W, name="v"))
    cast = model.cast({"v": "bfloat16"})
    assert cast.tensors == (W, replace(W, name="v", dtype="bfloat16"))
    assert model.cast({"v": "bfloat16"}) == cast
    assert model.cast({"v": "float16"}).by_name["v"].dtype == "float16"
    assert model.cast({}) is model


@pytest.mark.parametrize("dtypes", [{"x": "float32"}, {"w": "int8"}, {"w": "float31"}])
def test_a_cast_that_makes_no_sense_is_refused(dtypes: dict[str, str]):
    with pytest.raises(RefitProtocolError, match="cannot be sent"):
        manifest(W).cast(dtypes)


@given(st.lists(st.sampled_from("abcdef"), unique=True), st.randoms())
def test_the_order_of_the_engines_tensors_does_not_matter(names, random):
    specs = [replace(W, name=name) for name in names]
    shuffled = random.sample(specs, len(specs))
    assert compare(manifest(*specs), manifest(*shuffled)) == {}
