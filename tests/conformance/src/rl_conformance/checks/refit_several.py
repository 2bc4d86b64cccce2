"""R13: several engines that take one refit."""

from __future__ import annotations

import concurrent.futures
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from rl_conformance.doubles import SeveralEngines, TensorEngine, TensorPolicy, broken_tensor
from rl_conformance.expect import require
from rl_conformance.faults import InjectedFault
from rl_conformance.refits import (
    DEADLINE_S,
    MODES,
    equal,
    fresh_engine,
    odd_tensors,
    run_refit,
    unequal_pair,
    whole_tensors,
)
from rl_conformance.registry import check
from rl_conformance.weights import same_weights
from rl_core.weights.tensors import NamedTensorSink

if TYPE_CHECKING:
    from collections.abc import Generator

    import torch

    from rl_conformance.context import Context


@check("R13")
def all_receivers_advance(ctx: Context) -> None:
    """Two engines take one refit and both serve it."""
    policy, first = unequal_pair(ctx)
    second = fresh_engine(ctx)
    report = run_refit(policy, SeveralEngines(first, second))
    require(report.receivers == 2, f"{report.receivers} receivers took part")
    for engine in (first, second):
        require(engine.weights_version == 1, f"an engine is at {engine.weights_version}")
        equal(policy, engine)


class _Unwilling(NamedTensorSink):
    """Fault: raises in the midst of the tensors or behind the last, as ``broken`` says."""

    broken: ClassVar[list[str]] = []

    def targets(self) -> None:
        """Everything is written through :meth:`write`."""

    def write(self, name: str, offset: int, data: torch.Tensor, **of: Any) -> None:
        """Raises at one of the tensors."""
        if "write" in self.broken and name == "half":
            raise InjectedFault("the loader gave up")
        super().write(name, offset, data, **of)

    def finish(self, version: int) -> None:
        """Raises when the other engine may have everything."""
        if "finish" in self.broken:
            raise InjectedFault("the engine gave up")
        super().finish(version)


@check("R13", cases=MODES)
def no_receiver_advances_alone(ctx: Context, mode: str) -> None:
    """If one engine fails, it is named and no engine advances; the next refit brings all on."""
    policy = ctx.closing(TensorPolicy(whole_tensors(1, ctx.settings.device)))
    engines = [
        ctx.closing(TensorEngine(odd_tensors(n, ctx.settings.device), f"engine-{n}", sink))
        for n, sink in ((2, NamedTensorSink), (3, _Unwilling))
    ]
    both = SeveralEngines(*engines)
    for fault in (broken_tensor(engines[1], "large"), _unwilling("write"), _unwilling("finish")):
        with fault:
            error = _sent_to(policy, both, mode=mode)
        require("engine-3" in str(error), f"the failed engine is not named: {error!r}")
        versions = [engine.weights_version for engine in engines]
        require(versions == [0, 0], f"after a failure the versions are {versions}")
    run_refit(policy, both, mode=mode)
    for engine in engines:
        same_weights(engine.tensors, policy.tensors, "engine")


@contextmanager
def _unwilling(where: str) -> Generator[None]:
    _Unwilling.broken.append(where)
    try:
        yield
    finally:
        _Unwilling.broken.clear()


def _sent_to(policy: TensorPolicy, engines: SeveralEngines, **options: Any) -> object:
    """What the trainer's future ends with."""
    engines.prepare_refit_info(policy.prepare_refit_info() or {})
    (sending,) = policy.send_weights(receivers=2, deadline_s=DEADLINE_S, **options)
    receiving = engines.receive_weights(deadline_s=DEADLINE_S)
    error = sending.exception(DEADLINE_S + 10)
    concurrent.futures.wait(receiving, DEADLINE_S)
    return error
