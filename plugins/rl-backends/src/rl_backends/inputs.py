"""Checks of what users pass to a policy or an engine: batches, lengths, tags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from rl_core.batch import BatchedDataDict
from rl_core.config import nearest
from rl_core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import TypeIs

__all__ = [
    "TAGS",
    "as_batch",
    "check_greedy",
    "check_limits",
    "check_rows",
    "input_lengths",
    "row_integers",
    "tags_of",
]

#: What of an engine's memory sleeps and wakes by itself.
TAGS = frozenset({"weights", "kv_cache"})

#: Columns that processors of images and videos make.
_IMAGES = frozenset({"pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_TOKENISE = 'tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")'
_PAD_RIGHT = 'pad on the right (tokenizer.padding_side = "right")'


def as_batch(data: object, *, needed_by: str) -> BatchedDataDict[Any]:
    """The batch itself, or another mapping, such as what a tokenizer returned, as one.

    Args:
        data: What the user gave.
        needed_by: The method, for messages.

    Raises:
        DataError: It is no mapping, or a tensor in it is not on the CPU.
    """
    if not isinstance(data, Mapping):
        what, fix = f"a {type(data).__name__}", f"tokenise first, and pass all of it: {_TOKENISE}"
        if isinstance(data, torch.Tensor):
            fix = 'pass {"input_ids": ids, "input_lengths": the number of tokens of each row}'
        elif isinstance(data, list | tuple) and data:
            what += f" of {type(data[0]).__name__}"
            if isinstance(data[0], Mapping):
                fix = "put them below one another: BatchedDataDict.from_batches(batches)"
        raise DataError(f"{needed_by} takes a batch of token ids, not {what}", fix=fix)
    batch = data if isinstance(data, BatchedDataDict) else BatchedDataDict[Any](dict(data))
    for key, value in batch.items():
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            raise DataError(
                f"{needed_by}: {key!r} is on {value.device}; batches are on the CPU",
                fix='pass data.to("cpu"): a backend moves what it needs itself',
                key=key,
            )
    return batch


def input_lengths(data: Mapping[str, Any], filler: Sequence[int] = ()) -> torch.Tensor:
    """``[B]`` int64 lengths of a right-padded batch, from ``input_lengths`` or ``attention_mask``.

    Args:
        data: Has ``input_ids`` ``[B, S]`` and one of the two (or both, if they agree).
        filler: Values allowed past a row's length; empty allows anything.

    Raises:
        DataError: Not right-padded, not consistent, or a length outside ``[1, S]``; names the row.
            Or there are images.
    """
    if images := sorted(_IMAGES & data.keys()):
        raise DataError(
            f"the batch has {images[0]}, but engines and policies take only text",
            fix="use rows without images and videos; models of images and text take rows of text",
            key=images[0],
        )
    ids = data.get("input_ids")
    if not _is_integer(ids) or ids.dim() != 2:
        found, fix = f"not {_found(ids)}", f"tokenise with {_TOKENISE}"
        if ids is None:
            found = f"and the batch has none; it has {', '.join(map(str, data)) or 'no columns'}"
            if near := nearest("input_ids", map(str, data)):
                fix = f"rename {near!r} to 'input_ids'"
        elif not isinstance(ids, torch.Tensor):
            fix = _tensor_of("input_ids")
        raise DataError(
            f"input_ids must be an integer tensor of shape [rows, width], {found}",
            fix=fix,
            key="input_ids",
        )
    mask, lengths = data.get("attention_mask"), row_integers(data, "input_lengths", len(ids))
    if mask is not None:
        from_mask = _lengths_from_mask(mask, ids)
        if lengths is not None:
            check_rows(
                lengths != from_mask,
                "input_lengths and attention_mask disagree",
                fix="leave one of the two out",
            )
        lengths = from_mask
    if lengths is None:
        raise DataError(
            "the batch has neither input_lengths nor attention_mask",
            fix="add input_lengths, an int64 tensor of shape [rows]",
            key="input_lengths",
        )
    least, most = _least_and_most(lengths, otherwise=ids.shape[1])
    if least < 1:
        check_rows(
            lengths < 1,
            "the prompt is empty (length 0)",
            fix="drop the row, or begin it with a token, such as the tokenizer's bos_token",
        )
    if most > ids.shape[1]:
        check_rows(
            lengths > ids.shape[1],
            f"the length is above the padded width {ids.shape[1]}",
            fix="give each row its number of real tokens",
        )
    if filler and least < ids.shape[1]:
        past = torch.arange(ids.shape[1]) >= lengths[:, None]
        allowed = torch.isin(ids.to(torch.int64), torch.tensor(list(filler), dtype=torch.int64))
        check_rows(
            (past & ~allowed).any(1),
            f"tokens other than the padding {tuple(dict.fromkeys(filler))} follow after the row's "
            "length (left-padded, or a wrong length)",
            fix=f"{_PAD_RIGHT} and give each row's true length",
        )
    return lengths


def check_rows(bad: torch.Tensor, message: str, *, fix: str) -> None:
    """Raises a DataError that names the first bad row of ``[B]`` bool."""
    if bad.any():
        rows = bad.nonzero().flatten()
        more = f" ({len(rows)} such rows)" if len(rows) > 1 else ""
        raise DataError(
            f"row {int(rows[0])}: {message}{more}", fix=fix, row=int(rows[0]), key="input_ids"
        )


def row_integers(data: Mapping[str, Any], key: str, rows: int) -> torch.Tensor | None:
    """The column as ``[rows]`` int64, or None without it."""
    value = data.get(key)
    if value is None:
        return None
    if not _is_integer(value) or value.shape != (rows,):
        raise DataError(
            f"{key} must be an integer tensor of shape [{rows}], not {_found(value)}",
            fix=f"give {key} one whole number for each row"
            if isinstance(value, torch.Tensor)
            else _tensor_of(key),
            key=key,
        )
    return value.to(torch.int64)


def check_limits(
    ids: torch.Tensor, lengths: torch.Tensor, *, vocab_size: int, context: int | None
) -> None:
    """Checks that a model can read rows.

    Args:
        ids: ``[B, S]`` token ids; what stands past a row's length is not looked at.
        lengths: ``[B]`` tokens of each row.
        vocab_size: Token ids are below it.
        context: Most tokens of a row; None if the model names no limit.

    Raises:
        DataError: Names the row, and the position of a token that the model does not have.
    """
    least, most = _least_and_most(ids, otherwise=0)
    if least < 0 or most >= vocab_size:  # what is padding may be
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        outside = real & ((ids < 0) | (ids >= vocab_size))
        if outside.any():
            row, position = outside.nonzero()[0].tolist()
            raise DataError(
                f"row {row}: token id {int(ids[row, position])} at position {position} is outside "
                f"the vocabulary of {vocab_size}",
                fix="tokenise with the model's own tokenizer; pad only past input_lengths",
                row=row,
                key="input_ids",
            )
    if context is not None and ids.shape[1] > context and (lengths > context).any():
        row = int((lengths > context).nonzero()[0])
        raise DataError(
            f"row {row} has {int(lengths[row])} tokens, but the context has {context}",
            fix="shorten the row, or raise max_model_len if it is below the model's context",
            row=row,
            key="input_ids",
        )


def check_greedy(greedy: object) -> None:
    """Refuses what is neither True nor False, such as a text, which would count as True.

    Raises:
        DataError: It is something else.
    """
    if greedy not in (True, False):
        raise DataError(
            f"greedy must be True or False, got {greedy!r}",
            fix="give True for the argmax, or False to sample",
            key="greedy",
        )


def _tensor_of(key: str) -> str:
    made = f"torch.as_tensor(batch[{key!r}])"
    return f"make a tensor of it: {made} where rows have one length, else {_TOKENISE}"


def _least_and_most(values: torch.Tensor, *, otherwise: int) -> tuple[int, int]:
    """One look, where a look at each row costs more; ``otherwise`` where there are no values."""
    if not values.numel():
        return otherwise, otherwise
    least, most = values.aminmax()
    return int(least), int(most)


def _is_integer(value: object) -> TypeIs[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.dtype in INTEGERS


def _found(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"


def _lengths_from_mask(mask: object, ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(mask, torch.Tensor) or mask.shape != ids.shape:
        raise DataError(
            f"attention_mask must be a tensor of input_ids' shape {list(ids.shape)}, "
            f"not {_found(mask)}",
            fix=f"tokenise with {_TOKENISE}",
            key="attention_mask",
        )
    ones = mask.to(torch.bool)
    lengths = ones.sum(1)
    positions = torch.arange(ids.shape[1])
    check_rows(
        (ones != (positions < lengths[:, None])).any(1),
        "attention_mask is not right-padded",
        fix=_PAD_RIGHT,
    )
    return lengths


def tags_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], also: tuple[str, ...] = ()
) -> frozenset[str]:
    """The tags of a lifecycle call: all if none are given.

    Args:
        args: The tags, if anything.
        kwargs: ``tags``, and switches.
        also: The switches that there are: True or False.

    Raises:
        ConfigError: There is no such tag or keyword, or a switch is neither True nor False.
    """
    for key, value in kwargs.items():
        if key not in ("tags", *also):
            raise ConfigError(
                f"unknown keyword {key!r}", fix=f"use one of {', '.join(['tags', *also])}", key=key
            )
        if key in also and not isinstance(value, bool):
            text = f"{key} must be True or False, got {value!r}"
            raise ConfigError(text, fix="give True or False", key=key)
    if len(args) + ("tags" in kwargs) > 1:
        text = f"got several values of tags: {args!r} and {kwargs!r}"
        raise ConfigError(text, fix="give tags once", key="tags")
    tags = kwargs.get("tags") or (args[0] if args else None)
    chosen = TAGS if tags is None else frozenset(tags)
    if unknown := chosen - TAGS:
        raise ConfigError(
            f"unknown tags {sorted(unknown)}",
            fix=f"use one of {', '.join(sorted(TAGS))}",
            key="tags",
        )
    return chosen
