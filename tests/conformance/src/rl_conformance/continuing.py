"""Two policies alike, of which one is disturbed: what they do next must be the same bit for bit."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from rl_conformance.expect import require, same, same_tensor
from rl_conformance.training import NegativeLogLikelihood, training_batch
from rl_conformance.weights import policy_weights, same_weights

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

    from rl_conformance.context import Context
    from rl_conformance.oracle import Oracle
    from rl_core.interfaces import ColocatablePolicyInterface

__all__ = ["changes_no_step", "dropping_model", "oracle_of", "repeatable", "train", "trainer"]

_LENGTHS = (9, 3, 12, 5)
_STEPS = 3


def repeatable(ctx: Context) -> AbstractContextManager[None]:
    """Two policies take the same step, bit for bit.

    On a GPU the backward pass of fused attention adds in no fixed order; the plain one has one.
    """
    fused = ctx.settings.device == "cuda"
    return sdpa_kernel(SDPBackend.MATH) if fused else nullcontext()


def dropping_model(ctx: Context) -> Path:
    """The checkpoint of a model that drops attention when it is trained."""
    return ctx.model("qwen2", attention_dropout=0.5)


def trainer(ctx: Context, *, dropout: bool = True, **config: Any) -> ColocatablePolicyInterface:
    """A policy with dropout, momentum, decay and a falling rate, so that all of training shows."""
    path = dropping_model(ctx) if dropout else ctx.model()
    usual: dict[str, Any] = {
        "model_name": str(path),
        "optimizer": {"lr": 1e-3, "weight_decay": 0.1},
        "scheduler": {"name": "linear", "total_steps": 9},
        "max_grad_norm": 1.0,
    }
    policy = ctx.fresh_policy(**usual | config)
    policy.prepare_for_training()
    return policy


def train(policy: ColocatablePolicyInterface, seed: int) -> dict[str, Any]:
    """A step."""
    policy.prepare_for_training()
    return policy.train(training_batch(_LENGTHS, seed=seed), NegativeLogLikelihood(), mbs=3)


def changes_no_step(
    ctx: Context,
    disturb: Callable[[ColocatablePolicyInterface], Any],
    *,
    dropout: bool = True,
    **config: Any,
) -> None:
    """Fails unless a policy goes on as it would have without what is done to it.

    Args:
        ctx: Of the check.
        disturb: Called twice before every step. What it returns must be the same both times.
        dropout: Whether the model has it, so that moved random numbers show.
        **config: Of the policy.
    """
    plain = ctx.workshop.once(
        f"steps with dropout={dropout} and {config}",
        lambda: _steps(ctx, trainer(ctx, dropout=dropout, **config)),
    )
    disturbed = trainer(ctx, dropout=dropout, **config)
    for seed, (expected, expected_weights) in enumerate(plain):
        weights, state = policy_weights(disturbed), torch.get_rng_state()
        first, second = disturb(disturbed), disturb(disturbed)
        same_tensor(torch.get_rng_state(), state, "the global random state")
        same_weights(policy_weights(disturbed), weights, "weights")
        require(_same(first, second), "results of two calls, one after the other", first, second)
        with repeatable(ctx):
            result = train(disturbed, seed)
        for key, value in expected.items():
            got = float(result[key])
            same(got, value, f"{key} of step {seed}, as without the call")
        same_weights(policy_weights(disturbed), expected_weights, f"after step {seed}")


def _steps(
    ctx: Context, policy: ColocatablePolicyInterface
) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    """Results and weights of steps that nothing comes between."""
    steps = []
    for seed in range(_STEPS):
        with repeatable(ctx):
            result = train(policy, seed)
        compared = {key: float(result[key]) for key in ("loss", "grad_norm", "lr")}
        steps.append((compared, policy_weights(policy)))
    return steps


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


def oracle_of(ctx: Context, policy: ColocatablePolicyInterface) -> Oracle:
    """The reference of the weights that a :func:`trainer` has now."""
    from rl_conformance.oracle import Oracle

    oracle = Oracle(dropping_model(ctx), ctx.settings.dtype)
    oracle.model.load_state_dict(policy_weights(policy))
    return oracle
