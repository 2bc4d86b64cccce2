"""The commands ``rl train`` and ``rl config``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from rl_cli.command import Command
from rl_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    import argparse

__all__ = ["config", "train"]

#: Exit codes of runs that a signal ended.
_STOPPED = {"SIGINT": 130, "SIGTERM": 143}


def run(options: argparse.Namespace) -> int:
    """Runs train."""
    from rl_train.config import read_config
    from rl_train.run import train as run_it

    given, origins = read_config(options.file, options.arguments)
    outcome = run_it(given, origins=origins)
    if options.json:
        print(json.dumps(dataclasses.asdict(outcome), indent=2, default=str))
    return _STOPPED.get(outcome.stopped or "", 0)


def check(options: argparse.Namespace) -> int:
    """Runs config check."""
    from rl_train.checks import check_sources
    from rl_train.config import check_backend, check_run, read_config
    from rl_train.methods import loss_of

    given, origins = read_config(options.file, options.arguments)
    if "backend" not in given:
        checked = check_run(given, origins)
        loss_of(checked)
        check_sources(checked, origins)
        print(
            f"{options.file}: configuration of a run, no errors: every key, and that the model, "
            "the data, the reward functions and the engine are there"
        )
        return 0
    problems = []
    for kind in ("policy", "generation"):
        try:
            check_backend(kind, given)
        except (ConfigError, PluginError) as error:
            problems.append(origins.explain(error))
        else:
            print(f"{options.file}: {kind} backend {given['backend']}, no errors")
            return 0
    # The kind that the file comes closest to.
    raise min(problems, key=lambda error: len(error.details.get("keys", ())) or 1000)


train = Command(
    "rl train",
    "Train your model with your data and your reward: GRPO, DPO or SFT",
    "rl train run.yaml\n"
    "rl train run.yaml steps=20 policy.optimizer.lr=1e-6 generation.backend=vllm\n"
    "rl train run.yaml checkpoint.resume=auto",
    details="KEY is a key of the file, with dots for sections. On Ctrl-C the run finishes the "
    "current step and saves a checkpoint; checkpoint.resume=auto continues from it. Exits with 0 "
    "at the end of the run, with 1 if it failed, with 130 or 143 if a signal ended it.",
    run=run,
)
config = Command("rl config", "Check a configuration without loading a model")
_check = config.command(
    "check",
    "Check every key of a run, or of one backend",
    "rl config check run.yaml\nrl config check run.yaml generation.backend=vllm",
    details="If the file has the key backend, it is the configuration of one backend. Exits with 1 "
    "if a key is unknown, missing, of the wrong type or out of range, and for a run also if the "
    "model, the data, a reward function or an engine is not there; the error names the line. Names "
    "on the hub are not looked up.",
    run=check,
)
for _command in (train, _check):
    _command.add_argument("file", type=Path, metavar="FILE", help="YAML or JSON")
    _command.add_argument(
        "arguments", nargs="*", default=(), metavar="KEY=VALUE", help="replaces the file's value"
    )
train.add_argument("--json", action="store_true", help="print the result as JSON")
