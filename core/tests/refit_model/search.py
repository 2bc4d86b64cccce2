"""Breadth-first search through everything that can happen."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from refit_model.tasks import product_in_hand
from refit_model.world import Scenario, World

Trace = tuple[str, ...]


@dataclass
class Found:
    """What a search found.

    Attributes:
        states: Different ones, at which something could be chosen.
        transitions: Choices made.
        runs: Worlds begun.
        seconds: Of wall clock.
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


def explore(scenario: Scenario, *, most: int = 1 << 60) -> Found:
    """Tries all choices, those with the fewest departures from the usual first.

    A world cannot be copied, because its threads cannot, so each run begins anew and repeats what
    led to the choice that it is there to make. It then goes on as usual, and leaves every
    other choice on its way to later runs, up to a state that was seen before.

    Args:
        scenario: What happens, and what may go wrong.
        most: States after which the search gives up.
    """
    found, begun = Found(), time.perf_counter()
    seen: set[bytes] = set()
    queue: deque[Trace] = deque([()])
    with product_in_hand():
        while queue and found.broken is None and found.states < most:
            path = list(queue.popleft())
            found.runs += 1
            world = World(scenario)
            world.known_way = True
            for choice in path[:-1]:
                world.take(choice)
            world.known_way = False
            for choice in path[-1:]:
                world.take(choice)
            while world.broken is None:
                options = world.choices()
                if not options:
                    world.finish()
                    break
                if len(options) > 1:
                    key = world.key()
                    if key in seen:
                        break
                    seen.add(key)
                    found.states += 1
                    queue.extend((*path, other) for other in options[1:])
                path.append(options[0])
                world.take(options[0])
                found.transitions += 1
            found.transitions += 1
            found.broken, found.trace = world.broken, tuple(path)
            world.close()
    found.complete = not queue and found.broken is None
    found.seconds = time.perf_counter() - begun
    return found


def follow(scenario: Scenario, trace: Trace) -> tuple[str | None, list[str]]:
    """Goes a way again as far as it exists, then on as usual.

    Returns:
        What is wrong, if anything is, and the choices of the trace that could not be made.
    """
    with product_in_hand():
        world, left = World(scenario), deque(trace)
        missed: list[str] = []
        while world.broken is None:
            options = world.choices()
            if not options:
                world.finish()
                break
            choice = left.popleft() if left else options[0]
            if choice in options:
                world.take(choice)
            else:
                missed.append(choice)
        broken = world.broken
        world.close()
    return broken, missed
