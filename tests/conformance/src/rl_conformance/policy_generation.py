"""A policy seen as a generation backend, so that one set of checks serves both."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rl_conformance.context import Context

if TYPE_CHECKING:
    from collections.abc import Generator

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface

__all__ = ["GenerationView"]

_MODEL_KEYS = ("model_name",)


class GenerationView(Context):
    """A context with policies in place of generation backends."""

    @classmethod
    @contextmanager
    def of(cls, ctx: Context) -> Generator[Context]:
        """A view on the same run; what it measures and records counts as the context's."""
        view = cls(ctx.workshop, ctx.outcome_of, ctx.measures, ctx.figures)
        try:
            yield view
        finally:
            view.close()

    def generation(self, *, dtype: str | None = None, **config: Any) -> GenerationInterface:
        """A policy that generates, shared with other checks."""
        return _AsGeneration(self.policy(dtype=dtype, **_nested(config)))  # type: ignore[return-value]

    def fresh_generation(self, *, dtype: str | None = None, **config: Any) -> GenerationInterface:
        """A policy that generates, for one check alone."""
        return _AsGeneration(self.fresh_policy(dtype=dtype, **_nested(config)))  # type: ignore[return-value]


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    sampling = {k: v for k, v in config.items() if k not in _MODEL_KEYS}
    outer = {k: v for k, v in config.items() if k in _MODEL_KEYS}
    return outer | {"generation": {"max_new_tokens": 8, **sampling}}


class _AsGeneration:
    """Only what the checks of prompts and sampling call."""

    def __init__(self, policy: ColocatablePolicyInterface) -> None:
        self._policy = policy

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """The policy's own."""
        return self._policy.generate(data, greedy)

    def prepare_for_generation(self) -> bool:
        """Brings the policy to where it scores, from where it generates."""
        self._policy.prepare_for_lp_inference()
        return True
