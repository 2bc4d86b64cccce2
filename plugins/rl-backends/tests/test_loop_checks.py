"""What a training call is refused for, and what it is warned of, before a backend sees it."""

from __future__ import annotations

import enum
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_backends.policy.loop_checks import LoopChecks
from rl_backends.policy.losses import call_loss, input_type_of
from rl_core import DataError, LoopWarning
from rl_core.batch import BatchedDataDict
from rl_core.batch.provenance import Provenance
from rl_core.errors import ConfigError
from rl_core.interfaces import LossFunction, LossInputType
from rl_losses import training_batch

COUNTS = {"global_valid_seqs": torch.tensor(1.0), "global_valid_toks": torch.tensor(2.0)}


class Loss(LossFunction):
    def __call__(self, inputs: Any, data: Any, **counts: Any) -> Any:
        return inputs.sum(), {"width": inputs.shape[1]}


def output(rows: int = 2, **extra: Any) -> BatchedDataDict[Any]:
    """What an engine made: a prompt of one token and two more, the last row one less."""
    lengths = torch.full((rows,), 2)
    lengths[-1] = 1
    return BatchedDataDict(
        {
            "output_ids": torch.arange(rows * 3).view(rows, 3),
            "generation_lengths": lengths,
            "unpadded_sequence_lengths": lengths + 1,
            "logprobs": -torch.rand(rows, 3),
            "truncated": torch.arange(rows) == 0,
            "weights_version": torch.zeros(rows, dtype=torch.int64),
            "weights_origin": torch.zeros(rows, dtype=torch.int64),
            **extra,
        }
    )


