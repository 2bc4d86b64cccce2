"""The ways in which weights come to an engine, and trainers with weights that a check chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.expect import same, within
from rl_conformance.refits import agree, equal, modes_of, own_backend, run_refit, unequal_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from rl_conformance.context import Context

    Way = Callable[[Any, Any], object]

__all__ = [
    "by_ticket",
    "engine_for",
    "every_pair",
    "exact",
    "settable_trainer",
    "shuffle",
    "ticket_for",
    "ways_of",
]


def settable_trainer(ctx: Context, *, seed: int = 1) -> Any:
    """The suite's own policy; a check may change its ``model``; it fits :func:`engine_for`."""
    return ctx.closing(own_backend(ctx, "policy", seed=seed))


def engine_for(ctx: Context, side: str) -> Any:
    """An engine that is awake: the one under test, or the suite's own where a trainer is.

    Its weights are others than those of a :func:`settable_trainer`.

    Args:
        ctx: Of the check.
        side: ``"engine"`` or ``"trainer"``: what is under test.
    """
    if side == "engine":
        return unequal_engine(ctx)
    generation = ctx.closing(own_backend(ctx, "generation", seed=0, max_new_tokens=3))
    generation.prepare_for_generation()
    return generation


@torch.no_grad()
def shuffle(policy: Any, seed: int, names: Iterable[str] | None = None) -> None:
    """Gives tensors of a :func:`settable_trainer` their own elements in another order.

    Args:
        policy: The trainer.
        seed: Of the order.
        names: Which tensors. Default: every one.
    """
    chosen = None if names is None else set(names)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.model.named_parameters():
        if chosen is None or name in chosen:
            order = torch.randperm(parameter.numel(), generator=generator)
            parameter.copy_(parameter.flatten()[order].view_as(parameter))


def ticket_for(policy: Any, engine: Any, **options: Any) -> Any:
    """What the older methods of a policy give for an engine."""
    [keys] = policy.prepare_weights_for_ipc()
    return policy.get_weights_ipc_handles(keys, receivers=engine.receiver_count, **options)


def by_ticket(policy: Any, engine: Any) -> None:
    """A refit through the older methods."""
    engine.update_weights(ticket_for(policy, engine))


def _asleep(policy: Any, engine: Any) -> None:
    engine.finish_generation()
    run_refit(policy, engine, mode="packed")
    engine.prepare_for_generation()


def _weights_awake(policy: Any, engine: Any) -> None:
    engine.finish_generation()
    engine.prepare_for_generation(tags=["weights"])
    run_refit(policy, engine)
    engine.prepare_for_generation(tags=["kv_cache"])


def _with(**options: Any) -> Way:
    return lambda policy, engine: run_refit(policy, engine, **options)


#: Small enough that tensors are split and several buckets go one after another.
_BUCKET = 1 << 16
_WAYS: Mapping[str, Way] = {
    "direct": _with(mode="direct", verify="installed"),
    "packed": _with(mode="packed", bucket_bytes=_BUCKET),
    "delta": _with(mode="packed", delta=True),
    "staged": _with(isolation="staged", bucket_bytes=_BUCKET),
    "ticket": by_ticket,
    "asleep": _asleep,
    "weights_awake": _weights_awake,
    "collective": _with(transport="collective"),
}


def ways_of(ctx: Context, policy: Any, side: str, *names: str) -> dict[str, Way]:
    """Those of the named ways that both sides offer.

    Args:
        ctx: Of the check.
        policy: The trainer.
        side: What is under test, as of :func:`engine_for`; the other is the suite's own.
        *names: ``"direct"``, ``"packed"``, ``"delta"``, ``"staged"``, ``"ticket"``, ``"asleep"``,
            ``"weights_awake"`` and ``"collective"``.
    """
    kind = "generation" if side == "engine" else "policy"
    declared: Mapping[str, Any] = ctx.manifest.capabilities.get(kind, {})  # type: ignore[call-overload]

    def offered(name: str) -> bool:
        if name == "direct":
            return "direct" in modes_of(policy)
        found = declared.get(name)
        return found is None or (found.level == "full" and ctx.settings.device in found.devices)

    return {name: _WAYS[name] for name in names if offered(name)}


def every_pair(ways: Sequence[str]) -> list[str]:
    """The shortest sequence in which every way comes next after every one, itself included."""
    order: list[str] = []
    for position, way in enumerate(ways):
        order.append(way)
        for later in ways[position + 1 :]:
            order += [way, later]
    return [*order, ways[0]]


def exact(
    ctx: Context, policy: Any, engine: Any, what: str, version: int, dtype: str | None = None
) -> None:
    """Fails unless the engine has the policy's weights and version, and computes with them.

    The prompts are the same each time, and one is long enough for a cache of blocks of tokens: what
    an engine keeps of earlier weights shows.
    """
    found = engine.weights_version
    same(found, version, f"{what}: weights_version")
    with within(what):
        equal(policy, engine)
        agree(ctx, policy, engine, ctx.prompts(5, 150, 3), dtype)
