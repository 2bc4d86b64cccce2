"""Results of trying architectures with a backend. Imports nothing heavy."""

from __future__ import annotations

import enum

import msgspec

__all__ = ["Difference", "Run", "Status", "Trial"]


class Status(enum.StrEnum):
    """The result of one architecture with one backend."""

    #: A refit brought the trainer's weights, bit for bit, and its log-probs.
    EXACT = "exact"
    #: The backend refused refits of this model, with the reason.
    REFUSED = "refused"
    #: The engine does not have the model, or not on this machine.
    NOT_STARTED = "does not start"
    #: No side reported an error, but weights or log-probs differ from the trainer's.
    WRONG = "wrong"
    #: The engine died, hung or raised something unforeseen after it had started.
    FAILS = "fails"
    #: The trainer cannot make the model, or cannot run it.
    NO_TRAINER = "trainer cannot"

    @property
    def bad(self) -> bool:
        """Whether it makes the run fail."""
        return self in (Status.WRONG, Status.FAILS)


class Difference(msgspec.Struct, frozen=True):
    """Of an engine's log-probs of generated tokens from the trainer's.

    Attributes:
        mean: Of the absolute differences, greedy or sampled, whichever is larger; not a number is
            written as null.
        max: The largest.
        tokens: How many were compared.
    """

    mean: float | None
    max: float | None
    tokens: int

    def __str__(self) -> str:
        mean, largest = ("no number" if n is None else f"{n:.2g}" for n in (self.mean, self.max))
        return f"{mean} on average and {largest} at most over {self.tokens} tokens"


class Trial(msgspec.Struct, frozen=True):
    """One architecture with one backend.

    Attributes:
        architecture: Its name.
        status: What came of it.
        reason: Why it is not exact; "" if it is.
        seconds: How long it took.
        before: How the log-probs differed when both had loaded the same checkpoint.
        after: How they differed after the refit.
    """

    architecture: str
    status: Status
    reason: str = ""
    seconds: float = 0.0
    before: Difference | None = None
    after: Difference | None = None


class Run(msgspec.Struct, frozen=True):
    """Architectures that were tried with one backend.

    Attributes:
        backend: Its name.
        environment: Versions, device and time.
        trials: In the order in which they ran.
        seconds: Wall time.
    """

    backend: str
    environment: dict[str, str | int | float | bool | None]
    trials: tuple[Trial, ...]
    seconds: float

    @property
    def engine(self) -> str:
        """The backend's engine and its version."""
        return str(self.environment.get("engine", "not installed"))

    def problems(self, known: Run | None = None) -> list[str]:
        """What makes the run fail, in words.

        Args:
            known: An older run of the backend. What was wrong or failed there may do so again, and
                what was exact there must be exact.
        """
        before = {trial.architecture: trial.status for trial in known.trials} if known else {}
        found = []
        for trial in self.trials:
            was = before.get(trial.architecture)
            worse = was is Status.EXACT and trial.status is not Status.EXACT
            if worse or (trial.status.bad and trial.status is not was):
                said = f"{self.backend}: {trial.architecture}: {trial.status}: {trial.reason}"
                found.append(f"{said} (it was exact)" if worse else said)
        if all(trial.status is not Status.EXACT for trial in self.trials):
            found.append(f"{self.backend}: nothing is exact")
        return found

    def counts(self) -> dict[Status, int]:
        """How many architectures have each status."""
        statuses = [trial.status for trial in self.trials]
        return {status: statuses.count(status) for status in Status if status in statuses}
