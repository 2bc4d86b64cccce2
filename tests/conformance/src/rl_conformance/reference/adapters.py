"""The adapters of the reference engine: added to what each layer computes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.engine.adapters import AdapterSink
from rl_backends.tensors import dtype_name
from rl_conformance.adapters import adapted_layers
from rl_core.interfaces import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ReferenceAdapters"]


class ReferenceAdapters(AdapterSink):
    """Keeps two adapters beside a model in this process.

    Args:
        model: Gets a hook on each adapted layer.
        rank: Of the adapters.
    """

    def __init__(self, model: Any, rank: int) -> None:
        specs = {}
        for name, layer in adapted_layers(model).items():
            dtype = dtype_name(layer.weight.dtype)
            for kind, shape in (
                ("A", (rank, layer.in_features)),
                ("B", (layer.out_features, rank)),
            ):
                full = f"{name}.lora_{kind}.weight"
                specs[full] = name, TensorSpec(full, shape, dtype)
            layer.register_forward_hook(partial(self.add, name))
        super().__init__(specs, workers=1)
        self.loaded: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, name: str, _: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        """What a layer computes with the adapter that serves."""
        if not self.serving:
            return output
        first, second = (self.used(f"{name}.lora_{kind}.weight") for kind in "AB")
        adapted: torch.Tensor = output + inputs[0] @ first.T @ second.T
        return adapted

    def used(self, name: str) -> torch.Tensor:
        """A tensor of the adapter that serves."""
        return self.loaded[self.serving][name]

    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See :meth:`AdapterSink.load`."""
        self.loaded[adapter] = {name: tensor.clone() for name, tensor in tensors.items()}

    def unload(self, adapter: int) -> None:
        """See :meth:`AdapterSink.unload`."""
        self.loaded.pop(adapter, None)

    def kept(self, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.kept`."""
        return torch.arange(self.by_name[name].numel)

    def held(self, adapter: int, name: str) -> torch.Tensor:
        """See :meth:`AdapterSink.held`."""
        return self.loaded[adapter][name].reshape(-1)
