"""Digests of the weights under adapters, by which a trainer and its engines compare them.

A refit of adapters alone brings no base weights: each side has those of its own checkpoint. So the
trainer tells the digest of each base tensor, and the engine compares it with what it computes with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from rl_backends.changes import counts_of
from rl_backends.modules import whole_tensors
from rl_backends.tensors import dtype_name
from rl_core.interfaces import TensorSpec
from rl_core.weights.data.digests import BlockHash, TensorHasher
from rl_core.weights.data.plan import BLOCK

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BASE", "BaseDigests", "Digests", "digest_as"]

#: The key under which the digests travel in what ``prepare_refit_info`` returns.
BASE = "base_weights"
#: Of each tensor by its name, the digests of its values in some dtypes, by their names.
Digests: TypeAlias = "Mapping[str, Mapping[str, str]]"
#: What an engine may have rounded the weights of a float32 checkpoint to.
_ROUNDED = (torch.bfloat16, torch.float16)


def digest_as(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """The digest of a tensor's values, rounded to a dtype."""
    spec = TensorSpec("", tuple(tensor.shape), dtype_name(dtype))
    hasher = TensorHasher(BlockHash("xxh3", b""), BLOCK)
    return hasher.digests([("", spec, tensor)], ())[""].hex()


class BaseDigests:
    """The digests of the base weights of a model with adapters.

    They are made when they are asked for, and again only when torch has counted a change.

    Args:
        model: What :func:`rl_backends.adapters.add_adapters` returned.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._digests: dict[str, dict[str, str]] = {}
        self._counts: list[tuple[int, int]] = []

    @torch.no_grad()
    def now(self) -> Digests:
        """Those of the weights as they are.

        Once the model is sharded, those from before: a rank alone has not all of a tensor.
        """
        every = whole_tensors(self._model.get_base_model(), sharded=True)
        tensors = {
            name.replace(".base_layer.", "."): tensor
            for name, tensor in every.items()
            if ".lora_" not in name
        }
        if any(hasattr(tensor, "full_tensor") for tensor in tensors.values()):
            return self._digests
        counts = [*zip(map(id, tensors.values()), counts_of(tensors.values()), strict=True)]
        if counts != self._counts:
            self._digests = {name: _digests(tensor) for name, tensor in tensors.items()}
            self._counts = counts
        return self._digests


def _digests(tensor: torch.Tensor) -> dict[str, str]:
    wide = tensor.is_floating_point() and tensor.dtype.itemsize > torch.bfloat16.itemsize
    dtypes = [tensor.dtype, *(_ROUNDED if wide else ())]
    return {dtype_name(dtype): digest_as(tensor, dtype) for dtype in dtypes}
