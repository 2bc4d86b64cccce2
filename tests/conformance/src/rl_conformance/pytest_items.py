"""The suite inside pytest: items, outcomes as test results, and the report at the end."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Any

import pytest

from rl_conformance.environment import describe
from rl_conformance.harness import Harness
from rl_conformance.ledger import read_ledger
from rl_conformance.outcome import Outcome, RunReport, Status, Verdict
from rl_conformance.registry import clauses_of, profile
from rl_conformance.reports import ReportFiles
from rl_conformance.run import find_target
from rl_conformance.settings import Settings
from rl_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_conformance.registry import Check

__all__ = ["conduct", "finish_session", "harness_for", "known_failures", "suite_items"]

Run = tuple[str, str, str]

_HARNESSES = pytest.StashKey[dict[tuple[str, Settings], Harness]]()


def suite_items(session: pytest.Session, backend: str) -> list[pytest.Item]:
    """One item for each check of a run against a backend, or of core's profile.

    Raises:
        pytest.UsageError: There is no such backend, or its engine is not installed.
    """
    items: list[pytest.Item] = []
    try:
        find_target(backend)
    except PluginError as error:
        raise pytest.UsageError(str(error)) from error
    for check in profile(backend):
        name = f"{backend}::{check.id}"
        item = ConformanceItem.from_parent(session, name=name, check=check)
        # A summary reads the results of all capabilities; the checks of a clause share engines.
        of_summary = check.summary or check.capability is not None
        group = "capabilities" if of_summary else check.clause.id
        item.add_marker(pytest.mark.xdist_group(group))
        items.append(item)
    return items


class ConformanceItem(pytest.Item):
    """One check of the suite."""

    def __init__(self, *, check: Check, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.check = check

    def runtest(self) -> None:
        """Runs the check; its status becomes pytest's."""
        name = self.config.getoption("rl_backend")
        conduct(self, harness_for(self.config, find_target, name), self.check)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], *_: Any) -> str:
        """The message of the check alone, without the suite's own frames."""
        return str(excinfo.value)

    def reportinfo(self) -> tuple[str, None, str]:
        """Where the item is, for pytest."""
        return "rl_conformance", None, f"{self.name}: {self.check.title}"


def harness_for(config: pytest.Config, find: Any, name: str, **settings: Any) -> Harness:
    """The harness of a backend, one for each combination of settings in a session."""
    chosen = {
        "device": config.getoption("rl_device"),
        "dtype": config.getoption("rl_dtype"),
        "model": config.getoption("rl_model"),
        "timeout_s": config.getoption("rl_timeout"),
        "layouts": config.getoption("rl_layouts"),
        **{key: value for key, value in settings.items() if value is not None},
    }
    key = (name, Settings.of(**chosen))
    kept = config.stash.setdefault(_HARNESSES, {})
    if key not in kept:
        # More threads than cores wait for each other: each of xdist's processes gets its part.
        workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
        if workers > 1 and "OMP_NUM_THREADS" not in os.environ:
            import torch

            threads = max(1, (os.cpu_count() or 1) // workers)
            os.environ["OMP_NUM_THREADS"] = str(threads)
            torch.set_num_threads(threads)
        kept[key] = Harness(find(name), key[1], known_failures(config))
        config.add_cleanup(kept[key].close)
    return kept[key]


def known_failures(config: pytest.Config) -> dict[str, str]:
    """The known failures of the ledger.

    Raises:
        pytest.UsageError: It is not whole, or stale.
    """
    ledger = config.getoption("rl_known_failures")
    try:
        return read_ledger(ledger) if ledger else {}
    except ConfigError as error:
        raise pytest.UsageError(str(error)) from error


def conduct(item: pytest.Item, harness: Harness, check: Check) -> None:
    """Runs a check and turns its outcome into pytest's."""
    outcome = harness.outcome(check)
    properties = {
        "backend": harness.target.name,
        "outcome": outcome.as_dict(),
        "environment": describe(harness.target, harness.settings),
    }
    item.user_properties.append(("rl_conformance", properties))
    text = f"{outcome.check}: {outcome.status}: {outcome.story}".rstrip(": ")
    if outcome.status.bad:
        pytest.fail(text, pytrace=False)
    elif outcome.status is Status.KNOWN_FAILURE:
        pytest.xfail(text)
    elif outcome.status is not Status.PASSED:
        pytest.skip(text)


def finish_session(
    session: pytest.Session,
    found: Mapping[Run, Sequence[Outcome]],
    environments: Mapping[Run, Mapping[str, Any]],
    seconds: float,
) -> None:
    """Writes the reports, and fails a session in which a run of the suite is incomplete.

    Args:
        session: That ends.
        found: Outcomes by backend, device and dtype.
        environments: What each of them ran with.
        seconds: How long the session took.
    """
    config = session.config
    path, chosen = config.getoption("rl_report"), config.getoption("rl_backend")
    runs = dict(found)
    if chosen and not any(run[0] == chosen for run in runs):
        empty = Settings.of(config.getoption("rl_device"), config.getoption("rl_dtype"))
        runs[chosen, empty.device, empty.dtype] = ()
    for run, outcomes in runs.items():
        report = _report(session, run, outcomes, environments.get(run, {}), seconds)
        if path:
            file = path.with_stem("-".join([path.stem, *run])) if len(runs) > 1 else path
            ReportFiles(json=file).write(report)
        if report.verdict is Verdict.INCOMPLETE and not session.exitstatus:
            terminal: Any = config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None:
                missing = ", ".join(report.missing)
                terminal.ensure_newline()
                terminal.write_line(f"{run[0]}: incomplete, without a result: {missing}", red=True)
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _report(
    session: pytest.Session,
    run: Run,
    outcomes: Sequence[Outcome],
    environment: Mapping[str, Any],
    seconds: float,
) -> RunReport:
    options = session.config.option
    selection = " ".join(filter(None, [options.keyword, options.markexpr]))
    seen = {outcome.clause for outcome in outcomes}
    checks = profile(run[0])
    complete = {o.check for o in outcomes} >= {check.id for check in checks}
    chosen = run[0] == session.config.getoption("rl_backend")
    broken = (pytest.ExitCode.INTERRUPTED, pytest.ExitCode.INTERNAL_ERROR)
    stopped = session.shouldstop or session.shouldfail or session.exitstatus in broken
    whole = not selection and bool(chosen or complete or stopped)
    return RunReport(
        run[0],
        _in_order(outcomes, checks, fill=whole),
        {**environment, "command": shlex.join(["pytest", *session.config.invocation_params.args])},
        clauses_of(c for c in checks if whole or c.clause.id in seen),
        "" if whole else selection or "the classes that were collected",
        seconds,
        len(checks),
    )


def _in_order(
    outcomes: Sequence[Outcome], checks: Sequence[Check], *, fill: bool
) -> tuple[Outcome, ...]:
    """As the catalogue has them; ``fill`` adds those that a process took with it when it ended."""
    found = {outcome.check: outcome for outcome in outcomes}
    lost = "pytest was stopped, or its process ended, before there was a result"
    for check in checks if fill else ():
        found.setdefault(check.id, Outcome(check.id, check.title, Status.NOT_RUN, message=lost))
    order = [check.id for check in checks]
    return tuple(sorted(found.values(), key=lambda outcome: order.index(outcome.check)))
