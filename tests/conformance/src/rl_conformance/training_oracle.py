"""What training comes to: AdamW written out, over one row at a time in float32.

It takes nothing from any backend, nor from ``torch.optim``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.oracle import Oracle

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from rl_core.batch import BatchedDataDict

__all__ = ["Step", "TrainingOracle", "update_error"]


@dataclass(frozen=True, slots=True)
class Step:
    """What one step has to report: the loss, the gradient's norm before clipping, and the rate."""

    loss: float
    grad_norm: float
    lr: float


class TrainingOracle:
    """Trains a checkpoint with an NLL loss, as a policy's configuration has it.

    Args:
        path: Directory of the checkpoint.
        config: Keys of a :class:`~rl_core.interfaces.PolicyConfig`.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.oracle = Oracle(path)
        self._config = config
        self._steps = 0
        self._parameters = dict(self.oracle.model.named_parameters())
        self._moments = {
            name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self._parameters.items()
        }
        self.start = self.weights()

    def weights(self) -> dict[str, torch.Tensor]:
        """Copies of all tensors, aliases included."""
        state = self.oracle.model.state_dict()
        return {name: tensor.detach().clone() for name, tensor in state.items()}

    def step(self, data: BatchedDataDict[Any]) -> Step:
        """Takes one step over all rows; none if nothing in them counts."""
        mask = data["token_mask"] * data["sample_mask"][:, None]
        rate = self._rate()
        if not mask[:, 1:].sum():
            return Step(0.0, 0.0, rate)
        temperature = self._config.get("temperature", 1.0)
        loss, gradients = self.oracle.nll_gradients(
            data["input_ids"], data["input_lengths"], mask, temperature
        )
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        largest = self._config.get("max_grad_norm", 1.0)
        shrunk = largest / norm if largest is not None and norm > largest else 1.0
        self._update({name: g * shrunk for name, g in gradients.items()}, rate)
        return Step(loss, norm, rate)

    @torch.no_grad()
    def _update(self, gradients: Mapping[str, torch.Tensor], rate: float) -> None:
        options = self._config.get("optimizer", {})
        (one, two), eps = options.get("betas", (0.9, 0.999)), options.get("eps", 1e-8)
        decay = options.get("weight_decay", 0.01)
        self._steps += 1
        for name, gradient in gradients.items():
            parameter, (first, second) = self._parameters[name], self._moments[name]
            if parameter.dim() > 1:  # neither biases nor norms
                parameter -= rate * decay * parameter
            first += (1 - one) * (gradient - first)
            second += (1 - two) * (gradient.square() - second)
            root = (second / (1 - two**self._steps)).sqrt() + eps
            parameter -= rate * (first / (1 - one**self._steps)) / root

    def _rate(self) -> float:
        """A linear warm-up whose last step has the full rate, then the named shape."""
        peak = float(self._config.get("optimizer", {}).get("lr", 1e-5))
        schedule = self._config.get("scheduler", {})
        warmup, shape = schedule.get("warmup_steps", 0), schedule.get("name", "constant")
        if self._steps < warmup:
            return float(peak / warmup * (self._steps + 1))
        if shape == "constant":
            return peak
        lowest = peak * schedule.get("min_lr_ratio", 0.0)
        way = min(1.0, (self._steps - warmup) / (schedule["total_steps"] - warmup))
        height = 1 - way if shape == "linear" else math.cos(way * math.pi / 2) ** 2
        return float(lowest + (peak - lowest) * height)


def update_error(
    got: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
) -> tuple[float, str]:
    """By how much of its length a tensor's update is off, and which tensor's is the most."""
    errors = {}
    for name, value in expected.items():
        moved = (value - start[name]).norm()
        off = (got[name].float() - value).norm()
        errors[name] = float(off / moved) if moved else float(off)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return errors[worst], worst
