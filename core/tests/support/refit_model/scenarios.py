"""What is explored: small products of scripts, options and faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from refit_model.world import Refit, Scenario, Train

ONE, TWO = {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 2.0}
DIRECT, PACKED = {"mode": "direct"}, {"mode": "packed"}
STAGED, DELTA = {"isolation": "staged"}, {"delta": True}
BOTH = ("E0", "E1")

#: Weights come back to what they were while an engine that was asked to load them is stopped.
STALE_DIRECT = Scenario(
    (Refit(options=DIRECT), Train(TWO), Train(ONE), Refit(options=DIRECT | DELTA)),
    ("pause E0",),
)
STALE_PACKED = Scenario(
    (Refit(BOTH, PACKED), Train(TWO), Refit(("E1",), PACKED)),
    ("pause E0",),
)
DROPPED = Scenario((Refit(), Refit(options=STAGED)), ("drop E0", "crash T"), most=2)
DROPPED_DELTA = Scenario((Refit(), Refit(options=STAGED | DELTA)), ("drop E0",))
LOADED_DELTA = Scenario((Refit(), Refit(options=STAGED | DELTA)), ("load E0",))
STAGED_CRASH = Scenario(
    (Refit(), Train(TWO), Refit(options=STAGED), Refit(options=DELTA)), ("crash T",)
)
REPLAYED = Scenario((Refit(), Train(TWO), Refit()), ("play",))
REPEATED = Scenario((Refit(),), ("replay",))
POSED = Scenario((Refit(given=False), Refit(given=False)), ("pose",))
POSED_ONCE = Scenario((Refit(given=False),), ("pose",))
LATE = Scenario((Refit(), Refit()), ("pause T",))
LATE_COUNTED = Scenario((Refit(given=False), Refit(given=False)), ("pause T",))
CRASHED = Scenario((Refit(), Refit()), ("crash E0", "crash T", "quit E0", "quit T"))
#: Frames of a connection that is closed: of a stranger, and of an engine that nobody answered.
FLOODED = Scenario((Refit(),), ("flood",))
BACKLOG = Scenario((Refit(), Refit(later=True)), ("quit T",), hellos=6)
#: Both sides of a refit, and what a driver does for the one when the other fails.
GIVEN_UP = Scenario(drivers=(Refit(),), faults=("quit T", "quit E0"))
TWO_AT_ONCE = Scenario(drivers=(Refit(), Refit()), grain=1)
TWO_INSIDE = Scenario(drivers=(Refit(), Refit()), grain=2)
TWO_APART = replace(TWO_AT_ONCE, apart=True)
READERS = Scenario(drivers=(Refit(),), readers=2, faults=("quit T", "quit E0"), grain=0)
READERS_STAGED = Scenario(drivers=(Refit(options=STAGED),), readers=2, grain=0)
READER_BETWEEN = Scenario(drivers=(Refit(),), readers=1, writers=1, grain=0)
#: Two trainers of one engine; each driver prepares the engine and asks it without a pause.
TWO_TRAINERS = Scenario(
    drivers=(Refit(options={"version": 1}), Refit(options={"version": 2}, trainer="U")), grain=0
)
#: Somebody else gives a refit up on both sides, at every moment.
GIVEN_UP_FROM_OUTSIDE = Scenario(drivers=(Refit(),), given_up=(0,), grain=2)
ONE_OF_TWO_GIVEN_UP = Scenario(drivers=(Refit(), Refit()), given_up=(1,), grain=0)
TWO_STAGED = Scenario(drivers=(Refit(options=STAGED), Refit(options=STAGED)), grain=0)
TWO_ENGINES_CRASH = Scenario(drivers=(Refit(BOTH),), faults=("crash T", "crash E0"), grain=1)
TWO_ENGINES_PAUSE = Scenario(drivers=(Refit(BOTH),), faults=("pause E0", "silence"), grain=1)
DRIVER_PAUSE = Scenario(drivers=(Refit(),), faults=("pause T", "pause E0", "silence"), grain=1)
#: Bytes go through a process group, which every member can break.
GROUP = Scenario(
    (Refit(), Refit()), ("drop E0", "crash T", "crash E0", "quit T", "quit E0"), group=True
)
GROUP_OF_TWO = Scenario(drivers=(Refit(BOTH),), faults=("crash T", "crash E0"), grain=0, group=True)
#: A rank dies without which the trainer can gather nothing more.
LOST_RANK = Scenario(drivers=(Refit(BOTH, PACKED),), faults=("lose T",), grain=1)
LOST_RANK_OF_TWO = Scenario(
    drivers=(Refit(options=PACKED), Refit(options=PACKED)), faults=("lose T",), grain=0
)
#: Two ranks of the trainer, each of which gives one tensor: to two engines, and with faults to one.
RANKS = Scenario(drivers=(Refit(BOTH, PACKED),), grain=0, ranks=True, prompt=True)
RANKS_CRASH = Scenario(
    drivers=(Refit(options=PACKED),),
    faults=("crash T", "crash T1", "crash E0"),
    grain=0,
    ranks=True,
)
RANKS_STEP = replace(RANKS_CRASH, faults=("step T1", "quit T", "quit T1"))
#: Two ranks that have the same tensors, of which one changes by itself.
RANKS_DRIFT = replace(RANKS_CRASH, faults=("drift T1",), copies=True)
RANKS_PAUSE = replace(RANKS_CRASH, faults=("pause T1", "silence"))
RANKS_PAUSE_T = replace(RANKS_CRASH, faults=("pause T", "silence"))
RANKS_REPLAYED = Scenario((Refit(),), ("replay",), ranks=True)
#: The second driver may come while the first one's trainer is gone, or after that.
TWO_AND_CRASH = Scenario(drivers=(Refit(), Refit()), faults=("crash T",), grain=0)
TWO_TRAINERS_READER = replace(TWO_TRAINERS, readers=1)
TWO_TRAINERS_QUIT = replace(TWO_TRAINERS, faults=("quit T",))

#: One fault of every kind that happens to one side, at every moment of two refits.
ONE_FAULT = (
    *(f"{kind} {party}" for kind in ("pause", "crash", "quit") for party in ("T", "E0")),
    "drop E0",
    "load E0",
    "silence",
    "play",
)


def _full() -> dict[str, Scenario]:
    """Everything that takes minutes, by name."""
    found = {}
    modes, isolations, verified = ("packed", "direct"), ("quiesced", "staged"), ("wire", "none")
    for mode, isolation, verify, in_place in product(modes, isolations, verified, (False, True)):
        options = {"mode": mode, "isolation": isolation, "verify": verify}
        again = options | {"delta": verify != "none"}
        script = (Refit(options=options), Train({"a": 2.0}), Refit(options=again))
        name = f"{mode}, {isolation}, {verify}{', in place' if in_place else ''}"
        found[name] = Scenario(script, ONE_FAULT, in_place=in_place)
    installed = {"verify": "installed"}
    found["installed"] = Scenario((Refit(options=installed), Refit(options=installed)), ONE_FAULT)
    found["counted"] = Scenario((Refit(given=False), Refit(given=False)), ONE_FAULT)
    found["replays"] = Scenario((Refit(), Refit()), ("replay",))
    found["strangers"] = Scenario((Refit(given=False), Refit(given=False)), ("pose",))
    found["stale buffers"] = STALE_PACKED
    for kind in ("pause", "crash", "quit"):
        for party in ("T", "E0"):
            name = f"two engines, {kind} {party}"
            found[name] = Scenario((Refit(BOTH), Refit(BOTH)), (f"{kind} {party}",))
    found["two at once, within their calls"] = TWO_INSIDE
    found["two at once, a reader"] = Scenario(drivers=(Refit(), Refit()), readers=1, grain=0)
    found["readers, pause"] = Scenario(
        drivers=(Refit(),), readers=1, faults=("pause T", "pause E0", "silence"), grain=0
    )
    found["the first of two is given up"] = replace(ONE_OF_TWO_GIVEN_UP, given_up=(0,))
    found["one of two is given up, staged"] = replace(TWO_STAGED, given_up=(1,))
    found["two at once, staged, a reader"] = replace(TWO_STAGED, readers=1)
    found["two engines of a driver, pause T"] = replace(
        TWO_ENGINES_PAUSE, faults=("pause T", "silence")
    )
    for fault in ("crash E0", "pause T", "pause E0"):
        found[f"two at once, {fault}"] = replace(TWO_AND_CRASH, faults=(fault,))
    for kind in ("crash", "pause"):
        found[f"two trainers, {kind}"] = replace(TWO_TRAINERS, faults=(f"{kind} T", f"{kind} E0"))
    found["two trainers, quit E0"] = replace(TWO_TRAINERS, faults=("quit E0",))
    found["two ranks, replays"] = RANKS_REPLAYED
    found["two ranks, pause T"] = RANKS_PAUSE_T
    for fault in ("crash T", "crash T1", "crash E0", "step T1", "quit T1"):
        found[f"two ranks, two engines, {fault}"] = replace(RANKS, faults=(fault,))
    found["two ranks, two engines, drift T1"] = replace(RANKS, faults=("drift T1",), copies=True)
    for party in ("T", "T1", "E0"):
        faults = (f"pause {party}", "silence")
        found[f"two ranks, two engines, pause {party}"] = replace(RANKS, faults=faults)
    again = (Refit(given=False), Train({"a": 2.0}), Refit(options={"delta": True}, given=False))
    found["two ranks, counted"] = Scenario(again, ("pause T1", "quit T"), ranks=True)
    return found


FULL = _full()
