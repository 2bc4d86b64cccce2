"""vLLM's CPU build packs the weights of linear layers and drops the ones that can be read.

Then nothing can be written in place, and nothing read back. So the plain weights are kept beside
the packed ones (which doubles their memory, on the CPU only), and packed anew after a refit.
"""

from __future__ import annotations

import ctypes
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers import utils

from rl_core.errors import RefitCorrupted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_packed", "keep_plain_weights", "pack_again"]

_PACK = "dispatch_cpu_unquantized_gemm"
_C_LIBRARY = ctypes.CDLL(None)
#: Bytes that may be free and kept while a model is packed.
_MOST_FREED = 16 << 20
#: Largest difference of a product with packed and with plain weights, relative to its size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def keep_plain_weights() -> None:
    """Makes vLLM keep them. For a worker's process, before it loads a model."""
    pack = getattr(utils, _PACK, None)
    if pack is None or hasattr(pack, "__wrapped__"):
        return

    @wraps(pack)
    def keep(layer: nn.Module, remove_weight: bool = False) -> None:
        del remove_weight
        pack(layer, remove_weight=False)

    setattr(utils, _PACK, keep)


def packed(model: nn.Module) -> dict[str, Any]:
    """Modules whose weights were packed, by name."""
    return {n: m for n, m in model.named_modules() if getattr(m, "cpu_linear", None) is not None}


def pack_again(model: nn.Module) -> None:
    """Packs the plain weights as they are now; at no time are there two packed copies of all."""
    freed = 0
    for module in packed(model).values():
        module.cpu_linear = torch.nn.functional.linear  # lets go of what was packed before
        freed += module.weight.nbytes
        if freed > _MOST_FREED:
            _give_back()
            freed = 0
        getattr(utils, _PACK)(module, remove_weight=False)
    _give_back()


def _give_back() -> None:
    """Returns free memory, which glibc keeps for the thread that took it, to the system.

    Every refit has a thread of its own, so after a few there would be a copy of the model that
    nobody uses.
    """
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)


def check_packed(model: nn.Module) -> None:
    """Makes sure that what computes is what was written.

    Raises:
        RefitCorrupted: Products with packed and with plain weights differ.
    """
    for name, module in packed(model).items():
        weight = module.weight
        if weight.dim() != 2:
            continue
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        ours = torch.nn.functional.linear(probe, weight).float()
        theirs = module.cpu_linear(probe, weight, None).float()
        size = max(1.0, float(ours.abs().max()))
        if not (ours - theirs).abs().max() <= _TOLERANCE.get(weight.dtype, 5e-2) * size:
            raise RefitCorrupted(
                f"{name}: the weights with which vLLM computes are not those that the refit wrote",
                fix="report it to rl-vllm, with the version of vLLM",
                tensor=name,
            )
