"""Options and batches that are wrong, and what the user is told."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import LossFunction, LossInputType, LossType
from rl_losses import DPOLossFn, GRPOLossFn, NLLLossFn, TopkKLLossFn

Call = Callable[..., tuple[torch.Tensor, dict[str, float]]]

every_class = pytest.mark.parametrize("cls", [DPOLossFn, GRPOLossFn, NLLLossFn, TopkKLLossFn])


@every_class
def test_no_option_is_required(cls: Callable[[], LossFunction]) -> None:
    assert isinstance(cls(), LossFunction)


@every_class
def test_a_loss_travels_to_a_worker_as_it_is(cls: Callable[[], LossFunction]) -> None:
    assert pickle.loads(pickle.dumps(cls())) == cls()


def test_options_cannot_change_under_a_run() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        NLLLossFn().loss_type = LossType.SEQUENCE_LEVEL  # type: ignore[misc]


@pytest.mark.parametrize(
    ("cls", "option", "value"),
    [
        (GRPOLossFn, "ratio_clip_min", 1.5),
        (GRPOLossFn, "ratio_clip_max", -0.1),
        (GRPOLossFn, "ratio_clip_c", 1.0),
        (GRPOLossFn, "reference_policy_kl_penalty", math.nan),
        (GRPOLossFn, "kl_estimator", "k4"),
        (GRPOLossFn, "importance_ratio", "row"),
        (GRPOLossFn, "importance_sampling_cap", 0.0),
        (GRPOLossFn, "on_policy", 1),
        (DPOLossFn, "beta", 0.0),
        (DPOLossFn, "label_smoothing", 0.5),
        (NLLLossFn, "loss_type", "token_level"),
        (TopkKLLossFn, "teacher_temperature", 0.0),
    ],
)
def test_an_option_out_of_bounds_is_named(cls: Any, option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{cls.__name__}: '{option}' must be") as caught:
        cls(**{option: value})
    assert caught.value.details["key"] == option


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"length_norm": 512}, "length_norm"),
        ({"surrogate": "cispo", "ratio_clip_c": 3.0}, "ratio_clip_c"),
        ({"sapo_temperature_pos": 2.0}, "sapo_temperature_pos"),
        ({"importance_sampling_floor": 0.5}, "importance_sampling_floor"),
        ({"importance_sampling_outside": "mask"}, "importance_sampling_outside"),
        ({"importance_sampling_weight": "token"}, "importance_sampling_weight"),
        ({"surrogate": "gmpo", "importance_ratio": "sequence"}, "importance_ratio"),
        (
            {"importance_sampling_cap": 0.5, "importance_sampling_floor": 0.5},
            "importance_sampling_floor",
        ),
    ],
)
def test_an_option_without_effect_is_refused(options: Any, option: str) -> None:
    with pytest.raises(ConfigError, match=f"GRPOLossFn: '{option}'") as caught:
        GRPOLossFn(**options)
    assert caught.value.details["key"] == option


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (DPOLossFn, {"preference_loss": "hinge", "label_smoothing": 0.1}, "has no effect"),
        (DPOLossFn, {"preference_loss": "exo_pair"}, "needs a 'label_smoothing'"),
        (TopkKLLossFn, {"mixing": 0.3}, "has no effect"),
    ],
)
def test_options_that_contradict_are_refused(cls: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cls(**options)


def test_only_options_of_the_entropy_ask_for_logits() -> None:
    assert GRPOLossFn().input_type is LossInputType.LOGPROB
    loss = GRPOLossFn(entropy_bonus=0.01)
    assert pickle.loads(pickle.dumps(loss)).input_type is LossInputType.LOGIT
    assert dataclasses.replace(loss, entropy_bonus=0.0).input_type is LossInputType.LOGPROB


def test_a_config_builds_the_loss_that_keywords_build() -> None:
    config = {"loss_type": "sequence_level", "ratio_clip_max": 0.28}
    expected = GRPOLossFn(loss_type=LossType.SEQUENCE_LEVEL, ratio_clip_max=0.28)
    assert GRPOLossFn.from_config(config) == expected


def test_an_unknown_option_in_a_config_is_named_with_its_nearest_match() -> None:
    with pytest.raises(ConfigError, match="'betta', did you mean 'beta'"):
        DPOLossFn.from_config({"betta": 0.1})


def test_a_constant_of_the_loss_is_not_an_option() -> None:
    with pytest.raises(ConfigError, match="unknown key 'group_size'"):
        DPOLossFn.from_config({"group_size": 4})


def test_an_unknown_loss_type_in_a_config_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'token_level' or 'sequence_level'"):
        NLLLossFn.from_config({"loss_type": "token"})


ROWS = {
    "token_mask": torch.ones(2, 3),
    "sample_mask": torch.ones(2),
    "advantages": torch.ones(2),
    "prev_logprobs": torch.zeros(2, 3),
    "reference_policy_logprobs": torch.zeros(2, 3),
    "generation_logprobs": torch.zeros(2, 3),
}


@pytest.mark.parametrize(
    ("key", "option"),
    [
        ("advantages", "GRPOLossFn"),
        ("prev_logprobs", "on_policy=False"),
        ("reference_policy_logprobs", "reference_policy_kl_penalty=0.01"),
        ("generation_logprobs", "importance_sampling_cap=2.0"),
    ],
)
def test_a_missing_key_names_the_option_that_needs_it(call: Call, key: str, option: str) -> None:
    rows = {name: value for name, value in ROWS.items() if name != key}
    with pytest.raises(DataError, match=f"{option}.* needs the key '{key}'") as caught:
        call(GRPOLossFn(importance_sampling_cap=2.0), torch.zeros(2, 3), **rows)
    assert caught.value.details["key"] == key
    assert f'data["{key}"]' in str(caught.value.fix)


@pytest.mark.parametrize("key", ["token_mask", "sample_mask"])
def test_a_missing_mask_is_named(key: str) -> None:
    rows: Any = {name: value for name, value in ROWS.items() if name != key}
    with pytest.raises(DataError, match=f"NLLLossFn needs the key '{key}'"):
        NLLLossFn()(
            torch.zeros(2, 3),
            rows,
            global_valid_seqs=torch.tensor(2),
            global_valid_toks=torch.tensor(4),
        )


def test_a_key_of_another_shape_is_named_with_both_shapes(call: Call) -> None:
    rows = ROWS | {"prev_logprobs": torch.zeros(2, 4)}
    with pytest.raises(DataError, match=r"'prev_logprobs' has shape \[2, 4\], expected \[2, 3\]"):
        call(GRPOLossFn(), torch.zeros(2, 3), **rows)


def test_a_mask_that_is_a_weight_is_refused_at_its_place(call: Call) -> None:
    mask = torch.ones(2, 3)
    mask[1, 2] = 0.5
    with pytest.raises(DataError, match=r"'token_mask' is 0.5 at \[1, 2\]") as caught:
        call(NLLLossFn(), torch.zeros(2, 3), token_mask=mask)
    assert caught.value.details["row"] == 1


# -- mistakes of a loop --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "option", "meant"),
    [
        (GRPOLossFn, "beta", "reference_policy_kl_penalty"),
        (GRPOLossFn, "epsilon_high", "ratio_clip_max"),
        (GRPOLossFn, "use_bias_correction_kl", "kl_gradient"),
        (GRPOLossFn, "truncated_importance_sampling_ratio_min", "importance_sampling_floor"),
        (GRPOLossFn, "use_cispo", "surrogate"),
        (GRPOLossFn, "importance_sampling_caps", "importance_sampling_cap"),
        (TopkKLLossFn, "temperature", "teacher_temperature"),
        (DPOLossFn, "label_smooth", "label_smoothing"),
    ],
)
def test_an_option_of_another_name_is_refused_with_ours(loss, option, meant):
    with pytest.raises(ConfigError, match=f"'{option}', did you mean '{meant}'"):
        loss(**{option: 0.1})


def test_options_are_keywords():
    with pytest.raises(ConfigError, match="from_config"):
        GRPOLossFn({"ratio_clip_min": 0.1})
    with pytest.raises(
        ConfigError, match="unknown key 'beta'; allowed keys: label_smoothing, loss_type"
    ):
        NLLLossFn(beta=0.1)


def test_a_loss_is_copied_pickled_and_replaced_as_before():
    loss = GRPOLossFn(ratio_clip_min=0.1)
    assert pickle.loads(pickle.dumps(loss)) == copy.deepcopy(loss) == loss
    assert dataclasses.replace(loss, ratio_clip_min=0.3) == GRPOLossFn(ratio_clip_min=0.3)
