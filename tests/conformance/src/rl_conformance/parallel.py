"""A whole run in several processes: pytest with xdist deals the checks out."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from rl_conformance.outcome import Outcome, Verdict
from rl_conformance.registry import profile
from rl_conformance.reports import read_report
from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError
from rl_core.install import install_command

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_conformance.outcome import RunReport
    from rl_conformance.settings import Settings

__all__ = ["run_in_processes"]


def run_in_processes(
    backend: str,
    settings: Settings,
    known_failures: Path | None,
    processes: int,
    on_outcome: Callable[[Outcome], None] = lambda _: None,
) -> RunReport:
    """Runs every check.

    Args:
        backend: Its name.
        settings: Where it runs.
        known_failures: The ledger.
        processes: How many.
        on_outcome: Called with each outcome.

    Raises:
        ConfigError: pytest-xdist is not installed.
        DeadlineError: It took longer than the deadlines of all checks together.
        WorkerDiedError: pytest ended without a report, or with another verdict than that.
    """
    if importlib.util.find_spec("xdist") is None:
        raise ConfigError(
            "several processes need pytest-xdist, which is not installed",
            fix=install_command("rl-conformance", "parallel"),
            key="processes",
        )
    options = {
        "--rl-backend": backend,
        "--rl-device": settings.device,
        "--rl-dtype": settings.dtype,
        "--rl-model": settings.model and os.path.abspath(settings.model),
        "--rl-timeout": settings.timeout_s,
        "--rl-layouts": settings.layouts,
        "--rl-known-failures": known_failures and os.path.abspath(known_failures),
        "-n": processes,
    }
    to_read, to_write = os.pipe()
    with tempfile.TemporaryDirectory(prefix="rl-conformance-") as folder:
        # No configuration and no tests of the directory where the user, or this package, happens
        # to be.
        command = [sys.executable, "-m", "pytest", "-c", os.devnull, "--rootdir", folder]
        command += ["--noconftest"]
        command += ["-p", "no:cacheprovider", "-q", "--rl-report", f"{folder}/report.json"]
        command += ["--rl-outcomes", str(to_write)]
        command += [f"{part}" for option in options.items() if option[1] for part in option]
        # Nor what its user has set for pytest elsewhere.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        deadline_s = sum(settings.timeout_s or check.timeout_s for check in profile(backend))
        log = Path(folder, "log")
        with (
            log.open("w") as output,
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(to_write,),
            ) as done,
            os.fdopen(to_read) as outcomes,
        ):
            os.close(to_write)
            timer = threading.Timer(deadline_s, done.kill)
            timer.start()
            try:
                for line in outcomes:
                    on_outcome(Outcome.from_dict(json.loads(line)))
            finally:
                late = timer.finished.is_set()
                timer.cancel()
        if late:
            raise DeadlineError(
                f"pytest did not end within {deadline_s:.0f} s, in which every check must",
                fix="leave out -n: the check that hangs is then named",
            )
        file = Path(folder, "report.json")
        report = read_report(file) if file.exists() else None
        sound = report is not None and report.verdict is Verdict.CONFORMANT
        if report is None or (done.returncode != 0) == sound:
            raise WorkerDiedError(
                f"pytest ended with exit code {done.returncode} and "
                f"{report.verdict if report else 'without a report'}",
                fix=f"leave out -n; it ended with\n{log.read_text()[-2000:]}",
            )
        return report
