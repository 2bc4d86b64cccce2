"""The command ``rl train``."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["train"]

train = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    help="Train your model with your data and your reward: GRPO, DPO or SFT",
)

_HELP = """Train your model with your data and your reward: GRPO, DPO or SFT.

\b
rl train run.yaml
rl train run.yaml steps=20 policy.optimizer.lr=1e-6 generation.backend=vllm
rl train run.yaml checkpoint.resume=auto    # go on after a crash or Ctrl-C

Keys are those of the file, with dots; `rl config check run.yaml` checks them alone.
Exit codes: 0 the run ended, 1 it failed, 2 wrong usage, 130 and 143 stopped by a signal, with a
checkpoint.
"""


@train.command(help=_HELP)
def main(
    config: Annotated[Path, typer.Argument(help="A YAML or JSON file.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Override keys of the file."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the outcome as JSON on standard output.")
    ] = False,
) -> None:
    """See ``_HELP``."""
    from rl_train.config import read_config
    from rl_train.run import train as run

    given, origins = read_config(config, arguments or ())
    outcome = run(given, origins=origins)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(outcome), indent=2, default=str))
    if outcome.stopped is not None:
        raise typer.Exit({"SIGINT": 130, "SIGTERM": 143}[outcome.stopped])
