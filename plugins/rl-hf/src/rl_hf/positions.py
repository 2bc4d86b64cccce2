"""Up to which length rows may share a pass, where the longest row of a pass changes the others.

A model may turn its queries and keys by frequencies that it chooses by the largest position of a
pass, and keeps: longrope has one set of them for short rows and one for long ones. Then a row alone
and the same row beside a longer one are scored differently, and so is a row that has grown.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["sharing_limit"]

#: Tokens that the model is run on.
TOKENS = 4


@torch.no_grad()
def sharing_limit(model: PreTrainedModel) -> int | None:
    """Tokens of the longest row that leaves a model as a row of a few tokens does.

    It is tried on a few tokens, the last of them at other positions: what a model chooses by the
    positions of a pass, it keeps in its buffers.

    Args:
        model: In evaluation mode, on its device.

    Returns:
        None if rows of any length do, or if the model names no context or takes no positions.
    """
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    embeddings = model.get_input_embeddings().weight
    ids = torch.arange(TOKENS, device=embeddings.device).remainder(len(embeddings))[None]

    def buffers(length: int) -> dict[str, torch.Tensor]:
        positions = torch.arange(TOKENS, device=ids.device)
        positions[-1] = length - 1
        model(input_ids=ids, position_ids=positions[None], use_cache=False)
        return {name: buffer.clone() for name, buffer in model.named_buffers()}

    try:
        short = buffers(TOKENS)
        if longest <= TOKENS or _same(short, buffers(longest)):
            return None
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    shares, changes = TOKENS, longest
    while changes - shares > 1:
        length = (shares + changes) // 2
        if _same(short, buffers(length)):
            shares = length
        else:
            changes = length
    buffers(TOKENS)
    return shares


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(tensor, other[name]) for name, tensor in one.items()
    )
