"""What the workers of a real engine hold; these functions run there (``call_in_workers``)."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.engine.derived_weights import tensors_in

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["kept", "layers", "tensors"]


def tensors(sink: Callable[[], Any]) -> dict[str, list[Any]]:
    """Form and SHA-256 of all that the model's modules hold, also through other objects."""
    found = {}
    for name, module in sink()._loaded.model.named_modules():
        others = [one for one in sink()._loaded.model.modules() if one is not module]
        own = {**module._parameters, **module._buffers}
        stack = [(f"{name}.{key}", one) for key, one in own.items() if one is not None]
        method = getattr(module, "quant_method", None)
        stack += [(f"{name}.quant_method", method), (f"{name}.impl", getattr(module, "impl", None))]
        for path, one in tensors_in(stack, others):
            if one.layout is torch.strided and not one.is_meta:
                data = one.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
                form = str(one.dtype), list(one.shape), list(one.stride())
                found[path] = [*map(str, form), hashlib.sha256(data).hexdigest()]
    return found


def layers(sink: Callable[[], Any]) -> dict[str, Any]:
    """What refits renew by the engine's own hooks, and the most plain bytes that took at once."""
    found = sink()._loaded.layers
    return {
        "collected": sorted(found.collected),
        "derived": sorted(found.derived),
        "most_open_bytes": found.most_open_bytes,
    }


def kept(sink: Callable[[], Any]) -> list[int]:
    """Bytes that the worker keeps as pieces, and of tensors that it is sent whole."""
    sink_now = sink()
    sizes = {spec.name: spec.nbytes for spec in sink_now.specs()}
    pieces = sink_now.pieces()
    return [
        sum(piece.tensor.nbytes for piece in pieces if piece.tensor is not None),
        sum(sizes[piece.name] for piece in pieces if piece.tensor is None),
    ]
