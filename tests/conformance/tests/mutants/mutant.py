"""What a mutant is, and what comes of the suite's looking at it."""

from __future__ import annotations

import inspect
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_conformance.catalogue import CLAUSES
from rl_conformance.reference import reference_target
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.run import run, select
from rl_conformance.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from rl_conformance.outcome import RunReport
    from rl_conformance.registry import Check
    from rl_conformance.target import Target

__all__ = ["QUICK", "Autopsy", "Mutant", "breaks", "examine", "quick", "registered", "target"]

#: Where the checks are that look at one thing each. The others go on for many calls, or through all
#: options and edges: mutants that are about these name the checks that they want.
_PLAIN = frozenset(
    [
        "agreement",
        "checkpoints",
        "data",
        "discovery",
        "lifecycle",
        "prompts",
        "refit",
        "refit_collective",
        "refit_faults",
        "refit_scales",
        "refit_several",
        "refit_staged",
        "sampling",
        "scoring",
        "security",
        "training",
    ]
)

#: Of these, checks of each chapter that take no processes, thousands of draws, or dozens of models.
QUICK = {
    "data": "not ray",
    "discovery": "D2 or D4",
    "generation": "not (G10 and not top_k) and not many_rows",
    "policy": "not P9 and not two_ranks",
    "refit": "not killed and not crosses and not R6 and not odd_tensors and not pattern_of_bits "
    "and not R9 or meanwhile",
    "agreement": "A1",
    "security": "S1 or S3",
}

Verdict = Literal["killed", "survived", "strayed"]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug.

    Attributes:
        name: After the bug.
        bug: What is wrong, in a sentence.
        breaks: Clauses that do not hold; the mutant is about the first.
        target: Makes the backend under test.
        patch: While the suite looks; breaks what is not the backend's own.
        checks: Expression of the checks that are run; None: the quick ones of the chapters.
        module: Where it is written.
    """

    name: str
    bug: str
    breaks: tuple[str, ...]
    target: Callable[[], Target]
    patch: Callable[[], AbstractContextManager[Any]] = nullcontext
    checks: str | None = None
    module: str = ""

    @property
    def chapters(self) -> list[str]:
        """The chapters of the clauses that it breaks."""
        return sorted({CLAUSES[clause].kind for clause in self.breaks})


@dataclass(frozen=True, slots=True)
class Autopsy:
    """What the suite found.

    Attributes:
        mutant: The mutant.
        failed: Checks that failed, by clause.
        looked: How many checks were run.
        seconds: How long that took.
        messages: What each failed check said.
        dtype: Of the weights.
    """

    mutant: Mutant
    failed: dict[str, list[str]]
    looked: int
    seconds: float
    messages: dict[str, str]
    dtype: str = "float32"

    @property
    def verdict(self) -> Verdict:
        """Killed where it should be, not at all, or elsewhere."""
        if not self.failed:
            return "survived"
        return "killed" if set(self.failed) == set(self.mutant.breaks) else "strayed"


registered: list[Mutant] = []


def target(
    generation: Any = ReferenceGeneration, policy: Any = ReferencePolicy, name: str = "reference"
) -> Target:
    """The mutant as a backend under test."""
    return reference_target(
        name=name,
        make_generation=generation.from_config,
        make_policy=policy.from_config,
    )


def breaks(
    *clauses: str, checks: str | None = None, of: Callable[[], Target] = target
) -> Callable[[Any], Any]:
    """Registers a mutant: a class of backend, or what makes a context in which all else is broken.

    Args:
        *clauses: What does not hold any more; first what the mutant is about.
        checks: Expression of the checks to run, where the quick ones do not show it.
        of: What a context breaks, if not the reference.
    """

    def register(broken: Any) -> Any:
        bug = (inspect.getdoc(broken) or "").partition("\n")[0]
        name, module = broken.__name__, broken.__module__
        if not inspect.isclass(broken):
            registered.append(Mutant(name, bug, clauses, of, broken, checks, module))
            return broken
        role = "policy" if issubclass(broken, ReferencePolicy) else "generation"

        def make() -> Target:
            return target(**{role: broken})  # type: ignore[arg-type]

        registered.append(Mutant(name, bug, clauses, make, checks=checks, module=module))
        return broken

    return register


def checks_for(mutant: Mutant) -> list[Check]:
    """What is run against a mutant."""
    if mutant.checks is not None:
        return select([], mutant.checks)
    return [check for chapter in mutant.chapters for check in quick(chapter)]


def quick(chapter: str) -> list[Check]:
    """The quick checks of a chapter."""
    found = select([chapter], QUICK[chapter])
    return [c for c in found if c.function.__module__.rpartition(".")[2] in _PLAIN]


def examine(mutant: Mutant, dtype: str = "float32") -> Autopsy:
    """Runs the suite against a mutant whose weights are of that dtype."""
    started, checks = time.perf_counter(), checks_for(mutant)
    with mutant.patch():
        report: RunReport = run(
            mutant.target(), Settings(dtype=dtype), checks, selection=mutant.name
        )
    failed: dict[str, list[str]] = {}
    bad = [outcome for outcome in report.outcomes if outcome.status.bad]
    for outcome in bad:
        failed.setdefault(outcome.clause, []).append(outcome.check)
    messages = {outcome.check: outcome.message for outcome in bad}
    return Autopsy(mutant, failed, len(checks), time.perf_counter() - started, messages, dtype)