class Loop:
    """A policy's side of a loop; ``refit`` commits."""

    def __init__(self, **config: Any) -> None:
        self.version, self.origin = 0, 5
        self.loop_checks = LoopChecks(lambda: config, lambda: self.version, lambda: self.origin)

    def generate(self, distribution: str | None = "temperature 1") -> BatchedDataDict[Any]:
        made = output()
        made.provenance = Provenance(distribution)
        return training_batch(made, [0.0, 1.0], advantages=[-1.0, 1.0])

    def train(self, batch: Any, *, eval_mode: bool = False) -> list[str]:
        """What was said."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            self.loop_checks.check_training_call(batch, Loss(), eval_mode=eval_mode)
        assert all(issubclass(one.category, LoopWarning) for one in said)
        return [str(one.message) for one in said]

    def refit(self) -> None:
        self.version += 1


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["advantages", "generation_logprobs", "prev_logprobs"])
def test_a_rollout_without_token_mask_is_refused(key):
    batch = {"input_ids": torch.ones(2, 3), key: torch.zeros(2, 3)}
    with pytest.raises(DataError, match="tokens of prompts would be trained"):
        Loop().train(BatchedDataDict(batch))
    assert Loop().train(BatchedDataDict(batch, token_mask=torch.ones(2, 3))) == []


def test_plain_text_to_train_on_needs_no_mask():
    assert Loop().train({"input_ids": torch.ones(2, 3)}) == []


@pytest.mark.parametrize("data", [["a text"], [[1, 2]], "a text", 3])
def test_what_is_no_batch_is_refused_with_how_to_make_one(data):
    with pytest.raises(DataError, match="return_tensors"):
        Loop().loop_checks.check_training_call(data, Loss())


def test_a_tensor_on_a_device_is_named():
    with pytest.raises(DataError, match=r"'input_ids' is on meta.*\n.*to\(\"cpu\"\)"):
        Loop().train({"input_ids": torch.ones(2, 3, device="meta")})


# -- losses of others ----------------------------------------------------------------------------


class Foreign(enum.Enum):
    LOGPROB = "logprob"
    LOGIT = "logit"
    DISTILLATION = "distillation"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (Foreign.LOGIT, LossInputType.LOGIT),
        (Foreign.LOGPROB, LossInputType.LOGPROB),
        ("logit", LossInputType.LOGIT),
        (LossInputType.LOGIT, LossInputType.LOGIT),
    ],
)
def test_another_enum_means_the_same(given, wanted):
    assert input_type_of(SimpleNamespace(input_type=given)) is wanted


@pytest.mark.parametrize("given", [Foreign.DISTILLATION, "hidden_states", 3])
def test_an_input_that_no_policy_has_is_refused(given):
    with pytest.raises(ConfigError, match="no policy computes"):
        input_type_of(SimpleNamespace(input_type=given))


def test_losses_are_called_by_the_names_they_know():
    def theirs(data, global_valid_seqs, global_valid_toks, next_token_logprobs):
        return next_token_logprobs.sum(), {"width": next_token_logprobs.shape[1]}

    scores = torch.tensor([[0.0, -1.0, -2.0]])
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": torch.ones(1, 3)})
    for loss, width in ((Loss(), 3), (theirs, 2)):
        share, metrics = call_loss(loss, scores, data, **COUNTS)
        assert (float(share), metrics["width"]) == (-3.0, width)
    with pytest.raises(ConfigError, match="is called with inputs="):
        call_loss(lambda scores, rows: None, scores, data, **COUNTS)


# -- loops ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["temperature 0.7", "temperature 1, top_p 0.9"])
def test_another_distribution_is_warned_of_once_with_both(other):
    loop = Loop(temperature=1.0)
    [said] = loop.train(loop.generate(other))
    assert f"sampled with {other}, but the policy" in said
    assert "at temperature 1 over the whole vocabulary" in said
    loop.refit()
    assert loop.train(loop.generate("temperature 0.7")) == []
    assert Loop(temperature=0.7).train(loop.generate("temperature 0.7")) == []
    assert Loop(temperature=0.7).train(loop.generate(None)) == []


# -- another trainer ------------------------------------------------------------------------------


def from_trainers(loop: Loop, *origins: int) -> BatchedDataDict[Any]:
    """Rows of an engine that these trainers have refit, in turn."""
    batch = loop.generate()
    batch["weights_origin"] = torch.tensor(origins)
    return batch


def test_rows_of_another_trainer_are_warned_of_once_with_the_first():
    loop = Loop()
    [said] = loop.train(from_trainers(loop, 5, 6))
    assert "1 of 2 rows (the first is row 1) were generated with another trainer's weights" in said
    assert "(origin 6; this policy's is 5)" in said
    loop.refit()
    assert loop.train(from_trainers(loop, 6, 7)) == []


def test_rows_of_this_trainer_and_of_an_engine_that_nobody_has_refit_are_no_other_s():
    loop = Loop()
    assert loop.train(from_trainers(loop, 0, 5)) == []
    loop.refit()
    assert loop.train(from_trainers(loop, 5, 5)) == []
    loop.refit()
    assert loop.train(from_trainers(loop, 6, 6), eval_mode=True) == []


def test_a_worker_of_a_policy_knows_no_origin_and_says_nothing():
    loop = Loop()
    loop.origin = 0
    assert loop.train(from_trainers(loop, 6, 7)) == []


def test_rows_without_an_origin_are_not_judged():
    loop = Loop()
    batch = loop.generate()
    del batch["weights_origin"]
    assert loop.train(batch) == []


# -- another model --------------------------------------------------------------------------------


def scored(
    loop: Loop, *, off: float = 0.2, version: int = 1, origin: int = 5, **made: Any
) -> list[str]:
    """What is said when rows are scored whose log-probs are so far off, on generated tokens."""
    batch = loop.generate(**made)
    batch["weights_version"] = torch.full((2,), version)
    batch["weights_origin"] = torch.full((2,), origin)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loop.loop_checks.compare(batch, batch["generation_logprobs"] + off)
    return [str(one.message) for one in said]


def test_an_engine_that_computes_another_model_is_warned_of_once():
    loop = Loop()
    loop.refit()
    assert scored(loop, off=0.04) == []
    [said] = scored(loop)
    assert "differ from the policy's by a factor of 1.22 on average" in said
    assert "with the same weights" in said
    assert scored(loop) == []


def test_what_is_not_of_the_same_weights_and_distribution_is_not_compared():
    loop = Loop(temperature=0.7)
    assert scored(loop, version=0, distribution="temperature 0.7") == []  # no refit yet
    loop.refit()
    assert scored(loop, version=0, distribution="temperature 0.7") == []
    assert scored(loop) == []
    assert scored(loop, distribution=None) == []
    assert scored(loop, origin=6, distribution="temperature 0.7") == []  # another trainer's
    loop.train(loop.generate("temperature 0.7"))
    assert scored(loop, distribution="temperature 0.7") == []
    assert scored(loop, version=2, distribution="temperature 0.7") == []  # of another policy
    loop.refit()
    assert scored(loop, distribution="temperature 0.7") == []
    assert len(scored(loop, version=2, distribution="temperature 0.7")) == 1


def test_what_cannot_be_compared_is_not():
    loop = Loop()
    loop.refit()
    batch = loop.generate()
    loop.loop_checks.compare(dict(batch), batch["generation_logprobs"] + 1)
    loop.loop_checks.compare(batch, batch["generation_logprobs"][:, 1:] + 1)
    del batch["generation_logprobs"]
    loop.loop_checks.compare(batch, torch.ones(2, 3))
