"""One commit next to another: how long each takes for the same work, in turns within one run.

    nox -s bench -- --against COMMIT

gives both an environment of their own, made of the same pinned packages, and runs this file once.
Each sample is a process of either side that runs ``--sample SECTION`` with that side's sources;
the sides take turns, A B B A, so that what else the machine does falls on both. The smallest
figure of a side counts: what disturbs a run makes it longer.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

Figures = dict[str, list[float]]

#: Of a sample of a section, at most.
SAMPLE_S = 600.0
#: Where a checkout has its packages.
SOURCES = ("core/src", "plugins/*/src", "tests/conformance/src")
#: Of the quickstart's step.
PHASES = ("generate", "score", "train", "refit")


def quickstart(quick: bool) -> Figures:
    """The phases of a step of GRPO on the quickstart's model, generation in this process.

    The step is written out here, so that commits whose examples differ do the same work.
    """
    from examples.additions import MAX_NEW_TOKENS, Additions, make_model
    from transformers import AutoTokenizer

    import rl_core
    import rl_losses
    from rl_core import create_generation, create_policy
    from rl_core.weights import refit
    from rl_losses import GRPOLossFn, grpo_advantages

    older = not hasattr(rl_losses, "training_batch")
    training_batch = (rl_core if older else rl_losses).training_batch
    samples, rows = 16, 128 if quick else 1024
    loss_fn = GRPOLossFn(reference_policy_kl_penalty=0.001)
    found: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), 0)
        task = Additions(AutoTokenizer.from_pretrained(model), 0)
        config = {"backend": "hf", "model_name": str(model), "seed": 0}
        sizes = {"train_global_batch_size": rows // 8, "train_micro_batch_size": rows // 8}
        policy = create_policy({**config, **sizes, "logprob_batch_size": rows})
        generation = create_generation({**config, "max_new_tokens": MAX_NEW_TOKENS})
        for number in range(3 if quick else 8):
            prompts = task.prompts(task.draw(rows // samples)).repeat_interleave(samples)
            times = [time.perf_counter()]
            generation.prepare_for_generation()
            output = generation.generate(prompts)
            generation.finish_generation()
            times.append(time.perf_counter())
            rewards = task.rewards(output)
            advantages = grpo_advantages(rewards, group_size=samples)
            batch = training_batch(output, rewards, advantages=advantages)
            policy.prepare_for_lp_inference()
            batch["prev_logprobs"] = policy.get_logprobs(batch)["logprobs"]
            reference = policy.get_reference_policy_logprobs(batch)
            batch["reference_policy_logprobs"] = reference["reference_logprobs"]
            times.append(time.perf_counter())
            policy.prepare_for_training()
            policy.train(batch, loss_fn)
            policy.finish_training()
            times.append(time.perf_counter())
            refit(policy, generation)
            times.append(time.perf_counter())
            if number:  # the first one warms up
                for what, (began, ended) in zip(PHASES, pairwise(times), strict=True):
                    found.setdefault(what, []).append(ended - began)
        generation.shutdown()
        policy.shutdown()
    return found


def refits(quick: bool) -> Figures:
    """Refits of 1 GB in 200 tensors; a delta of a tenth of them."""
    try:
        from rl_conformance.refit_bench.bench import Bench  # older commits have their own
    except ImportError:
        from refit_bench.bench import Bench
    found: Figures = {}
    with Bench(10**7 if quick else 10**9, 200, repeats=1) as bench:
        for mode in ("direct", "packed"):
            kinds = {mode: {"verify": "wire"}, f"{mode}, delta": {"delta": True, "changed": 0.1}}
            for what, options in kinds.items():
                rows = [bench.refit(mode=mode, **options) for _ in range(2 if quick else 5)]
                found[what] = [row.seconds for row in rows]
    return found


def batches(quick: bool) -> Figures:
    """Plans of packed and of dynamic microbatches, and a batch dealt to eight shards."""
    import torch

    from rl_core.batch import BatchedDataDict

    rows = 512 if quick else 8192
    lengths = torch.randint(1, 1024, (rows,), generator=torch.Generator().manual_seed(0))
    ids = torch.zeros(rows, 1024, dtype=torch.int64)
    data = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    bound = {"max_tokens_per_microbatch": 8192, "input_key": "input_ids"}
    bound["input_lengths_key"] = "input_lengths"
    packing = {
        **bound,
        "algorithm": "modified_first_fit_decreasing",
        "sequence_length_pad_multiple": 1,
    }
    dynamic = {**bound, "sequence_length_round": 64}
    return {
        "shards": repeated(lambda: data.shard_by_batch_size(8)),
        "packing": repeated(lambda: data.shard_by_batch_size(8, sequence_packing_args=packing)),
        "dynamic": repeated(lambda: data.shard_by_batch_size(8, dynamic_batching_args=dynamic)),
    }


def generation(quick: bool) -> Figures:
    """Greedy rows of rl-hf, in one call and from sixteen callers with a row at a time."""
    from concurrent.futures import ThreadPoolExecutor

    from bench_generation import make_model, make_prompts

    from rl_core import create_generation

    rows, tokens = (16, 4) if quick else (128, 32)
    data = make_prompts(rows, 64, ragged=True)
    with tempfile.TemporaryDirectory() as folder:
        config = {"backend": "hf", "model_name": str(make_model(Path(folder), 256, 4))}
        engine = create_generation({**config, "max_new_tokens": tokens, "pad_token_id": 0})
        engine.prepare_for_generation()

        def one(row: int) -> None:
            engine.generate(data.slice(row, row + 1), greedy=True)

        def many() -> None:
            with ThreadPoolExecutor(16) as pool:
                list(pool.map(one, range(rows)))

        found = {"one call": repeated(lambda: engine.generate(data, greedy=True))}
        found["16 callers"] = repeated(many)
        engine.shutdown()
    return found


def repeated(work: Callable[[], object], times: int = 3) -> list[float]:
    """Seconds of each time, after one that does not count."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return found[1:]


