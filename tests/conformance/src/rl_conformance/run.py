"""A whole run: select, execute, report."""

from __future__ import annotations

import ast
import time
from typing import TYPE_CHECKING

from rl_conformance.catalogue import CLAUSES, KINDS
from rl_conformance.environment import describe
from rl_conformance.harness import Harness
from rl_conformance.outcome import RunReport
from rl_conformance.reference import core_target
from rl_conformance.registry import CORE, all_checks, clauses_of, profile
from rl_conformance.target import Target
from rl_core.errors import ConfigError
from rl_core.plugins.discovery import check_engine
from rl_core.plugins.registry import find_provider

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rl_conformance.outcome import Outcome
    from rl_conformance.registry import Check
    from rl_conformance.settings import Settings

__all__ = ["find_target", "matches", "run", "select"]


def find_target(name: str) -> Target:
    """The installed backend of that name; ``core`` is core itself, with the reference.

    Raises:
        PluginError: It is missing, ambiguous, broken or incompatible.
        MissingEngineError: Its engine is not installed here, so that no check of it can run.
    """
    if name == CORE:
        return core_target()
    target = Target.find(name)
    check_engine(find_provider(name), target.manifest)
    return target


def run(
    target: Target,
    settings: Settings,
    checks: Sequence[Check] | None = None,
    *,
    selection: str = "",
    known: Mapping[str, str] | None = None,
    on_start: Callable[[Check], None] = lambda _: None,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> RunReport:
    """Runs checks against a backend.

    Args:
        target: The backend under test.
        settings: Where it runs.
        checks: What to run; the whole profile if None, and then each of its clauses must get a
            status.
        selection: How ``checks`` were chosen, for the report.
        known: Reasons of known failures, by check id.
        on_start: Called with each check that begins.
        on_outcome: Called with each outcome.
    """
    started = time.perf_counter()
    whole = profile(target.name)
    chosen = whole if checks is None else checks
    outcomes = []
    with Harness(target, settings, known) as harness:
        for check in chosen:
            on_start(check)
            outcomes.append(harness.outcome(check))
            on_outcome(outcomes[-1])
    return RunReport(
        target.name,
        tuple(outcomes),
        describe(target, settings),
        clauses_of(chosen),
        selection,
        time.perf_counter() - started,
        len(whole),
    )


def select(
    kinds: Sequence[str], expression: str, among: Sequence[Check] | None = None
) -> list[Check]:
    """The checks of some chapters with an id, or that match an expression, see :func:`matches`.

    Args:
        kinds: The chapters; all of them if there are none.
        expression: The id, or what they match; "" if that does not matter.
        among: Which checks there are; all of the suite if None.

    Raises:
        ConfigError: A kind is unknown, the expression is malformed, or nothing matches.
    """
    if unknown := sorted(set(kinds) - set(KINDS)):
        raise ConfigError(
            f"unknown kind {unknown[0]!r}", fix=f"use some of {', '.join(KINDS)}", key="kind"
        )
    there = [
        c for c in (all_checks() if among is None else among) if not kinds or c.clause.kind in kinds
    ]
    chosen = [c for c in there if c.id == expression]
    chosen = chosen or [c for c in there if not expression or matches(expression, c)]
    if not chosen:
        raise ConfigError(
            f"no check matches {expression!r}",
            fix="rl conformance list shows all; those of core need `rl conformance run core`",
            key="k",
        )
    return chosen


def matches(expression: str, check: Check) -> bool:
    """Whether a check matches words joined by ``and``, ``or``, ``not`` and brackets.

    A clause number matches its own checks, any other word the checks with that word in their name.

    Raises:
        ConfigError: The expression is malformed.
    """
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, check)
    except SyntaxError as error:
        raise ConfigError(
            f"the expression {expression!r} is malformed",
            fix="join words by and, or, not and brackets",
            key="k",
        ) from error


def _evaluate(node: ast.expr, check: Check) -> bool:
    if isinstance(node, ast.BoolOp):
        every = all if isinstance(node.op, ast.And) else any
        return every(_evaluate(value, check) for value in node.values)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return not _evaluate(node.operand, check)
    if isinstance(node, ast.Name):
        word = node.id.upper()
        return word == check.clause.id if word in CLAUSES else word in check.name.upper()
    raise SyntaxError(ast.unparse(node))
