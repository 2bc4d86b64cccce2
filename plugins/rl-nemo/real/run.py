"""NeMo RL's own loops, as they are, over policies and engines of rl-core, on a CPU.

    python run.py CHECKOUT [--only grpo] [--place embedded] [--steps 20] [--json FILE]
    python run.py CHECKOUT --policy megatron --generation vllm --engine-python /engine/bin/python

Prints a line for each, and exits with 1 if one failed, or did not learn.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import traceback
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path

import checkout

#: What runs where; the asynchronous loop sends its engine to an actor.
EVERYWHERE = ["embedded", "cluster"]
ON_RAY = {"async_grpo": ["ray"]}


def too_late(*_: object) -> None:
    """Ends a loop that waits for what does not come."""
    raise TimeoutError("the loop did not end before its deadline: see --deadline")


def main() -> int:
    """Runs what was asked for; the process's exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of NeMo RL")
    parser.add_argument("--only", action="append", help="a loop; can be given again")
    parser.add_argument("--place", action="append", help="embedded, cluster or ray; likewise")
    parser.add_argument("--policy", default="hf", help="hf or megatron")
    parser.add_argument("--generation", default="hf", help="the engine: hf, vllm or sglang")
    parser.add_argument("--engine-python", help="the interpreter of an engine's own environment")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--deadline", type=int, default=900, help="seconds for each loop")
    parser.add_argument("--json", type=Path, help="where to write the outcomes")
    given = parser.parse_args()
    path = given.checkout.resolve()
    commit = checkout.commit_of(path)
    print(f"NeMo RL {commit}, on Python {sys.version.split()[0]}", flush=True)
    print(f"policy {given.policy}, engine {given.generation}", flush=True)
    checkout.export(path)

    import ray
    from loops import LOOPS, Backends, run

    backends = Backends(given.policy, given.generation, given.engine_python)

    # A place for each worker, whatever there is; environments take none.
    started = ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    os.environ["RAY_ADDRESS"] = started.address_info["address"]  # there may be others on this host
    signal.signal(signal.SIGALRM, too_late)
    outcomes, failed = [], []
    print(
        f"{'loop':28} {'place':9} {'steps':>5} {'':6} {'from':>7} {'to':>7} {'apart':>8} {'s':>6}"
    )
    for loop in given.only or LOOPS:
        for place in given.place or ON_RAY.get(loop, EVERYWHERE):
            with tempfile.TemporaryDirectory() as folder:
                log = Path(folder, "log")
                try:
                    signal.alarm(given.deadline)
                    with log.open("w", buffering=1) as file, redirect_stdout(file):
                        outcome = run(path, Path(folder), loop, place, backends, given.steps)
                except Exception:
                    failed.append(f"{loop}, {place}")
                    print(f"{loop:28} {place:9} failed\n{log.read_text()[-3000:]}")
                    traceback.print_exc()
                    continue
                finally:
                    signal.alarm(0)
            outcomes.append(outcome)
            apart = "-" if outcome.apart is None else f"{outcome.apart:.6f}"
            print(
                f"{loop:28} {place:9} {outcome.steps:5} {outcome.measure:6} {outcome.first:7.4f} "
                f"{outcome.last:7.4f} {apart:>8} {outcome.seconds:6.1f}",
                flush=True,
            )
            if outcome.steps != given.steps or not outcome.learned:
                failed.append(f"{loop}, {place}")
    ray.shutdown()
    if given.json:
        result = {"commit": commit, "failed": failed, "outcomes": [asdict(o) for o in outcomes]}
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(result, indent=2) + "\n")
    print("failed: " + "; ".join(failed) if failed else "all of them ran, and learned")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
