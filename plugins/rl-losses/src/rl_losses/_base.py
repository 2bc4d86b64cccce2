"""What every loss here shares: checked options, and reading a batch with useful errors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from rl_core.config import check_config
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import LossFunction, LossInputType, LossType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["ConfiguredLoss", "check_logprobs", "read_tensor"]

_SOURCES = {
    "input_ids": 'keep data["input_ids"], the tokens that the log-probs are of',
    "rewards": 'set data["rewards"] to one number for each row; training_batch(...) does',
    "token_mask": 'set data["token_mask"] to 1 where a token counts, else 0',
    "sample_mask": 'set data["sample_mask"] to 1 for each row that counts, else 0',
    "advantages": 'set data["advantages"] = rl_losses.grpo_advantages(rewards, group_size=n)',
    "prev_logprobs": (
        'before training, set data["prev_logprobs"] = policy.get_logprobs(data)["logprobs"]'
    ),
    "reference_policy_logprobs": (
        'set data["reference_policy_logprobs"] = '
        'policy.get_reference_policy_logprobs(data)["reference_logprobs"]'
    ),
    "generation_logprobs": (
        'set data["generation_logprobs"] = output["logprobs"], where generation.generate(...) '
        "returned output"
    ),
    "high_covariance": (
        'before training, set data["high_covariance"] = rl_losses.high_covariance('
        'data["advantages"], data["prev_logprobs"], data["token_mask"])'
    ),
    "teacher_topk_logits": (
        'set data["teacher_topk_logits"] = teacher.get_topk_logits(data, k)["topk_logits"]'
    ),
    "teacher_topk_indices": (
        'set data["teacher_topk_indices"] = teacher.get_topk_logits(data, k)["topk_indices"]'
    ),
}


@dataclass(frozen=True, kw_only=True)
class ConfiguredLoss(LossFunction):
    """A loss whose options are the fields of a frozen dataclass, checked when it is built.

    Raises:
        ConfigError: An option is of the wrong type or out of its bounds.
    """

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Checks the options, before there is a loss."""
        if args:
            raise ConfigError(
                f"{cls.__name__} takes its options as keywords, got {args[0]!r}",
                fix=f"write {cls.__name__}(name=value), or {cls.__name__}.from_config(mapping)",
            )
        check_config(_options_of(cls), options, what=cls.__name__)
        return super().__new__(cls)

    def _needs(self, needed: str, fits: bool, *options: str) -> None:
        """Refuses options that are set to other than their defaults, unless ``needed`` fits.

        Raises:
            ConfigError: Such an option would have no effect.
        """
        for field in fields(self):
            if field.name in options and not fits and getattr(self, field.name) != field.default:
                raise ConfigError(
                    f"{type(self).__name__}: '{field.name}' has no effect without {needed}",
                    fix=f"set {needed}, or leave '{field.name}' out",
                    key=field.name,
                )

    def _take_logits(self) -> None:
        """Makes policies hand full logits to this loss instead of log-probs."""
        object.__setattr__(self, "input_type", LossInputType.LOGIT)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Builds the loss from a mapping, such as a section of a YAML file.

        Args:
            config: Options by name; ``loss_type`` may be a string, such as ``"token_level"``.

        Raises:
            ConfigError: A key is unknown (the nearest match is named), ill-typed or out of bounds.
        """
        options = dict(config)
        if isinstance(kind := options.get("loss_type"), str):
            by_value = {known.value: known for known in LossType}
            if kind not in by_value:
                allowed = " or ".join(map(repr, by_value))
                raise ConfigError(
                    f"{cls.__name__}: 'loss_type' must be {allowed}, got {kind!r}",
                    fix=f"set 'loss_type' to {allowed}",
                    key="loss_type",
                )
            options["loss_type"] = by_value[kind]
        return cls(**check_config(_options_of(cls), options, what=cls.__name__))


@cache
def _options_of(cls: type[ConfiguredLoss]) -> type:
    """A class whose annotations are the options alone, without the constants of the loss."""
    hints = get_type_hints(cls, include_extras=True)
    return type(cls.__name__, (), {"__annotations__": {f.name: hints[f.name] for f in fields(cls)}})


def read_tensor(
    data: Mapping[str, Any], key: str, shapes: Sequence[tuple[int, ...]], *, needed_by: str
) -> torch.Tensor:
    """Returns ``data[key]``, which must have one of the given shapes.

    Args:
        data: The rows of a microbatch.
        key: What to read.
        shapes: The shapes that are right; -1 stands for any size.
        needed_by: The loss and the option that ask for it, for messages.

    Raises:
        DataError: The key is missing, or its shape is none of those.
    """
    if key not in data:
        raise DataError(
            f"{needed_by} needs the key '{key}', which the batch lacks; "
            f"it has {', '.join(sorted(map(str, data))) or 'no keys'}",
            fix=_SOURCES[key],
            key=key,
        )
    value: torch.Tensor = data[key]
    fits = (
        len(shape) == value.dim()
        and all(want in (-1, size) for size, want in zip(value.shape, shape, strict=True))
        for shape in shapes
    )
    if not any(fits):
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise DataError(
            f"{needed_by}: '{key}' has shape {list(value.shape)}, expected {expected}",
            fix=_SOURCES[key],
            key=key,
        )
    return value


def check_logprobs(
    values: torch.Tensor, tokens: torch.Tensor, key: str, *, needed_by: str, strict: bool = False
) -> None:
    """Refuses log-probs that were rolled by one, or that no token can have.

    Args:
        values: ``[b, s]`` as they stand in the batch.
        tokens: ``[b, s]`` bool; the tokens that count.
        key: Where they stand.
        needed_by: The loss and the option that ask for them, for messages.
        strict: Entry 0 of a row that counts must be 0. Otherwise it may be anything, unless the
            row's last token has the 0 that a roll brings there.

    Raises:
        DataError: A row was rolled, or a token that counts has a log-prob that is infinite; names
            row and position.
    """
    if not values.numel():
        return
    first = values[:, 0]
    shifted = tokens.any(1) & first.isfinite() & (first != 0)
    if not strict:
        last = tokens.shape[1] - 1 - tokens.flip(1).int().argmax(1, keepdim=True)
        shifted &= values.gather(1, last)[:, 0] == 0
    if shifted.any():
        row = int(shifted.nonzero()[0, 0])
        raise DataError(
            f"{needed_by}: '{key}' is {first[row].item():g} at row {row}, position 0, which no "
            "token precedes: the log-probs are shifted by one",
            fix="entry t must score token t, as get_logprobs returns it: undo the shift with "
            f"data['{key}'].roll(1, dims=1), and set entry 0 to 0",
            key=key,
            row=row,
        )
    wrong = tokens & ~values.isfinite()
    if wrong.any():
        row, position = wrong.nonzero()[0].tolist()
        raise DataError(
            f"{needed_by}: '{key}' is {values[row, position].item()} at row {row}, position "
            f"{position}, but a sampled token has a finite log-prob",
            fix="compare the sampling options of the engine with the policy's (a token outside of "
            "top_k or top_p has none), or mask the token with 'token_mask'",
            key=key,
            row=row,
        )
