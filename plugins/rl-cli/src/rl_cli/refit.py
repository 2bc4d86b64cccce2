"""``rl refit``: what a refit would move, before there are GPUs."""

from __future__ import annotations

import json
from html import escape
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table

from rl_cli.command import Command
from rl_cli.output import console_for_result
from rl_cli.planning import Devices, Links, Shape, config_of, model_of, predict
from rl_cli.planning.picture import heat_map
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    import argparse

__all__ = ["app"]

_LINKS = Links()
_GPUS_PER_HOST = 8


def plan(options: argparse.Namespace) -> int:
    """Runs plan."""
    for option in ("gpus_per_host", "within", "between"):
        if not 0 < (value := getattr(options, option)) < inf:
            name = f"--{option.replace('_', '-')}"
            text = f"{name} is {value}, which is no finite number above 0"
            raise ConfigError(text, fix="give one, such as the default", key=name)
    model = model_of(config_of(options.model), options.dtype)
    trainer = Shape.parse(options.trainer, "--trainer")
    engine = Shape.parse(options.engine, "--engine", whole_experts=True)
    per_host = options.gpus_per_host
    # The engines begin on a host of their own, unless they share the trainer's devices.
    first = 0 if options.colocated else -(-trainer.ranks // per_host) * per_host
    devices = Devices(range(trainer.ranks), range(first, first + engine.ranks), per_host)
    links = Links(options.within, options.between)
    found = predict(model, trainer, engine, devices, links)
    facts = {
        "model": {
            "family": model.family,
            "parameters": model.parameters,
            "dtype": model.dtype,
            "bytes": model.nbytes,
        },
        "trainer": {"shape": trainer.text, "ranks": trainer.ranks},
        "engine": {"shape": engine.text, "ranks": engine.ranks},
        "assumed": {
            "gpus_per_host": per_host,
            "within_gb_per_s": links.within,
            "between_gb_per_s": links.between,
            "colocated": options.colocated,
        },
        "plan": found.facts(),
    }
    title = f"{model.family}, {_bytes(model.nbytes)}: {trainer.text} to {engine.text}"
    if options.svg:
        drawn = heat_map(found.pairs, trainer.ranks, engine.ranks, escape(title))
        try:
            options.svg.write_text(drawn, encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"--svg: {options.svg} cannot be written: {error}",
                fix="give a file in a directory that exists",
                key="--svg",
            ) from error
    if options.json:
        print(json.dumps(facts, indent=2))
    else:
        _show(title, facts)
    return 0


def _show(title: str, facts: dict[str, Any]) -> None:
    plan, assumed, console = facts["plan"], facts["assumed"], console_for_result()
    whole = plan["gather_and_broadcast"]
    table = Table("", "rank to rank", "gather and broadcast", box=None, pad_edge=False)
    table.add_row(
        "received over kept", *(f"{each['received_over_kept']:.2f}" for each in (plan, whole))
    )
    table.add_row("between hosts", *(_bytes(each["bytes_between_hosts"]) for each in (plan, whole)))
    table.add_row(
        "lower bound of the time", *(f"{each['lower_bound_s']:.4g} s" for each in (plan, whole))
    )
    spread = Table("each", "least", "mean", "most", box=None, pad_edge=False)
    for name, key in (
        ("engine rank keeps", "kept_per_engine_rank"),
        ("engine rank receives", "received_per_engine_rank"),
        ("trainer rank sends", "sent_per_trainer_rank"),
        (f"of {plan['links']:,} links carries", "bytes_per_link"),
    ):
        spread.add_row(name, *(_bytes(plan[key][of]) for of in ("min", "mean", "max")))
    console.print(
        f"{title}, {facts['model']['parameters']:,} parameters of {facts['model']['dtype']}"
    )
    console.print(
        f"Assumed: {assumed['gpus_per_host']} GPUs per host; each has "
        f"{assumed['within_gb_per_s']:g} GB/s within its host and {assumed['between_gb_per_s']:g} "
        "GB/s to other hosts, in each direction. "
        + (
            "The engines share the trainer's GPUs."
            if assumed["colocated"]
            else "The engines have hosts of their own."
        )
    )
    for each in (table, spread):
        console.print()
        console.print(each)
    console.print()
    console.print(
        "Hottest trainer ranks: "
        + ", ".join(
            f"{hot['trainer']} ({_bytes(hot['bytes'])})" for hot in plan["hottest_trainer_ranks"]
        )
    )
    console.print(
        "Hottest links: "
        + ", ".join(
            f"{hot['trainer']} to {hot['engine']} ({_bytes(hot['bytes'])})"
            for hot in plan["hottest_links"]
        )
    )
    busiest = plan["busiest"]
    console.print(
        f"The lower bound is the time that the link of {busiest['side']} rank {busiest['rank']} is "
        "busy; what has to be measured is not in it."
    )


def _bytes(count: float) -> str:
    power = min(4, (len(str(int(count))) - 1) // 3)
    return f"{count / 1000**power:.4g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


app = Command("rl refit", "Predict what refits move between ranks")
_plan = app.command(
    "plan",
    "Predict the bytes and the least seconds of a refit, without weights and without GPUs",
    "rl refit plan --model DIRECTORY --trainer tp2ep4 --engine tp8x2\n"
    "rl refit plan --model DIRECTORY --trainer fsdp64 --engine tp8x16 --json\n"
    "rl refit plan --model DIRECTORY --trainer tp8pp8 --engine x16 --svg FILE",
    details="SHAPE has sizes one after another. tp: ranks that share every layer; pp: pipeline "
    "stages; dp: copies; fsdp: ranks over which each tensor is cut; ep: ranks over which the "
    "experts are dealt; etp: ranks that share every expert (default: tp for a trainer and without "
    "ep, 1 for an engine with ep); x: replicas. Every trainer rank sends only what an engine rank "
    "keeps. The lower bound is the time for which the busiest rank's link is busy.",
    run=plan,
)
_plan.add_argument(
    "--model",
    type=Path,
    required=True,
    metavar="PATH",
    help="a checkpoint's directory, or its config.json",
)
_plan.add_argument("--trainer", required=True, metavar="SHAPE", help="such as tp8pp8dp2")
_plan.add_argument("--engine", required=True, metavar="SHAPE", help="such as tp8x16")
_plan.add_argument("--dtype", metavar="DTYPE", help="of all tensors (default: the model's)")
_plan.add_argument(
    "--gpus-per-host",
    type=int,
    default=_GPUS_PER_HOST,
    metavar="COUNT",
    help=f"default {_GPUS_PER_HOST}",
)
_plan.add_argument(
    "--within",
    type=float,
    default=_LINKS.within,
    metavar="GB/S",
    help=f"of a GPU to its host's others, in each direction (default {_LINKS.within:g})",
)
_plan.add_argument(
    "--between",
    type=float,
    default=_LINKS.between,
    metavar="GB/S",
    help=f"of a GPU to other hosts, in each direction (default {_LINKS.between:g})",
)
_plan.add_argument(
    "--colocated", action="store_true", help="the engines use the trainer's first GPUs"
)
_plan.add_argument("--json", action="store_true", help="print all figures as JSON")
_plan.add_argument(
    "--svg", type=Path, metavar="FILE", help="draw the bytes between all pairs of ranks"
)
