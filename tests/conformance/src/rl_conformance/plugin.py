"""The pytest plugin. Inert unless ``--rl-backend`` is given or a conformance class is collected.

``pytest --rl-backend NAME`` adds one item for each check of the suite to the session. This module
is loaded in every pytest run of an environment, so it imports neither torch nor rl_core.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rl_conformance.outcome import Outcome

_PROPERTY = "rl_conformance"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options of the suite."""
    group = parser.getgroup("rl-conformance", "conformance of RL backends")
    group.addoption("--rl-backend", metavar="NAME", help="run the suite against this backend")
    group.addoption("--rl-device", choices=("cpu", "cuda"), default="cpu", help="where it runs")
    group.addoption("--rl-dtype", help="of its weights: float32 on cpu, bfloat16 on cuda")
    group.addoption(
        "--rl-model", metavar="PATH", type=_model, help="a checkpoint in place of a tiny one"
    )
    group.addoption(
        "--rl-timeout", metavar="SECONDS", type=float, help="for each check: 120 for most"
    )
    group.addoption(
        "--rl-layouts", choices=("few", "all"), default="few", help="over ranks: few, or all"
    )
    group.addoption("--rl-known-failures", metavar="FILE", help="ledger of known failures (TOML)")
    # The file descriptor on which `rl conformance run -n` reads outcomes, one a line.
    group.addoption("--rl-outcomes", type=int, help=argparse.SUPPRESS)
    group.addoption("--rl-report", metavar="FILE", type=Path, help="write the report as JSON")


def _model(path: str) -> str:
    from rl_conformance.settings import Settings
    from rl_core.errors import ConfigError

    try:
        Settings.of("cpu", model=path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Starts listening for outcomes where a report may be wanted."""
    if hasattr(config, "workerinput"):
        if config.getoption("rl_backend"):
            config.option.loadgroup = True  # xdist reads the command line anew in each process
        return
    config.pluginmanager.register(_Reporter(config), "rl-conformance-reporter")
    if config.getoption("rl_backend") and config.getoption("dist", "no") != "no":
        if config.getoption("rl_device") == "cuda":
            raise pytest.UsageError("--rl-device cuda: memory is measured; leave out -n")
        config.option.dist = "loadgroup"  # what shares outcomes or engines stays together


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Lets the other checks go on where one takes its process along."""
    if config.getoption("rl_backend"):
        from rl_conformance.scheduling import SuiteScheduling

        return SuiteScheduling(config, log)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds the suite's items. A ledger that is not whole ends the run here."""
    name = config.getoption("rl_backend")
    if config.getoption("rl_known_failures"):
        from rl_conformance.pytest_items import known_failures

        known_failures(config)
    if name:
        from rl_conformance.pytest_items import suite_items

        items.extend(suite_items(session, name))


class _Reporter:
    """Gathers outcomes, also those of xdist's workers, and writes the report."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.started = time.perf_counter()
        self.found: dict[tuple[str, str, str], list[Outcome]] = {}
        self.environments: dict[tuple[str, str, str], dict[str, Any]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Takes the outcome out of a finished test."""
        if report.when != "call":
            return
        for key, value in report.user_properties:
            if key == _PROPERTY and isinstance(value, dict):
                from rl_conformance.outcome import Outcome

                environment = value["environment"]
                run = (value["backend"], environment["device"], environment["dtype"])
                self.found.setdefault(run, []).append(Outcome.from_dict(value["outcome"]))
                if (file := self.config.getoption("rl_outcomes")) is not None:
                    os.write(file, json.dumps(value["outcome"]).encode() + b"\n")
                self.environments[run] = environment

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the report; a whole run that lacks a status fails the session."""
        name = self.config.getoption("rl_backend")
        if not self.found and not name:
            return
        from rl_conformance.pytest_items import finish_session

        seconds = time.perf_counter() - self.started
        finish_session(session, self.found, self.environments, seconds)
