"""Where model and optimizer are: on the device while they work, in host memory while they wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from rl_backends.torch.optimizer import Optimizer
    from rl_backends.torch.reference import Reference

__all__ = ["Placement"]

HOST = torch.device("cpu")


class Placement:
    """Moves the parts of a policy between its device and host memory.

    On the CPU, and for a model that is spread over devices, nothing moves.

    Args:
        model: The policy's model, on its device.
        device: That device.
        spread: True if the model is on several devices.
        left: Called when the model has left its device, for others to let go of its memory there.
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        spread: bool,
        left: Callable[[], None],
    ) -> None:
        self._model = model
        self._left = left
        self._device = device
        self._moves = device.type != "cpu" and not spread
        self._model_here = True

    def model_to_device(self) -> None:
        """Brings the model to where it computes. Idempotent."""
        if self._moves and not self._model_here:
            self._model.to(self._device)
            self._model_here = True

    def model_to_host(self, reference: Reference) -> None:
        """Frees the device memory of the model and of a second one. Idempotent."""
        if self._moves:
            self._model.to(HOST)
            self._model_here = False
            self._left()
            reference.to(HOST)
            torch.cuda.empty_cache()

    def optimizer_to_device(self, optimizer: Optimizer) -> None:
        """Brings moments and masters to their parameters. Idempotent."""
        if self._moves:
            optimizer.to(None)

    def optimizer_to_host(self, optimizer: Optimizer) -> None:
        """Frees the device memory of moments, masters and gradients. Idempotent."""
        optimizer.clear()
        if self._moves:
            optimizer.to(HOST)
            torch.cuda.empty_cache()

    def reference_to_device(self, reference: Reference) -> None:
        """Brings a second model to where it computes. Idempotent."""
        if self._moves:
            reference.to(self._device)
