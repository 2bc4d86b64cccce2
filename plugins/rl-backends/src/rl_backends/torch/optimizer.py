"""AdamW with float32 master weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_backends.pieces import copy_to_pieces
from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import nn

__all__ = ["Optimizer"]

#: State that AdamW keeps for each tensor.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class Optimizer:
    """Steps over the parameters that are trained.

    Half-precision parameters get a float32 master each: gradients are moved into the master's as
    soon as they are made, so that accumulating and stepping lose nothing, and the parameter is the
    master rounded. A float32 parameter is its own master.

    Args:
        parameters: Those that are trained, by name.
        settings: The key ``optimizer`` of a checked :class:`~rl_core.interfaces.PolicyConfig`.
        collects: Move gradients into the masters'. False for a trainer that accumulates them
            elsewhere, and sets ``masters[name].grad``, in float32, before each step.
        undecayed: Names of those without weight decay; by default biases and the weights of norms,
            which have one dimension.

    Attributes:
        parameters: As given.
        masters: What steps are taken on, by name.

    Raises:
        CapabilityError: A parameter is float16, which needs loss scaling.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: Mapping[str, Any],
        *,
        collects: bool = True,
        undecayed: Collection[str] | None = None,
    ) -> None:
        self.parameters = dict(parameters)
        self.masters = {
            name: _master(name, parameter, collects=collects)
            for name, parameter in self.parameters.items()
        }
        if undecayed is None:
            undecayed = {name for name, master in self.masters.items() if master.dim() <= 1}
        masters = self.masters.items()
        groups: list[dict[str, Any]] = [
            {"params": [master for name, master in masters if name not in undecayed]},
            {"params": [m for name, m in masters if name in undecayed], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            betas=settings.get("betas", (0.9, 0.999)),
            eps=settings.get("eps", 1e-8),
            weight_decay=settings.get("weight_decay", 0.01),
        )

    def gradients(self) -> dict[str, torch.Tensor]:
        """The float32 gradients accumulated so far; parameters without one are left out."""
        return {n: m.grad for n, m in self.masters.items() if m.grad is not None}

    def set_zero_gradients(self, names: set[str]) -> None:
        """Gives these parameters a gradient of 0 where they have none."""
        for name in names:
            master = self.masters[name]
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def clear(self) -> None:
        """Forgets the gradients."""
        for tensor in (*self.masters.values(), *self.parameters.values()):
            tensor.grad = None

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Takes one step along the accumulated gradients."""
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.copy_(self.masters[name])

    def to(self, device: torch.device | None) -> None:
        """Moves the moments and masters to a device, or to each parameter's if None."""
        for name, master in self.masters.items():
            target = self.parameters[name].device if device is None else device
            if master is not self.parameters[name]:
                # As Module.to does: data of a DTensor cannot be set.
                moved = torch.nn.Parameter(master.detach().to(target))
                torch.utils.swap_tensors(master, moved)  # type: ignore[no-untyped-call]
            state = self._adamw.state.get(master, {})
            for key in MOMENTS[1:]:
                if key in state:
                    state[key] = state[key].to(target)

    def state(self) -> dict[str, torch.Tensor]:
        """Moments and masters by name, for a checkpoint."""
        tensors = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                tensors[f"master.{name}"] = master.detach()
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}.{name}"] = value
        return tensors

    def expected_state(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What :meth:`load_state` will read, in the shapes it must have.

        Args:
            tensors: The state at hand; a parameter without a step counter has no moments.
        """
        expected: dict[str, torch.Tensor] = {}
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                expected[f"master.{name}"] = master
            if f"step.{name}" in tensors:
                expected |= {f"{key}.{name}": master for key in MOMENTS[1:]}
        return expected

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes over what :meth:`state` gave, after the parameters themselves were set."""
        self._adamw.state.clear()
        for name, master in self.masters.items():
            if master is not self.parameters[name]:
                copy_to_pieces(master, tensors[f"master.{name}"])
            if (step := tensors.get(f"step.{name}")) is not None:
                # AdamW keeps its step counter on the CPU.
                own = {"step": step.clone()}
                for key in MOMENTS[1:]:
                    own[key] = torch.empty_like(master, requires_grad=False)
                    copy_to_pieces(own[key], tensors[f"{key}.{name}"])
                self._adamw.state[master] = own


def _master(name: str, parameter: nn.Parameter, *, collects: bool) -> nn.Parameter:
    if parameter.dtype == torch.float16:
        raise CapabilityError(
            f"{name} is float16, which cannot be trained: gradients underflow without loss scaling",
            fix="train in bfloat16 or float32",
        )
    if parameter.dtype != torch.bfloat16:
        return parameter
    master = torch.nn.Parameter(parameter.detach().float())
    if not collects:
        return master

    def collect(made: torch.Tensor) -> None:
        assert made.grad is not None
        gradient = made.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        made.grad = None

    parameter.register_post_accumulate_grad_hook(collect)  # type: ignore[no-untyped-call]
    return master
