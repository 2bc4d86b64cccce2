"""A configuration is checked against its TypedDict: keys, types, bounds, nesting."""

import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired, Required, TypedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.config import Range, check_config, config_keys, nearest
from rl_core.errors import BrokenPluginError, ConfigError
from rl_core.interfaces import GenerationConfig


class Optimizer(TypedDict, total=False):
    lr: Required[Annotated[float, Range(gt=0)]]
    betas: tuple[float, float]


class Config(TypedDict):
    backend: str
    steps: NotRequired[Annotated[int | None, Range(ge=1, lt=100)]]
    rate: NotRequired[float]
    mode: NotRequired[Literal["fast", "exact"]]
    flag: NotRequired[bool]
    ids: NotRequired[int | list[int] | None]
    names: NotRequired[Sequence[str]]
    weights: NotRequired[dict[str, float]]
    optimizer: NotRequired[Optimizer]
    either: NotRequired[Optimizer | str]
    anything: NotRequired[Any]


if TYPE_CHECKING:
    from decimal import Decimal


class Unreadable(TypedDict):
    price: "Decimal"


class Extended(Config):
    own_key: int
    __extra__: Any


MINIMAL = {"backend": "hf"}


def check(spec: type = Config, /, **keys: Any) -> dict[str, Any]:
    return check_config(spec, MINIMAL | keys, what="policy backend 'hf'")


def refused(spec: type = Config, /, **keys: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check(spec, **keys)
    return caught.value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("steps", 3),
        ("steps", None),
        ("rate", 0.5),
        ("rate", 1),
        ("mode", "exact"),
        ("flag", False),
        ("ids", 7),
        ("ids", [7, 8]),
        ("ids", None),
        ("names", ["a"]),
        ("weights", {"a": 1, "b": 0.5}),
        ("optimizer", {"lr": 1e-3}),
        ("optimizer", {"lr": 1, "betas": (0.9, 0.95)}),
        ("either", "sgd"),
        ("either", {"lr": 1.0}),
        ("anything", object),
    ],
)
def test_valid_value_is_returned_unchanged(key: str, value: Any) -> None:
    assert check(**{key: value}) == MINIMAL | {key: value}


@pytest.mark.parametrize(
    ("key", "value", "at", "expected"),
    [
        ("backend", 3, "backend", "must be str, got 3 (int)"),
        ("steps", "3", "steps", "must be int or None, got '3' (str)"),
        ("steps", True, "steps", "must be int or None, got True (bool)"),
        ("steps", 1.0, "steps", "must be int or None, got 1.0 (float)"),
        ("steps", 0, "steps", "must be >= 1 and < 100, got 0"),
        ("steps", 100, "steps", "must be >= 1 and < 100, got 100"),
        ("rate", "fast", "rate", "must be float, got 'fast' (str)"),
        ("rate", True, "rate", "must be float, got True (bool)"),
        ("rate", None, "rate", "must be float, got None"),
        ("mode", "quick", "mode", "must be 'fast' or 'exact', got 'quick' (str)"),
        ("flag", 1, "flag", "must be bool, got 1 (int)"),
        ("ids", "7", "ids", "must be int, list[int] or None, got '7' (str)"),
        ("ids", [7, "8"], "ids[1]", "must be int, got '8' (str)"),
        ("names", "abc", "names", "must be Sequence[str], got 'abc' (str)"),
        ("weights", {"a": "x"}, "weights.a", "must be float, got 'x' (str)"),
        ("weights", {1: 1.0}, "weights.1", "must be str, got 1 (int)"),
        ("optimizer", 3, "optimizer", "must be a dict (lr, betas), got 3 (int)"),
        ("optimizer", {"lr": 0}, "optimizer.lr", "must be > 0, got 0"),
        ("optimizer", {"lr": float("nan")}, "optimizer.lr", "must be > 0, got nan"),
        ("optimizer", {"lr": 1, "betas": [1.0]}, "optimizer.betas", "must have 2 entries, got 1"),
        ("either", {"lr": "x"}, "either.lr", "must be float, got 'x' (str)"),
        ("either", 3, "either", "must be a dict (lr, betas) or str, got 3 (int)"),
    ],
)
def test_wrong_value_is_named_with_its_place(key: str, value: Any, at: str, expected: str) -> None:
    error = refused(**{key: value})
    assert error.details["key"] == at
    assert f"policy backend 'hf': '{at}' {expected}" in error.message


def test_unknown_key_names_the_nearest_and_the_allowed_ones() -> None:
    error = refused(stpes=3)
    assert error.details["key"] == "stpes"
    assert "unknown key 'stpes', did you mean 'steps'?" in error.message
    assert all(key in error.message for key in config_keys(Config))
    assert error.fix == "write 'steps' instead of 'stpes'"


def test_unknown_key_like_no_other_is_told_to_be_removed() -> None:
    assert refused(zzz=3).fix == "remove 'zzz'"


def test_unknown_nested_key_has_a_dotted_path() -> None:
    error = refused(optimizer={"lr": 1.0, "beta": (0.9, 0.9)})
    assert error.details["key"] == "optimizer.beta"
    assert "did you mean 'betas'" in error.message


