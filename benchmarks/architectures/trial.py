"""Tries architectures with a backend: starts a tiny model, refits it, and compares everything."""

from __future__ import annotations

import dataclasses
import math
import re
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil

from architectures.outcome import Difference, Run, Status, Trial
from architectures.table import ARCHITECTURES, make_architecture
from rl_conformance.deadline import TookTooLong, deadline
from rl_conformance.diagnostics.agreement import measure_log_probability_consistency
from rl_conformance.diagnostics.engine import random_prompts
from rl_conformance.environment import describe
from rl_conformance.expect import CheckFailed
from rl_conformance.settings import Settings
from rl_conformance.weights import engine_weights, policy_weights, same_weights
from rl_core.create import create_policy
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    ManifestMismatchError,
    RefitAborted,
    RLError,
)
from rl_core.weights import refit

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rl_conformance.target import Target
    from rl_core.interfaces import GenerationInterface, PolicyInterface

__all__ = ["DEADLINE_S", "try_architectures"]

#: Seconds for one architecture, the import of an engine included.
DEADLINE_S = 180.0
#: Seconds for engines to shut down, and for their processes to be gone.
_SHUTDOWN_S, _GONE_S = 60.0, 5.0
_SETTINGS = Settings("cpu", "float32")
_PROMPTS = (3, 1, 17, 8, 29, 12)
_NEW_TOKENS = 12
#: Ids of real tokens are below it, in tiny models.
_TOKENS = 269
#: What every engine has, so that it is kept while the others are tried; see :class:`_Bench`.
_FIRST = "llama"
#: Characters of a reason, and of a line that does not say much.
_LONGEST_REASON, _SHORT = 300, 150


def try_architectures(
    target: Target,
    names: Sequence[str],
    *,
    deadline_s: float = DEADLINE_S,
    on_start: Callable[[str], None] = lambda _: None,
    on_trial: Callable[[Trial], None] = lambda _: None,
) -> Run:
    """Tries architectures one after the other; whatever one of them does, the next one is tried.

    Args:
        target: The backend.
        names: Of architectures.
        deadline_s: Seconds for each of them.
        on_start: Told of each architecture that begins.
        on_trial: Told what came of it.
    """
    started = time.perf_counter()
    trials = []
    with _Bench(target, deadline_s) as bench:
        for name in sorted(names, key=lambda each: each != _FIRST):
            on_start(name)
            trials.append(bench.try_one(name))
            on_trial(trials[-1])
    seconds = round(time.perf_counter() - started, 1)
    environment = {**describe(target, _SETTINGS), "transformers": metadata.version("transformers")}
    return Run(target.name, environment, tuple(trials), seconds)


@dataclass(slots=True)
class _Attempt:
    """How far the trial of an architecture has come.

    Attributes:
        name: Of the architecture.
        directory: For its checkpoints.
        doing: In which an error would be raised now.
        otherwise: The status if that error says nothing of its own.
        before: See :class:`Trial`.
        after: See :class:`Trial`.
        engine: Once it runs.
    """

    name: str
    directory: Path
    doing: str = ""
    otherwise: Status = Status.NO_TRAINER
    before: Difference | None = None
    after: Difference | None = None
    engine: Any = None


