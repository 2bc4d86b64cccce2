"""Runs checks, once each, and returns their outcomes. All three entrances use it."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rl_conformance.calls import calls_made, forget_calls
from rl_conformance.context import Context, Workshop
from rl_conformance.deadline import NoVerdict, TookTooLong, deadline
from rl_conformance.expect import CheckFailed, NotRun
from rl_conformance.leftovers import adopting_orphans
from rl_conformance.outcome import Outcome, Status, labelled
from rl_conformance.quiet import no_progress_bars
from rl_conformance.registry import refusal_for
from rl_conformance.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_conformance.registry import Check, Function
    from rl_conformance.target import Target
    from rl_core.plugins.manifest import Capability, Kind

__all__ = ["Harness"]

#: Seconds in which all shared backends must shut down.
_DISCARD_S = 120.0
#: By device, a factor on the deadlines of checks: engines take longer to start on a GPU.
_PATIENCE = {"cpu": 1.0, "cuda": 3.0}
#: The commands that bring optional modules, to be run in a checkout.
_INSTALLED_BY = {
    "rl_hosting": "pip install ./plugins/rl-backends ./plugins/rl-hosting",
    "rl_ray": "pip install ./plugins/rl-backends ./plugins/rl-hosting ./plugins/rl-ray",
}


class Harness:
    """Runs the checks of one backend.

    Args:
        target: The backend under test.
        settings: Where it runs.
        known: Reasons of known failures, by check id.
    """

    def __init__(
        self,
        target: Target,
        settings: Settings | None = None,
        known: Mapping[str, str] | None = None,
    ) -> None:
        self.target = target
        self.settings = settings or Settings()
        self.workshop = Workshop(target, self.settings)
        self.known = dict(known or {})
        self._outcomes: dict[str, Outcome] = {}
        self._adopting = ExitStack()
        self._adopting.enter_context(adopting_orphans())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Shuts everything down and removes every file."""
        with self._adopting:
            self.workshop.close()

    def outcome(self, check: Check) -> Outcome:
        """The result of a check, which runs once."""
        if check.id not in self._outcomes:
            self._outcomes[check.id] = self._run(check)
        return self._outcomes[check.id]

    def _run(self, check: Check) -> Outcome:
        started = time.perf_counter()
        if (excuse := self._excuse(check)) is not None:
            reason, excused = excuse
            return Outcome(check.id, check.title, Status.NOT_RUN, message=reason, excused=excused)
        run = [self.target.name, *self.settings.options()]
        context = Context(self.workshop, self.outcome)
        before = self.workshop.built.copy()
        function, passed = self._function(check)
        status, message, excused = self._attempt(context, check, function, passed)
        built = self.workshop.built - before
        if listed := self.known.get(check.id):
            if status in (Status.FAILED, Status.ERROR):
                status, message = Status.KNOWN_FAILURE, f"{listed}: {message}"
            elif status is not Status.NOT_RUN:
                result = "passes" if status is Status.PASSED else f"is {status}"
                status = Status.UNEXPECTED_PASS
                message = f"it {result} and is listed as failing: {listed}; take the entry out"
        return Outcome(
            check.id,
            check.title,
            status,
            time.perf_counter() - started,
            message,
            tuple(context.measures),
            excused,
            tuple(context.figures),
            check.where,
            shlex.join(["rl", "conformance", "run", *run, "-k", check.id]),
            built["generation"],
            built["policy"],
        )

    def _attempt(
        self, context: Context, check: Check, function: Function, passed: Status
    ) -> tuple[Status, str, bool]:
        """Status, message, and whether a check that did not run is excused."""
        did = ""
        forget_calls()
        try:
            usual = check.timeout_s * _PATIENCE[self.settings.device]
            with deadline(self.settings.timeout_s or usual), no_progress_bars():
                try:
                    check(context) if function is check.function else function(context)
                except BaseException:
                    did = calls_made()  # before what is closed adds to it
                    raise
                finally:
                    context.close()
        except NotRun as skipped:
            return Status.NOT_RUN, str(skipped), skipped.excused
        except CheckFailed as failure:
            about = f"{failure.what}: " if failure.did and failure.what else ""
            did, expected = failure.did or failure.what, f"{about}{failure.expected}"
            text = self._explained(failure, did, expected, failure.got, failure.__cause__)
            return self._discarding(Status.FAILED, text)
        except TookTooLong as late:
            advice = (
                "the backend hangs there, or this host is slow; --timeout SECONDS sets the limit"
            )
            stacks = [traceback.extract_stack(each) for each in sys._current_frames().values()]
            running = [_place(own) for stack in stacks if (own := self._own(stack))]
            at = f"\nthe backend's threads are at {'; '.join(running)}" if running else ""
            text = f"{late}\n{advice}\ncalls made: {did}{at}"
            return self._discarding(Status.ERROR, text)
        except NoVerdict as error:
            meanwhile = f"\nraised meanwhile: {error.__context__}" if error.__context__ else ""
            return self._discarding(Status.ERROR, f"{error}\ncalls made: {did}{meanwhile}")
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a backend may call sys.exit or pytest.skip: no verdict
            what, got = did or calls_made(), f"{type(error).__name__}: {error}"
            text = self._explained(error, what, "no exception", got, error)
            trace = labelled(traceback=traceback.format_exc(limit=-8))
            return self._discarding(Status.ERROR, f"{text}\n{trace}")
        if passed is Status.PASSED:
            return passed, "", False
        capability = self._capability(check)
        declared = f": {capability.reason}" if capability and capability.reason else ""
        return passed, f"declared, and refused before anything was touched{declared}", False

    def _explained(
        self,
        error: BaseException,
        did: str,
        expected: str,
        got: str,
        cause: BaseException | None,
    ) -> str:
        """What was done, what was expected and got, and where in the backend the cause is."""
        if not did:
            frames = traceback.extract_tb(error.__traceback__)
            lines = [at.line for at in frames if Path(at.filename).parent.name == "checks"]
            did = (lines or [""])[-1] or "the check itself"
        found: list[traceback.FrameSummary] = []
        while cause is not None:
            found = [*traceback.extract_tb(cause.__traceback__), *found]
            cause = cause.__cause__ or cause.__context__
        at = _place(self._own(found) or found)
        return labelled(did=did, expected=expected, got=got, raised_at=at)

    def _own(self, frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
        """Those in the backend's package."""
        factories = self.target.manifest.factories.values()
        packages = {factory.partition(":")[0].partition(".")[0] for factory in factories}
        return [at for at in frames if packages & set(Path(at.filename).parts)]

    def _discarding(self, status: Status, message: str) -> tuple[Status, str, bool]:
        """The result of a check after which no backend is used again."""
        try:
            with deadline(_DISCARD_S):
                self.workshop.discard()
        except Exception:
            ended = traceback.format_exc(limit=-8)
            return Status.ERROR, f"{message}\nand then a shutdown failed:\n{ended}", False
        return status, message, False

    # -- what applies ------------------------------------------------------------------------------

    def _excuse(self, check: Check) -> tuple[str, bool] | None:
        """Why the check does not run, and whether the run is complete without it."""
        manifest, device = self.target.manifest, self.settings.device
        gpus = _gpus() if device == "cuda" else 0
        if device == "cuda" and not gpus:
            return "this machine has no CUDA device", False
        if device not in manifest.devices:
            return f"the backend does not run on {device}", False
        if check.device not in ("any", device):
            return f"this check is for {check.device} only", True
        if lacking := [
            kind
            for kind in check.needs
            if kind not in ("core", "pair", *self.target.manifest.kinds)
        ]:
            return f"the backend offers no {lacking[0]}", True
        capability = self._capability(check)
        if check.capability is not None and capability is None:
            return f"the backend does not offer the kind that can have {check.capability}", True
        offered = capability is not None and capability.level in ("full", "versioned")
        if capability is not None and offered and device not in capability.devices:
            return (
                f"the backend declares {check.capability} for {', '.join(capability.devices)} only",
                True,
            )
        if device == "cuda" and gpus < check.gpus:
            return f"it needs {check.gpus} GPUs, and this machine has {gpus}", True
        if absent := [name for name in check.modules if not importlib.util.find_spec(name)]:
            how = f": {_INSTALLED_BY[absent[0]]}" if absent[0] in _INSTALLED_BY else ""
            return f"{absent[0]} is not installed{how}", False
        return None

    def _capability(self, check: Check) -> Capability | None:
        kind = self._capability_kind(check)
        if kind is None or check.capability is None:
            return None
        return self.target.manifest.capabilities[kind][check.capability]

    def _capability_kind(self, check: Check) -> Kind | None:
        """The kind of backend that has the capability of the check, if the target offers it."""
        kinds: tuple[Kind, ...] = ("generation", "policy")
        for kind in sorted(kinds, key=lambda k: k not in check.needs):
            if check.capability in self.target.manifest.capabilities.get(kind, {}):
                return kind
        return None

    def _function(self, check: Check) -> tuple[Function, Status]:
        """What to run, and the status that follows when it succeeds."""
        capability = self._capability(check)
        if capability is None or capability.level == "full" or self._in_range(capability):
            return check.function, Status.PASSED
        kind = self._capability_kind(check)
        assert kind is not None
        assert check.capability is not None
        refused = refusal_for(kind, check.capability)
        lacking = capability.level == "not_implemented"
        return refused, Status.NOT_IMPLEMENTED if lacking else Status.UNSUPPORTED

    def _in_range(self, capability: Capability) -> bool:
        from packaging.specifiers import SpecifierSet

        from rl_core.plugins.discovery import engine_version

        if capability.level != "versioned":
            return False
        engine = engine_version(self.target.manifest.engine)
        return engine is not None and SpecifierSet(capability.engine).contains(
            engine[1], prereleases=True
        )


def _place(frames: list[traceback.FrameSummary]) -> str:
    """File and line of the last frame, "" if there is none."""
    return "".join(f"{at.filename}:{at.lineno}, in {at.name}: {at.line}" for at in frames[-1:])


def _gpus() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
