"""vLLM's CPU build packs the weights of linear layers and of experts, and drops the plain ones.

Then nothing can be written in place, and nothing read back. So the plain weights are kept beside
the packed ones (which doubles their memory, on the CPU only), and packed anew after a refit.
"""

from __future__ import annotations

import ctypes
from copy import copy
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from vllm.model_executor.layers import utils

from rl_backends.tensors import same_bytes
from rl_core.errors import RefitCorrupted

if TYPE_CHECKING:
    from torch import nn

__all__ = ["check_packed", "keep_plain_weights", "pack_again"]

_PACK = "dispatch_cpu_unquantized_gemm"
_EXPERTS = ("w13_weight", "w2_weight")
_C_LIBRARY = ctypes.CDLL(None)
#: Bytes that may be free and kept while a model is packed.
_MOST_FREED = 16 << 20
#: Largest difference of a product with packed and with plain weights, relative to its size.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def keep_plain_weights() -> None:
    """Makes vLLM keep them. For a worker's process, before it loads a model.

    Packed experts are attributes of the plain ones, and kernels compute with these.
    """
    pack = getattr(utils, _PACK, None)
    if pack is None or hasattr(pack, "__wrapped__"):
        return

    @wraps(pack)
    def keep(layer: nn.Module, remove_weight: bool = False) -> None:
        del remove_weight
        pack(layer, remove_weight=False)

    setattr(utils, _PACK, keep)
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:  # of an older vLLM: what it rearranges is refused
        return
    process, compute = (
        CPUUnquantizedExperts.process_weights_after_loading,
        CPUUnquantizedExperts.apply,
    )

    @wraps(process)
    def keep_experts(kernel: Any, layer: Any) -> None:
        layer.pack_experts = partial(process, kernel)
        _pack_experts(layer)

    @wraps(compute)
    def with_packed(
        kernel: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, *args: Any, **kwargs: Any
    ) -> None:
        w1, w2 = getattr(w1, "packed", w1), getattr(w2, "packed", w2)
        compute(kernel, output, hidden_states, w1, w2, *args, **kwargs)

    CPUUnquantizedExperts.process_weights_after_loading = keep_experts
    CPUUnquantizedExperts.apply = with_packed


def _pack_experts(layer: Any) -> None:
    for name, weight in _packed_experts(layer).items():
        getattr(layer, name).packed = weight


def _packed_experts(layer: Any) -> dict[str, torch.Tensor]:
    """What vLLM's own hook makes of a layer's experts, padding included; the layer stays as is."""
    stand_in = copy(layer)
    stand_in._parameters = dict(layer._parameters)
    layer.pack_experts(stand_in)
    return {name: getattr(stand_in, name).data for name in _EXPERTS}


def _layers_of_experts(model: nn.Module) -> dict[str, Any]:
    return {n: m for n, m in model.named_modules() if hasattr(m, "pack_experts")}


def packed(model: nn.Module) -> dict[str, Any]:
    """Modules whose weights were packed, by name."""
    return {n: m for n, m in model.named_modules() if getattr(m, "cpu_linear", None) is not None}


def pack_again(model: nn.Module) -> None:
    """Packs the plain weights as they are now; at no time are there two packed copies of all."""
    freed = 0
    for module in packed(model).values():
        module.cpu_linear = torch.nn.functional.linear  # lets go of what was packed before
        getattr(utils, _PACK)(module, remove_weight=False)
        freed = _give_back(freed + module.weight.nbytes)
    for layer in _layers_of_experts(model).values():
        _pack_experts(layer)
        freed = _give_back(freed + sum(getattr(layer, name).nbytes for name in _EXPERTS))
    _give_back(_MOST_FREED)


def _give_back(freed: int) -> int:
    """Returns free memory, which glibc keeps for the thread that took it, to the system.

    Every refit has a thread of its own, so after a few there would be a copy of the model that
    nobody uses.

    Args:
        freed: Bytes since the last time; a little is kept.

    Returns:
        Bytes that are free and kept now.
    """
    if freed < _MOST_FREED:
        return freed
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)
    return 0


def check_packed(model: nn.Module) -> None:
    """Makes sure that what computes is what was written.

    Raises:
        RefitCorrupted: Products with packed and with plain weights differ, or packed experts are
            not those of the plain ones.
    """
    for name, module in packed(model).items():
        weight = module.weight
        if weight.dim() != 2:
            continue
        probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype)[None]
        ours = torch.nn.functional.linear(probe, weight).float()
        theirs = module.cpu_linear(probe, weight, None).float()
        size = max(1.0, float(ours.abs().max()))
        near = _TOLERANCE.get(weight.dtype, 5e-2) * size
        if not torch.allclose(theirs, ours, 0, near, equal_nan=True):
            raise _not_what_was_written(name)
    for name, layer in _layers_of_experts(model).items():
        for key, weight in _packed_experts(layer).items():
            if not same_bytes(weight, getattr(layer, key).packed):
                raise _not_what_was_written(f"{name}.{key}")


def _not_what_was_written(name: str) -> RefitCorrupted:
    return RefitCorrupted(
        f"{name}: the weights with which vLLM computes are not those that the refit wrote",
        fix="report it to rl-vllm, with the version of vLLM",
        tensor=name,
    )