def test_missing_required_key_is_named() -> None:
    with pytest.raises(ConfigError, match=r"required key 'backend' \(str\) is missing"):
        check_config(Config, {}, what="x")


def test_missing_nested_required_key_has_a_dotted_path() -> None:
    assert refused(optimizer={}).details["key"] == "optimizer.lr"


def test_all_problems_are_reported_together() -> None:
    error = refused(steps=0, rate="x", zzz=1)
    assert error.details["keys"] == ["steps", "rate", "zzz"]
    assert "3 problems" in error.message


def test_inherited_keys_are_allowed_and_own_ones_required() -> None:
    assert check(Extended, own_key=1, steps=2)["own_key"] == 1
    assert refused(Extended).details["key"] == "own_key"


def test_escape_hatch_of_a_spec_opens_nothing() -> None:
    assert refused(Extended, own_key=1, __extra__=2).details["key"] == "__extra__"


def test_result_is_a_plain_copy_that_shares_nothing() -> None:
    given_config = {"backend": "hf", "optimizer": types.MappingProxyType({"lr": 1.0}), "ids": [1]}
    checked = check_config(Config, given_config, what="x")
    assert type(checked["optimizer"]) is dict
    assert checked["ids"] is not given_config["ids"]


def test_what_is_no_mapping_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 \(int\), not a mapping"):
        check_config(Config, 3, what="x")  # type: ignore[arg-type]


def test_spec_that_names_what_it_does_not_import_is_the_plugins_fault() -> None:
    with pytest.raises(BrokenPluginError, match=r"Unreadable.*name 'Decimal'"):
        check_config(Unreadable, {"price": 1}, what="x")


def test_long_values_are_shortened_in_messages() -> None:
    assert len(refused(rate="x" * 10_000).message) < 300


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("temperature", 0.0, 1e-3),
        ("top_p", 0.0, 1),
        ("top_p", 1.01, 0.01),
        ("top_k", -2, -1),
        ("max_new_tokens", 0, 1),
        ("num_generations", 0, 1),
        ("repetition_penalty", 0, 1.1),
        ("max_model_len", 0, None),
        ("logprobs_mode", "rw", "raw"),
        ("colocated", {"enabled": False, "resources": {"gpus_per_node": 1, "num_nodes": None}},
         {"enabled": False, "resources": {"gpus_per_node": None, "num_nodes": None}}),
    ],
)  # fmt: skip
def test_generation_config_bounds(key: str, bad: Any, good: Any) -> None:
    base = {"backend": "hf", "model_name": "m"}
    check_config(GenerationConfig, base | {key: good}, what="x")
    with pytest.raises(ConfigError, match=key):
        check_config(GenerationConfig, base | {key: bad}, what="x")


@pytest.mark.parametrize("word", ["MAX-STEPS", "max_stpes", "maxsteps"])
def test_nearest_forgives_case_hyphens_and_slips(word: str) -> None:
    assert nearest(word, ["min_lr", "max_steps"]) == "max_steps"


VALUES: Mapping[Any, st.SearchStrategy[Any]] = {
    int: st.integers(),
    float: st.floats(allow_nan=False) | st.integers(),
    str: st.text(),
    bool: st.booleans(),
    int | None: st.integers() | st.none(),
    list[int]: st.lists(st.integers(), max_size=3),
    dict[str, float]: st.dictionaries(st.text(), st.floats(allow_nan=False), max_size=3),
    Literal["a", "b"]: st.sampled_from(["a", "b"]),
    Optimizer: st.fixed_dictionaries({"lr": st.floats(min_value=1e-6, max_value=1.0)}),
}
NAMES = st.from_regex(r"[a-z][a-z_]{0,8}", fullmatch=True)


@st.composite
def specs(draw: st.DrawFn) -> tuple[type, dict[str, Any]]:
    """A TypedDict and a configuration that satisfies it."""
    hints = draw(st.dictionaries(NAMES, st.sampled_from(list(VALUES)), min_size=1, max_size=5))
    spec = TypedDict("Spec", hints)  # type: ignore[misc]
    return spec, {key: draw(VALUES[hint]) for key, hint in hints.items()}


@given(specs())
def test_any_satisfying_configuration_passes(case: tuple[type, dict[str, Any]]) -> None:
    spec, config = case
    assert check_config(spec, config, what="x") == config


@given(specs(), st.data())
def test_any_missing_or_unknown_key_is_the_one_reported(
    case: tuple[type, dict[str, Any]], data: st.DataObject
) -> None:
    spec, config = case
    dropped = data.draw(st.sampled_from(sorted(config)))
    added = data.draw(NAMES.filter(lambda name: name not in config))
    changed = {key: value for key, value in config.items() if key != dropped} | {added: 1}
    with pytest.raises(ConfigError) as caught:
        check_config(spec, changed, what="x")
    assert sorted(caught.value.details["keys"]) == sorted([dropped, added])


@given(specs(), st.data())
def test_any_value_of_a_foreign_type_is_the_one_reported(
    case: tuple[type, dict[str, Any]], data: st.DataObject
) -> None:
    spec, config = case
    key = data.draw(st.sampled_from(sorted(config)))
    with pytest.raises(ConfigError) as caught:
        check_config(spec, config | {key: object()}, what="x")
    assert caught.value.details["keys"] == [key]