SECTIONS: dict[str, Callable[[bool], Figures]] = {
    "quickstart": quickstart,
    "refits": refits,
    "batches": batches,
    "generation": generation,
}


def in_turns(rounds: int) -> Iterator[int]:
    """0 and 1, each so often as there are rounds: 0 1 1 0 0 1 ..."""
    for number in range(rounds):
        yield from (0, 1) if number % 2 == 0 else (1, 0)


def ratios(before: Figures, now: Figures) -> dict[str, dict[str, float]]:
    """The least and the median seconds of both sides, and how many times as long the second takes.

    What only one side measured is left out.
    """
    found = {}
    for what, seconds in now.items():
        if what not in before:
            continue
        pair = before[what], seconds
        found[what] = {
            "before_s": min(pair[0]),
            "now_s": min(pair[1]),
            "ratio": min(pair[1]) / min(pair[0]),
            "median_ratio": statistics.median(pair[1]) / statistics.median(pair[0]),
        }
    return found


def sample(python: Path, sources: Path, section: str, quick: bool, threads: int) -> Figures:
    """What a section measures in a process of one side.

    Raises:
        RuntimeError: It failed; the end of what it wrote is in the message.
    """
    own = [path for pattern in SOURCES for path in sorted(sources.glob(pattern))]
    settings = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, [sources, *own])),
        "OMP_NUM_THREADS": str(threads),
    }
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(python), __file__, "--sample", section, "--json", file.name]
        command += ["--quick"] if quick else []
        done = subprocess.run(
            command,
            cwd=sources,
            env=settings,
            timeout=SAMPLE_S,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{section} of {sources} failed:\n{done.stderr[-2000:]}")
        figures: Figures = json.loads(Path(file.name).read_text())
        return figures


def compare(
    sides: Sequence[tuple[Path, Path]],
    sections: Sequence[str],
    rounds: int,
    quick: bool,
    threads: int,
) -> dict[str, Any]:
    """All sections of two sides, each a Python and its sources; the first one is compared with."""
    found: dict[str, Any] = {}
    for section in sections:
        seconds: list[Figures] = [{}, {}]
        try:
            for side in in_turns(rounds):
                for what, values in sample(*sides[side], section, quick, threads).items():
                    seconds[side].setdefault(what, []).extend(values)
        except RuntimeError as error:
            found[section] = {"failed": str(error)}
            continue
        found[section] = ratios(*seconds)
    return found


def show(results: dict[str, Any]) -> None:
    """Prints the table."""
    table = Table(title="milliseconds, the least of each side")
    for column in ("section", "what", "before", "now", "ratio", "of medians"):
        table.add_column(column, justify="left" if column in ("section", "what") else "right")
    for section, rows in results.items():
        if "failed" in rows:
            table.add_row(section, f"failed: {rows['failed'].splitlines()[-1]}", "", "", "", "")
            continue
        for what, row in rows.items():
            times = [f"{row[key] * 1e3:.1f}" for key in ("before_s", "now_s")]
            table.add_row(
                section, what, *times, *(f"{row[k]:.2f}" for k in ("ratio", "median_ratio"))
            )
    Console(width=120).print(table)


def main(
    before: Annotated[Path | None, typer.Option(help="Checkout that is compared with.")] = None,
    before_python: Annotated[Path | None, typer.Option(help="Python of its environment.")] = None,
    only: Annotated[str, typer.Option(help="Sections, with commas.")] = ",".join(SECTIONS),
    rounds: Annotated[int, typer.Option(min=1, help="Processes of each side and section.")] = 3,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = os.cpu_count() or 1,
    quick: Annotated[bool, typer.Option(help="Small sizes, to see that it works.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
    sample_of: Annotated[str | None, typer.Option("--sample", hidden=True)] = None,
) -> None:
    """Compares a checkout with this one, prints a table and writes JSON."""
    results: Any
    if sample_of is not None:
        results = SECTIONS[sample_of](quick)
    else:
        if before is None or before_python is None:
            raise typer.BadParameter("give --before and --before-python")
        if unknown := set(only.split(",")) - set(SECTIONS):
            raise typer.BadParameter(
                f"no section {', '.join(sorted(unknown))}: {', '.join(SECTIONS)}"
            )
        here = Path(__file__).resolve().parents[1]
        sides = [(before_python, before.resolve()), (Path(sys.executable), here)]
        results = compare(sides, only.split(","), rounds, quick, threads)
        show(results)
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=1) + "\n")
    if sample_of is None and any("failed" in rows for rows in results.values()):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
