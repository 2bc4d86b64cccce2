"""Fuzzes all that reads what others wrote.

``python core/tests/support/fuzz_messages.py --runs 1000000``

With atheris installed the inputs follow the coverage of ``rl_core.weights``; without it, or with
``--plain``, they are random and repeatable. Either way a finding ends the run; ``--replay`` with
the input that it prints repeats it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))


def fuzz(runs: int, seed: int) -> Counter[str]:
    """Tries so many random inputs.

    Returns:
        How often each thing happened.

    Raises:
        Exception: A finding, with the input in its notes.
    """
    from fuzz_target import keyed, one_input

    seen: Counter[str] = Counter()
    for number in range(runs):
        data = keyed(seed, number)
        try:
            one_input(data, seen)
        except BaseException as error:
            error.add_note(f"input {number} of seed {seed}: --replay {data.hex()}")
            raise
    return seen


def follow_coverage(runs: int, seed: int) -> None:
    """Lets atheris choose the inputs; ends the process."""
    import atheris

    with atheris.instrument_imports(include=["rl_core.weights"]):
        from fuzz_target import one_input

    seen: Counter[str] = Counter()
    options = [f"-runs={runs}", f"-seed={seed}", "-max_len=400", "-len_control=0"]
    atheris.Setup([sys.argv[0], *options], lambda data: one_input(data, seen))
    atheris.Fuzz()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plain", action="store_true", help="random inputs, atheris or not")
    parser.add_argument("--replay", type=bytes.fromhex, help="one input, in hexadecimal")
    given = parser.parse_args()
    if given.replay is not None:
        from fuzz_target import one_input

        one_input(given.replay, Counter())
    elif find_spec("atheris") and not given.plain:
        follow_coverage(given.runs, given.seed)
    else:
        begun = time.monotonic()
        seen = fuzz(given.runs, given.seed)
        seconds = time.monotonic() - begun
        for what, count in sorted(seen.items()):
            print(f"{count:9} {what}")
        print(f"{given.runs} inputs in {seconds:.0f} s, {given.runs / seconds:.0f} per second")


if __name__ == "__main__":
    main()
