"""What every loss here shares: checked options, and reading a batch with useful errors."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, Self, get_type_hints

from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import LossFunction, LossType
from rl_core.plugins.config import check_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

__all__ = ["ConfiguredLoss", "read_tensor"]

_SOURCES = {
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

    def __post_init__(self) -> None:
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        check_config(_options_of(type(self)), options, what=type(self).__name__)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Builds the loss from a mapping, such as a section of a YAML file.

        Args:
            config: Options by name; ``loss_type`` may be a string, such as ``"token_level"``.

        Raises:
            ConfigError: A key is unknown (the nearest match is named), ill-typed or out of bounds.
        """
        options = dict(config)
        if isinstance(options.get("loss_type"), str):
            options["loss_type"] = _loss_type(options["loss_type"], what=cls.__name__)
        return cls(**check_config(_options_of(cls), options, what=cls.__name__))


def _loss_type(value: str, *, what: str) -> LossType:
    by_value = {kind.value: kind for kind in LossType}
    if value not in by_value:
        allowed = " or ".join(map(repr, by_value))
        raise ConfigError(
            f"{what}: 'loss_type' must be {allowed}, got {value!r}",
            fix=f"set 'loss_type' to {allowed}",
            key="loss_type",
        )
    return by_value[value]


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
    if not any(_fits(tuple(value.shape), shape) for shape in shapes):
        expected = " or ".join(str(list(shape)) for shape in shapes)
        raise DataError(
            f"{needed_by}: '{key}' has shape {list(value.shape)}, expected {expected}",
            fix=_SOURCES[key],
            key=key,
        )
    return value


def _fits(shape: tuple[int, ...], expected: tuple[int, ...]) -> bool:
    return len(shape) == len(expected) and all(
        want in (-1, size) for size, want in zip(shape, expected, strict=True)
    )
