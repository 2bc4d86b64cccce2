"""From what an engine generated to what a policy learns from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from rl_core.batch import BatchedDataDict
from rl_core.config import as_int
from rl_core.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_core.interfaces import TrainingDatumSpec

__all__ = ["Completion", "completions", "training_batch"]

#: One number for each row: a list, a tensor, or whatever else torch reads, such as numpy's arrays.
Numbers: TypeAlias = "Sequence[float] | torch.Tensor | Any"

_GENERATED = ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "logprobs")
_RECIPE = "pass what generation.generate(...) returned"


class Completion(NamedTuple):
    """Texts of a row without special tokens, the index of its prompt, and the generated tokens."""

    prompt: str
    text: str
    row: int
    ids: list[int]


def completions(
    output: Mapping[str, Any], tokenizer: Any, *, num_generations: int = 1
) -> list[Completion]:
    """The texts of what ``generate`` returned, row by row; ``num_generations`` is the engine's."""
    _check_generated("completions", output)
    made, size = [], as_int("num_generations", num_generations, 1)
    ends, counts = output["unpadded_sequence_lengths"], output["generation_lengths"]
    for row, (end, count) in enumerate(zip(ends.tolist(), counts.tolist(), strict=True)):
        parts = output["output_ids"][row, :end].split([end - count, count])
        prompt, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in parts)
        made.append(Completion(prompt, text, row // size, parts[1].tolist()))
    return made


def training_batch(
    output: Mapping[str, Any],
    rewards: Numbers | None = None,
    *,
    advantages: Numbers | Callable[[torch.Tensor], torch.Tensor] | None = None,
    mask_truncated: bool = False,
) -> BatchedDataDict[TrainingDatumSpec]:
    """The batch that a policy trains on, from what ``generate`` returned.

    Args:
        output: See :class:`~rl_core.interfaces.GenerationOutputSpec`; ``B`` rows, ``W`` wide. Rows
            may have been selected or put in another order.
        rewards: ``[B]`` one number for each row of the output; None if the loss needs none.
        advantages: ``[B]`` or ``[B, W]``; or a function of the rewards, ``[B]`` float32.
        mask_truncated: Rows that ended by length do not count: their ``sample_mask`` is 0.

    Returns:
        ``input_ids`` ``[B, W]`` int64 and ``input_lengths`` ``[B]`` int64, ``token_mask``
        ``[B, W]`` float32 with 1 on generated tokens alone, ``sample_mask`` ``[B]`` float32,
        ``generation_logprobs`` ``[B, W]`` float32; if given, ``rewards`` and ``advantages``,
        float32; ``weights_version``, ``weights_origin``, ``truncated`` and every further key of the
        output, row for row. Tensors that need no change are shared with the output.

    Raises:
        DataError: The output is none, a count or shape is wrong, or a number that counts is not
            finite; names the key and the row.
    """
    _check_generated("training_batch", output)
    ids, ends = output["output_ids"], output["unpadded_sequence_lengths"]
    rows, width = ids.shape
    starts = ends - output["generation_lengths"]
    positions = torch.arange(width)
    generated = (positions >= starts[:, None]) & (positions < ends[:, None])
    counts = torch.ones(rows)
    if mask_truncated:
        counts = counts * ~_rows_of("truncated", output.get("truncated"), rows).bool()
    made: dict[str, Any] = {
        "input_ids": ids,
        "input_lengths": ends,
        "token_mask": generated.float(),
        "sample_mask": counts,
        "generation_logprobs": output["logprobs"],
    }
    if rewards is not None:
        made["rewards"] = _finite("rewards", _rows_of("rewards", rewards, rows), counts)
    if callable(advantages):
        if rewards is None:
            raise DataError(
                "training_batch cannot compute advantages without rewards",
                fix="give the rewards, one for each row of the output",
                key="rewards",
            )
        advantages = advantages(made["rewards"])
    if advantages is not None:
        of_rows = _rows_of("advantages", advantages, rows, width)
        made["advantages"] = _finite("advantages", of_rows, counts)
    further = {key: value for key, value in output.items() if key not in _GENERATED}
    if twice := sorted(further.keys() & made.keys()):
        raise DataError(
            f"training_batch: the output already has {', '.join(twice)}, which it would overwrite",
            fix="give these columns of the prompts another name before you generate",
            key=twice[0],
        )
    batch: BatchedDataDict[Any] = BatchedDataDict({**further, **made})
    batch.provenance = getattr(output, "provenance", None)
    _ = batch.size  # every further key has a value for each row
    return batch


def _check_generated(method: str, output: Mapping[str, Any]) -> None:
    for key in _GENERATED:
        if not isinstance(output.get(key), torch.Tensor):
            raise DataError(f"{method}: the output has no tensor {key!r}", fix=_RECIPE, key=key)


def _rows_of(key: str, given: Any, rows: int, width: int | None = None) -> torch.Tensor:
    """``[rows]`` (or ``[rows, width]``) float32 on the CPU."""
    try:
        values = torch.as_tensor(given).detach().cpu().float()
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"training_batch: {key} cannot be read as numbers: {error}",
            fix=f"give {key} as a list, a tensor or an array with a number for each row",
            key=key,
        ) from None
    if values.shape != (rows,) and (width is None or values.shape != (rows, width)):
        per_token = "" if width is None else f" or [{rows}, {width}]"
        raise DataError(
            f"training_batch: {key} has shape {list(values.shape)}, expected [{rows}]{per_token}",
            fix=f"give one of the {key} for each of the {rows} rows of the output; with "
            "num_generations=n, a prompt has n rows next to each other",
            key=key,
        )
    return values


def _finite(key: str, values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    wrong = ~values.isfinite().view(len(values), -1).all(1) & (counts > 0)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise DataError(
            f"training_batch: {key} of row {row} have a value that is not finite",
            fix="correct the reward function, or leave the row out: output.select_indices(rows)",
            key=key,
            row=row,
        )
    return values
