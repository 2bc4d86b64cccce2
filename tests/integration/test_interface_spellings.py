"""Both generations of the interfaces are there: every method, parameter and field, by its name."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import rl_core
from rl_core import interfaces
from rl_hf import HuggingFaceGeneration, HuggingFacePolicy

GENERATION = {
    "init_collective": ["ip", "port", "world_size", "train_world_size"],
    "generate": ["data", "greedy"],
    "prepare_for_generation": ["args", "kwargs"],
    "finish_generation": ["args", "kwargs"],
    "update_weights": ["ipc_handles"],
    "update_weights_from_collective": ["info"],
    "shutdown": [],
}
POLICY = {
    "generate": ["data", "greedy"],
    "get_logprobs": ["data", "micro_batch_size"],
    "get_reference_logprobs": ["data", "micro_batch_size"],
    "get_reference_policy_logprobs": ["data", "micro_batch_size"],
    "get_topk_logits": ["data", "k", "micro_batch_size"],
    "train": ["data", "loss_fn", "eval_mode", "gbs", "mbs"],
    "calibrate_qkv_fp8_scales": [
        "data",
        "micro_batch_size",
        "percentile",
        "margin",
        "include_q",
    ],
    "prepare_for_training": ["args", "kwargs"],
    "finish_training": ["args", "kwargs"],
    "save_checkpoint": None,
    "shutdown": [],
}
COLOCATABLE = {
    "init_collective": ["ip", "port", "world_size", "train_world_size"],
    "offload_before_refit": [],
    "offload_after_refit": [],
    "prepare_refit_info": [],
    "stream_weights_via_ipc_zmq": ["args", "kwargs"],
    "broadcast_weights_for_collective": ["kv_scales"],
    "prepare_for_lp_inference": [],
    "prepare_weights_for_ipc": ["args", "kwargs"],
    "get_weights_ipc_handles": ["keys"],
    "prepare_info_for_collective": [],
}
FIELDS = {
    "ResourcesConfig": {"gpus_per_node", "num_nodes"},
    "ColocationConfig": {"enabled", "resources"},
    "GenerationConfig": {
        "backend",
        "max_new_tokens",
        "temperature",
        "top_p",
        "top_k",
        "model_name",
        "stop_token_ids",
        "stop_strings",
        "pad_token_id",
        "eos_token_id",
        "repetition_penalty",
        "do_sample",
        "colocated",
    },
    "GenerationDatumSpec": {
        "input_ids",
        "input_lengths",
        "attention_mask",
        "stop_strings",
        "__extra__",
    },
    "GenerationOutputSpec": {
        "output_ids",
        "generation_lengths",
        "unpadded_sequence_lengths",
        "logprobs",
        "__extra__",
    },
    "LogprobOutputSpec": {"logprobs"},
    "ReferenceLogprobOutputSpec": {"reference_logprobs"},
    "ScoreOutputSpec": {"scores"},
    "TopkLogitsOutputSpec": {"topk_logits", "topk_indices"},
}


def cases() -> list[Any]:
    tables = {
        (interfaces.GenerationInterface, HuggingFaceGeneration): GENERATION,
        (interfaces.PolicyInterface, HuggingFacePolicy): POLICY,
        (interfaces.ColocatablePolicyInterface, HuggingFacePolicy): COLOCATABLE,
    }
    return [
        pytest.param(cls, method, expected, id=f"{cls.__name__}.{method}")
        for classes, table in tables.items()
        for cls in classes
        for method, expected in table.items()
    ]


@pytest.mark.parametrize(("cls", "method", "expected"), cases())
def test_a_method_takes_the_parameters_of_both_spellings(
    cls: type, method: str, expected: list[str] | None
) -> None:
    parameters = list(inspect.signature(getattr(cls, method)).parameters)[1:]
    assert expected is None or parameters[: len(expected)] == expected


@pytest.mark.parametrize(("name", "fields"), FIELDS.items(), ids=FIELDS)
def test_a_spec_has_the_fields_of_both_spellings(name: str, fields: set[str]) -> None:
    assert fields <= set(getattr(interfaces, name).__annotations__)


def test_the_resources_are_also_reachable_nested() -> None:
    assert interfaces.ColocationConfig.ResourcesConfig is interfaces.ResourcesConfig  # type: ignore[attr-defined]


def test_every_public_name_of_the_core_resolves() -> None:
    assert [name for name in rl_core.__all__ if getattr(rl_core, name, None) is None] == []
