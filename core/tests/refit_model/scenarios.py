"""What is explored: small products of scripts, options and faults."""

from __future__ import annotations

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
POSED = Scenario((Refit(named=False), Refit(named=False)), ("pose",))
LATE = Scenario((Refit(), Refit()), ("pause T",))
LATE_NAMELESS = Scenario((Refit(named=False), Refit(named=False)), ("pause T",))
CRASHED = Scenario((Refit(), Refit()), ("crash E0", "crash T", "quit E0", "quit T"))