class _Bench:
    """Runs trials of one backend, and cleans up after each.

    The first engine that took its refit stays until the end: backends may have what every engine
    imports in a process that is there as long as one of them is, and the others start faster.
    """

    def __init__(self, target: Target, deadline_s: float) -> None:
        self._target = target
        self._deadline_s = deadline_s
        self._kept: Any = None
        self._processes = _children()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._kept is not None:
            self._kept.shutdown()

    def try_one(self, name: str) -> Trial:
        """What comes of an architecture."""
        started = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="rl-architecture-") as directory:
            attempt, ending = _Attempt(name, Path(directory)), ExitStack()
            try:
                with deadline(self._deadline_s):
                    status, reason = self._attempt(attempt, ending)
            except KeyboardInterrupt:
                ending.close()
                raise
            except BaseException as error:  # a backend may call sys.exit
                status, reason = _status_of(error, attempt), _reason_of(error, attempt)
                if isinstance(error, TookTooLong):  # what hangs would not shut down either
                    _end(_children() - self._processes)
            if status is Status.EXACT and self._kept is None:
                self._kept = attempt.engine
                ending.callback(self._remember_processes)
            elif attempt.engine is not None:
                ending.callback(attempt.engine.shutdown)
            try:
                with deadline(_SHUTDOWN_S):
                    ending.close()
            except Exception as error:
                ended = f"a shutdown failed: {_first_sentence(error)}"
                reason = f"{reason}; {ended}" if reason else ended
                status = Status.FAILS if status is Status.EXACT else status
            _end(_wait_for(_children() - self._processes))
        seconds = round(time.perf_counter() - started, 1)
        return Trial(name, status, reason, seconds, attempt.before, attempt.after)

    def _attempt(self, attempt: _Attempt, ending: ExitStack) -> tuple[Status, str]:
        """Status and reason, if nobody objects."""
        prompts = random_prompts(_TOKENS, _PROMPTS)
        dtype = ARCHITECTURES[attempt.name].get("dtype", _SETTINGS.dtype)
        settings = dataclasses.replace(_SETTINGS, dtype=dtype)
        attempt.doing = "making the model"
        paths = []
        for seed in (0, 1):
            directory = attempt.directory / f"{attempt.name.replace(' ', '_')}-{seed}"
            paths.append(str(make_architecture(directory, attempt.name, seed=seed)))
        attempt.doing = "running the model with transformers"
        policies = []
        for path in paths:
            config = {"backend": "hf", "model_name": path, "torch_dtype": settings.dtype}
            policies.append(policy := create_policy(config))
            ending.callback(policy.shutdown)
            policy.get_logprobs(prompts)
        loaded, trained = policies

        attempt.doing, attempt.otherwise = "starting the engine", Status.NOT_STARTED
        small = self._target.base_config("generation", settings)
        engine = attempt.engine = self._target.make_generation(
            {**small, "model_name": paths[0], "max_new_tokens": _NEW_TOKENS}
        )
        engine.prepare_for_generation()
        attempt.doing = "generating for the first time"
        engine.generate(prompts, greedy=True)

        attempt.doing, attempt.otherwise = "generating", Status.FAILS
        attempt.before = _difference(loaded, engine, prompts)
        attempt.doing = "the refit"
        refit(trained, engine, verify="installed", deadline_s=self._deadline_s / 2)
        attempt.doing = "generating after the refit"
        attempt.after = _difference(trained, engine, prompts)
        attempt.doing = "reading the weights back"
        installed, wanted = engine_weights(engine), policy_weights(trained)
        try:  # without those of which the engine keeps only what its own hook made of them
            same_weights(
                installed, {name: wanted[name] for name in wanted if name in installed}, "a refit"
            )
        except CheckFailed as failure:
            return Status.WRONG, str(failure)
        return self._judge(attempt.before, attempt.after, dtype)

    def _judge(self, before: Difference, after: Difference, dtype: str) -> tuple[Status, str]:
        """Compares with the tolerance that the backend declares."""
        mean, largest = self._target.manifest.tolerances[dtype]
        good = [
            d.mean is not None and d.max is not None and d.mean <= mean and d.max <= largest
            for d in (before, after)
        ]
        if all(good):
            return Status.EXACT, ""
        if not any(good):
            return Status.WRONG, (
                "with the same checkpoint, before any refit, the engine's log-probs differ from "
                f"transformers': {before}; after a refit that brought every bit, {after}"
            )
        if good[0]:
            return Status.WRONG, (
                f"log-probs agree before the refit, and after it they differ, although every bit "
                f"arrived: {after}"
            )
        return Status.WRONG, f"log-probs differ before the refit, and agree after it: {before}"

    def _remember_processes(self) -> None:
        """From now on they are no leftovers."""
        self._processes |= _children()


def _difference(policy: PolicyInterface, engine: GenerationInterface, prompts: Any) -> Difference:
    found = measure_log_probability_consistency(policy, engine, prompts)
    modes = [mode for mode in (found.greedy, found.sampled) if mode is not None]
    worst = [
        max((getattr(mode, which) for mode in modes), key=lambda n: (math.isnan(n), n))
        for which in ("mean", "max")
    ]
    mean, largest = (n if math.isfinite(n) else None for n in worst)
    return Difference(mean, largest, sum(mode.tokens for mode in modes))


def _status_of(error: BaseException, attempt: _Attempt) -> Status:
    if attempt.otherwise is Status.NO_TRAINER:
        return Status.NO_TRAINER
    if isinstance(error, CapabilityError):
        return Status.REFUSED
    told = (ManifestMismatchError, ConfigError, RefitAborted)
    if attempt.doing == "the refit" and isinstance(error, told):
        return Status.REFUSED
    return attempt.otherwise


def _reason_of(error: BaseException, attempt: _Attempt) -> str:
    kind = "" if isinstance(error, RLError | CheckFailed) else f"{type(error).__name__}: "
    said = f"{kind}{_first_sentence(error)}".replace(f"{attempt.directory}/", "")
    return said if isinstance(error, CapabilityError) else f"{attempt.doing}: {said}"


def _first_sentence(error: BaseException) -> str:
    """Of what an error says, without the process it comes from.

    A short first line does not say much: then the second one follows.
    """
    text = error.message if isinstance(error, RLError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["without a word"]
    first = re.sub(r"^\w+ in [^:]+ \(pid \d+\): ", "", lines[0])
    first = re.split(r"(?<=[^.\d\s])\. (?=[A-Z])", first)[0].rstrip(".")
    if len(lines) > 1 and len(first) < _SHORT:
        first = f"{first} {lines[1]}"
    if len(first) <= _LONGEST_REASON:
        return first
    return f"{first[:_LONGEST_REASON].rpartition(' ')[0]} ..."  # whole words


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _wait_for(processes: set[psutil.Process]) -> set[psutil.Process]:
    """Those that have not ended after a moment."""
    return set(psutil.wait_procs(processes, timeout=_GONE_S)[1])


def _end(processes: set[psutil.Process]) -> None:
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:  # it has ended by itself
            continue
    psutil.wait_procs(processes, timeout=_GONE_S)
