"""Log-probs of a plain output layer by a fused kernel: Liger's, on CUDA, where it is installed.

Where the logits are nothing but hidden states times a matrix, the kernel makes them some tokens at
a time and replaces them with their gradient in place. Everything else goes through the model's own
code, see :mod:`rl_hf.hidden`.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    #: Cross entropies ``[N]`` of the rows of a matrix ``[V, H]``, states ``[N, H]`` and targets.
    CrossEntropies = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_log = logging.getLogger(__name__)

__all__ = ["fused_kernel", "is_plain", "plain_output"]

#: Earlier ones do not weigh each token's gradient.
OLDEST = Version("0.8.2")


def plain_output(
    model: nn.Module, inner: PreTrainedModel, hidden: torch.Tensor, logits: torch.Tensor
) -> str | None:
    """The linear layer whose outputs are the logits as they are; tried on a few tokens.

    Args:
        model: The model, whatever it is wrapped in.
        inner: The transformers model in it.
        hidden: ``[M, H]`` that the body made.
        logits: ``[M, V]`` that the model made of them.

    Returns:
        Its name in ``model``; None if more is between, however little it changes.
    """
    layer: Any = inner.get_output_embeddings()
    if not is_plain(layer) or hidden.dtype != layer.weight.dtype:
        return None
    if not torch.equal(nn.functional.linear(hidden, layer.weight), logits):
        return None
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    return names[layer]


def is_plain(layer: Any) -> bool:
    """Whether a layer multiplies by its weight and does nothing else."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    hooks: list[dict[int, Any]] = [
        *(layer._forward_pre_hooks, layer._forward_hooks),
        *(layer._backward_pre_hooks, layer._backward_hooks),
    ]
    return layer._parameters["bias"] is None and not any(hooks)


def fused_kernel(device: torch.device) -> CrossEntropies | None:
    """The kernel for tensors of a device, if there is one."""
    return _liger() if device.type == "cuda" else None


@cache
def _liger() -> CrossEntropies | None:
    try:
        found = version("liger-kernel")
    except PackageNotFoundError:
        return None
    if Version(found) < OLDEST:
        _log.warning(
            "liger-kernel %s is not used: before %s its gradients of single tokens are wrong",
            found,
            OLDEST,
        )
        return None
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)

    def cross_entropies(
        weight: torch.Tensor, hidden: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        if torch.is_grad_enabled() and not hidden.requires_grad:
            # Liger makes no gradient of the matrix otherwise, which may be all that is trained.
            hidden = hidden.detach().requires_grad_()
        result: torch.Tensor = loss(weight, hidden, targets)
        return result

    return cross_entropies
