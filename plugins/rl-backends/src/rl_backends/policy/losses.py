"""Calling a loss, ours or of another library, and refusing what is none."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError
from rl_core.interfaces import LossInputType

if TYPE_CHECKING:
    import torch

    from rl_core.batch import BatchedDataDict

__all__ = ["call_loss", "check_loss", "input_type_of"]

#: What other libraries call the one argument that differs, and how it is laid out: entry t of
#: their log-probs scores token t+1.
_ELSEWHERE = {LossInputType.LOGPROB: "next_token_logprobs", LossInputType.LOGIT: "logits"}
_ALWAYS = ("data", "global_valid_seqs", "global_valid_toks")


def input_type_of(loss_fn: Any) -> LossInputType:
    """What a loss wants, by the value or name of its ``input_type``: enums may be others' own.

    Raises:
        ConfigError: It wants something that no policy computes.
    """
    given = getattr(loss_fn, "input_type", LossInputType.LOGPROB)
    words = {given.value, given.name} if isinstance(given, enum.Enum) else {given}
    for kind in LossInputType:
        if words & {kind.value, kind.name}:
            return kind
    raise ConfigError(
        f"{_name(loss_fn)}.input_type is {given!r}, which no policy computes",
        fix=f"set input_type to one of {[str(kind) for kind in LossInputType]}",
        key="input_type",
    )


def check_loss(loss_fn: Any) -> None:
    """Refuses what cannot be called as a loss.

    Raises:
        ConfigError: It is a class, or takes other arguments than a loss is called with.
    """
    if isinstance(loss_fn, Mapping):
        raise ConfigError(
            f"train got a {type(loss_fn).__name__} in place of the loss",
            fix="call train(batch, loss): the batch comes first",
            key="loss_fn",
        )
    if isinstance(loss_fn, type) or not callable(loss_fn):
        what = f"the class {loss_fn.__name__}" if isinstance(loss_fn, type) else repr(loss_fn)
        call = f"{loss_fn.__name__}()" if isinstance(loss_fn, type) else "NLLLossFn()"
        raise ConfigError(
            f"train takes a loss, not {what}", fix=f"pass an instance: {call}", key="loss_fn"
        )
    _keyword(loss_fn, input_type_of(loss_fn))


def call_loss(
    loss_fn: Any,
    inputs: torch.Tensor,
    data: BatchedDataDict[Any],
    *,
    global_valid_seqs: torch.Tensor,
    global_valid_toks: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Calls a loss with keywords, see :class:`~rl_core.interfaces.LossFunction`.

    Args:
        loss_fn: The loss.
        inputs: ``[b, s]`` log-probs where entry t scores token t, or ``[b, s, V]`` logits, as
            :func:`input_type_of` returns. A loss that calls its log-probs ``next_token_logprobs``
            gets those from token 1 on, ``[b, s-1]``.
        data: The rows.
        global_valid_seqs: 0-d.
        global_valid_toks: 0-d.
    """
    wanted = input_type_of(loss_fn)
    keyword = _keyword(loss_fn, wanted)
    if keyword == _ELSEWHERE[LossInputType.LOGPROB]:
        inputs = inputs[:, 1:]
    given = {
        keyword: inputs,
        "data": data,
        "global_valid_seqs": global_valid_seqs,
        "global_valid_toks": global_valid_toks,
    }
    share, metrics = loss_fn(**given)
    return share, metrics


def _keyword(loss_fn: Any, wanted: LossInputType) -> str:
    """Under which name a loss takes what the policy computed."""
    signature = inspect.signature(loss_fn)
    for keyword in ("inputs", _ELSEWHERE[wanted]):
        try:
            signature.bind(**dict.fromkeys((keyword, *_ALWAYS)))
        except TypeError:
            continue
        return keyword
    raise ConfigError(
        f"{_name(loss_fn)} takes {signature}, but a loss is called with inputs=, data=, "
        "global_valid_seqs= and global_valid_toks=",
        fix="give it these parameters, as rl_core.interfaces.LossFunction has them",
        key="loss_fn",
    )


def _name(loss_fn: Any) -> str:
    return getattr(loss_fn, "__name__", type(loss_fn).__name__)
