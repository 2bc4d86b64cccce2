"""Log-probs of a plain output layer by a fused kernel: Liger's, on CUDA, where it is installed.

Where the logits are nothing but hidden states times a matrix, the kernel makes them some tokens at
a time and replaces them with their gradient in place. Everything else goes through the model's own
code, see :mod:`rl_hf.hidden`.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from rl_hf.logprobs import Head

    #: Cross entropies ``[N]`` of the rows of states ``[N, H]`` and targets.
    FusedHead = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    #: Cross entropies ``[N]`` of the rows of a matrix ``[V, H]``, states ``[N, H]`` and targets.
    CrossEntropies = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_log = logging.getLogger(__name__)

__all__ = ["fused_head", "fused_kernel", "plain_output"]

#: Earlier ones do not weigh each token's gradient.
OLDEST = Version("0.8.2")


def plain_output(
    model: nn.Module,
    inner: PreTrainedModel,
    hidden: torch.Tensor,
    head: Head,
    logits: torch.Tensor,
) -> str | None:
    """The linear layer whose outputs are the logits as they are; tried on a few tokens.

    Args:
        model: The model, whatever it is wrapped in.
        inner: The transformers model in it.
        hidden: ``[M, H]`` that the body made.
        head: Makes logits of them, with all that the model does after its body.
        logits: ``[M, V]`` that the model made of them.

    Returns:
        Its name in ``model``; None if more is between, however little it changes, or if there is
        no kernel.
    """
    layer: Any = inner.get_output_embeddings()
    hidden = hidden.detach()
    if fused_kernel(hidden.device) is None or not _made_by(layer, hidden, logits):
        return None
    large = 1000 * hidden  # what a soft cap leaves as it is may be small
    if not _made_by(layer, large, head(large)):
        return None
    others = [p for p in model.parameters() if p.requires_grad and p is not layer.weight]
    with torch.enable_grad():
        total = head(hidden.clone().requires_grad_()).sum()
        learn = torch.autograd.grad(total, others, allow_unused=True) if others else ()
    if any(gradient is not None for gradient in learn):  # a scale that is 1, say
        return None
    names: dict[Any, str] = {module: name for name, module in model.named_modules()}
    return names[layer]


def fused_head(layer: Any, hidden: torch.Tensor, logits: torch.Tensor) -> FusedHead | None:
    """Cross entropies ``[N]`` of states ``[N, H]`` and targets, in the place of a model's head.

    Args:
        layer: The head, as it was when the model was tried.
        hidden: States of a token, which the body made now.
        logits: What the model made of them now.

    Returns:
        None if there is more to the head by now, or in this pass, or no kernel.
    """
    kernel = fused_kernel(hidden.device)
    if kernel is None or not _made_by(layer, hidden, logits):
        return None
    return partial(kernel, layer.weight)


@torch.no_grad()
def _made_by(layer: Any, hidden: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether logits are what a layer that multiplies by its weight, and no more, makes."""
    if type(layer) is not nn.Linear or "forward" in vars(layer):
        return False
    hooks: list[dict[int, Any]] = [
        *(layer._forward_pre_hooks, layer._forward_hooks),
        *(layer._backward_pre_hooks, layer._backward_hooks),
    ]
    if layer._parameters["bias"] is not None or any(hooks):
        return False
    weight, made = layer.weight, (hidden, logits)
    if any((t.dtype, t.device) != (weight.dtype, weight.device) for t in made):
        return False
    return torch.equal(nn.functional.linear(hidden, weight), logits)


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
    try:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss
    except ImportError as error:
        _log.warning("liger-kernel %s is not used: it cannot be imported (%s)", found, error)
        return None
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
