"""What is explored: small products of scripts, options and faults."""

from __future__ import annotations

from refit_model.world import Refit, Scenario, Train

ONE, TWO = {"a": 1.0, "b": 1.0}, {"a": 2.0, "b": 2.0}
DIRECT, STAGED, DELTA = {"mode": "direct"}, {"isolation": "staged"}, {"delta": True}
PACKED = {"mode": "packed"}
BOTH = ("E0", "E1")

#: Weights come back to what they were while an engine that was asked to load them is stopped.
STALE_DIRECT = Scenario(
    (Refit(options=DIRECT), Train(TWO), Train(ONE), Refit(options=DIRECT | DELTA)),
    ("pause E0",),
)
STALE_PACKED = Scenario(
    (
        Refit(BOTH, PACKED),
        Train(TWO),
        Refit(("E1",), PACKED),
        Train(ONE),
        Refit(BOTH, PACKED | DELTA),
    ),
    ("pause E0",),
)
DROPPED = Scenario((Refit(), Refit(options=STAGED)), ("drop E0", "crash T"), most=2)
DROPPED_DELTA = Scenario((Refit(), Refit(options=STAGED | DELTA)), ("drop E0",))
LOADED_DELTA = Scenario((Refit(), Refit(options=STAGED | DELTA)), ("load E0",))
REPLAYED = Scenario((Refit(), Train(TWO), Refit()), ("play",))
LATE = Scenario((Refit(), Refit()), ("pause T",))
