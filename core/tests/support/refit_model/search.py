"""Breadth-first search through everything that can happen."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from refit_model.events import choices, take
from refit_model.product import product_in_hand
from refit_model.promises import check_finish
from refit_model.world import Scenario, World

Trace = tuple[str, ...]


@dataclass
class Found:
    """What a search found.

    Attributes:
        states: Different ones, at which something could be chosen.
        transitions: Choices made.
        runs: Worlds begun.
        seconds: Of this process, however busy the host is.
        broken: What is wrong, if anything is.
        trace: All choices up to there.
        complete: Every state was seen.
    """

    states: int = 0
    transitions: int = 0
    runs: int = 0
    seconds: float = 0.0
    broken: str | None = None
    trace: Trace = ()
    complete: bool = False

    def __str__(self) -> str:
        end = self.broken or ("all of it" if self.complete else "given up")
        rate = f"{self.seconds:.1f} s"
        return f"{self.states} states, {self.transitions} transitions, {rate}: {end}"


def explore(scenario: Scenario, *, most: int = 1 << 60) -> Found:
    """Tries all choices, those with the fewest departures from the usual first.

    A world cannot be copied, because its threads cannot, so each run begins anew and repeats what
    led to the choice that it is there to make. It then goes on as usual, and leaves every
    other choice on its way to later runs, up to a state that was seen before.

    Args:
        scenario: What happens, and what may go wrong.
        most: States after which the search gives up.
    """
    found, begun = Found(), time.process_time()
    seen: set[bytes] = set()
    queue: deque[Trace] = deque([()])
    with product_in_hand():
        while queue and found.broken is None and found.states < most:
            path = list(queue.popleft())
            found.runs += 1
            world = World(scenario)
            world.known_way = True
            for choice in path[:-1]:
                _settle(world)
                take(world, choice)
            _settle(world)
            world.known_way = False
            for choice in path[-1:]:
                take(world, choice)
            while options := _settle(world):
                key = world.key()
                if key in seen:
                    break
                seen.add(key)
                found.states += 1
                found.transitions += len(options)
                queue.extend((*path, other) for other in options[1:])
                path.append(options[0])
                take(world, options[0])
            else:
                check_finish(world)
            found.broken, found.trace = world.broken, tuple(path)
            world.close()
    found.complete = not queue and found.broken is None
    found.seconds = time.process_time() - begun
    return found


def nothing_goes_wrong(name: str, scenario: Scenario, capsys: Any) -> None:
    """Explores all of a scenario, and prints how much that is."""
    found = explore(scenario)
    with capsys.disabled():
        print(f"\n{name}: {found}", end=" ")
    assert found.broken is None, "\n".join([found.broken or "", *found.trace])
    assert found.complete


def follow(scenario: Scenario, trace: Trace) -> tuple[str | None, list[str]]:
    """Goes a way again, and then on as usual.

    Where the code has changed since, so have the steps: what happens by itself is passed over if
    it does not, what goes wrong waits until it can.

    Returns:
        What is broken, if anything is, and what could not go wrong any more.
    """
    with product_in_hand():
        world, left = World(scenario), deque(trace)
        while options := _settle(world):
            while left and left[0] not in options and not _goes_wrong(left[0]):
                left.popleft()
            take(world, left.popleft() if left and left[0] in options else options[0])
        check_finish(world)
        broken = world.broken
        world.close()
    return broken, list(filter(_goes_wrong, left))


def _settle(world: World) -> list[str]:
    """Does what there is no choice about; what can be chosen then, nothing at the end."""
    while len(options := choices(world)) == 1:
        take(world, options[0])
    return options


def _goes_wrong(choice: str) -> bool:
    first, *rest = choice.split()
    kinds = ("pause", "crash", "quit", "lose", "step", "drift", "drop", "load", "replay", "pose")
    return first in (*kinds, "flood") or "play" in rest or rest in (["resumes"], ["is", "silent"])
