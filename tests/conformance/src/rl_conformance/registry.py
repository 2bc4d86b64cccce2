"""Checks as plain functions under clause numbers, and refusals under capability names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_conformance.catalogue import CLAUSES, Clause

__all__ = [
    "CORE",
    "Check",
    "all_checks",
    "check",
    "checks_of",
    "clauses_of",
    "profile",
    "refusal",
    "refusal_for",
]

Function = Callable[..., None]
Need = Literal["core", "generation", "policy", "pair"]
#: What a check needs that looks at core alone; also the name of their profile.
CORE: Need = "core"

_MODULES = (
    "b01_batches",
    "b04_shards",
    "d01_discovery",
    "g01_inputs",
    "g02_outputs",
    "g04_logprobs",
    "g07_stops",
    "g08_greedy",
    "g09_draws",
    "g13_lifecycle",
    "g16_streams",
    "g18_concurrency",
    "g_after_calls",
    "p01_scores",
    "p03_reference",
    "p05_steps",
    "p06_left_alone",
    "p07_refused_steps",
    "p09_checkpoints",
    "p11_optional",
    "p14_sharded",
    "r01_exact",
    "r02_manifests",
    "r04_collective",
    "r05_handles",
    "r06_memory",
    "r08_failures",
    "r09_corruption",
    "r10_versions",
    "r11_staged",
    "r13_receivers",
    "r14_scales",
    "r16_several_ranks",
    "r17_adapters",
    "a01_agreement",
    "s01_strangers",
    "s03_remote_code",
)
_checks: dict[str, Check] = {}
_refusals: dict[tuple[str, str], Function] = {}
_NEEDS: dict[str, tuple[Need, ...]] = {
    "generation": ("generation",),
    "policy": ("policy",),
    "refit": ("pair",),
    "agreement": ("pair",),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One behaviour, checked under one clause.

    Attributes:
        clause: The clause.
        name: The function's name, with the case in brackets if it has several.
        title: First line of the function's docstring.
        function: Takes the :class:`~rl_conformance.context.Context` and the case's values.
        needs: The kinds of backend it uses. A ``pair`` is completed by the suite's own reference;
            what needs ``core`` alone is not part of a run against a backend.
        capability: The capability it belongs to, or None.
        device: ``"any"``, or the only device type on which it means something.
        modules: Optional modules it needs, such as ``("rl_ray",)``.
        gpus: How many it needs where it runs on ``cuda``.
        timeout_s: Seconds after which it counts as hung.
        case: Keyword arguments of the function.
        summary: Whether it reads the results of others, and so comes after them.
    """

    clause: Clause
    name: str
    title: str
    function: Function
    needs: tuple[Need, ...]
    capability: str | None
    device: Literal["any", "cpu", "cuda"]
    modules: tuple[str, ...]
    gpus: int
    timeout_s: float
    case: Mapping[str, Any] = field(default_factory=dict)
    summary: bool = False

    @property
    def of_core(self) -> bool:
        """Whether it looks at core alone."""
        return self.needs == (CORE,)

    @property
    def id(self) -> str:
        """``clause/name``, unique in the suite."""
        return f"{self.clause.id}/{self.name}"

    @property
    def where(self) -> str:
        """File and line of its function."""
        code = self.function.__code__
        return f"{self.function.__module__.replace('.', '/')}.py:{code.co_firstlineno}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "id": self.id,
            "where": self.where,
            "title": self.title,
            "capability": self.capability,
            "device": self.device,
            "needs": list(self.needs),
            "modules": list(self.modules),
            "gpus": self.gpus,
            "timeout_s": self.timeout_s,
        }

    def __call__(self, ctx: object) -> None:
        self.function(ctx, **self.case)


def check(
    clause: str,
    *,
    needs: tuple[Need, ...] | None = None,
    capability: str | None = None,
    device: Literal["any", "cpu", "cuda"] | None = None,
    modules: tuple[str, ...] = (),
    gpus: int = 1,
    timeout_s: float = 120.0,
    cases: Mapping[str, Mapping[str, Any]] | None = None,
    summary: bool = False,
) -> Callable[[Function], Function]:
    """Registers a function as a check of a clause.

    Args:
        clause: Its number.
        needs: Kinds of backend it uses; by default what the clause's chapter is about, or ``core``.
        capability: By default the clause's.
        device: By default the clause's.
        modules: Optional modules it imports.
        gpus: How many it needs where it runs on ``cuda``; a machine with fewer excuses it.
        timeout_s: Seconds after which it counts as hung.
        cases: Keyword arguments by case name; each case is a separate check.
        summary: It reads the results of others, and so comes after them.
    """
    entry = CLAUSES[clause]
    default = (CORE,) if entry.core else _NEEDS.get(entry.kind, ())

    def register(function: Function) -> Function:
        for case, values in (cases or {"": {}}).items():
            found = Check(
                clause=entry,
                name=f"{function.__name__}[{case}]" if case else function.__name__,
                title=(function.__doc__ or function.__name__).strip().splitlines()[0],
                function=function,
                needs=default if needs is None else needs,
                capability=capability or entry.capability,
                device=device or entry.device,
                modules=modules,
                gpus=gpus,
                timeout_s=timeout_s,
                case=values,
                summary=summary,
            )
            if found.id in _checks:
                raise ValueError(f"two checks are named {found.id}")
            _checks[found.id] = found
        return function

    return register


def refusal(
    kind: Literal["generation", "policy"], capability: str
) -> Callable[[Function], Function]:
    """Registers the negative check of a capability: the call is refused and touches nothing."""

    def register(function: Function) -> Function:
        _refusals[kind, capability] = function
        return function

    return register


def refusal_for(kind: str, capability: str) -> Function:
    """The negative check of a capability of a kind."""
    all_checks()
    return _refusals[kind, capability]


def all_checks() -> list[Check]:
    """Every check, in the order of the catalogue but for summaries, which are the last."""
    for module in _MODULES:
        importlib.import_module(f"rl_conformance.checks.{module}")
    order = {clause: position for position, clause in enumerate(CLAUSES)}
    return sorted(_checks.values(), key=lambda c: (c.summary, order[c.clause.id]))


def checks_of(*kinds: str) -> list[Check]:
    """The checks of some chapters, such as ``"generation"``; all of them without an argument."""
    return [c for c in all_checks() if not kinds or c.clause.kind in kinds]


def profile(name: str) -> list[Check]:
    """What a run consists of: core's own checks for ``core``, all others for a backend."""
    return [c for c in all_checks() if c.of_core == (name == CORE)]


def clauses_of(checks: Iterable[Check]) -> tuple[str, ...]:
    """The numbers of their clauses, in the order of the catalogue."""
    found = {check.clause.id for check in checks}
    return tuple(id_ for id_ in CLAUSES if id_ in found)
