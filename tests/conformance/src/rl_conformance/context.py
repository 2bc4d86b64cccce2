"""What a check is given: backends, models, the oracle, prompts, and a place for measures."""

from __future__ import annotations

import json
import math
import re
import tempfile
import warnings
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rl_conformance.calls import made_with, noted, watch_calls
from rl_conformance.expect import NotRun, fail, same
from rl_conformance.figures import Histogram
from rl_conformance.models import FAMILIES, make_tiny_model
from rl_conformance.outcome import Measure
from rl_core.errors import CapabilityError, ConfigError, LoopWarning

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from rl_conformance.continuations import Continuation
    from rl_conformance.figures import Figure
    from rl_conformance.oracle import Oracle
    from rl_conformance.outcome import Outcome
    from rl_conformance.registry import Check
    from rl_conformance.settings import Settings
    from rl_conformance.target import Target
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface
    from rl_core.plugins.manifest import BackendManifest

__all__ = ["Context", "Workshop"]

#: Of the weights with which :func:`~rl_conformance.refits.unequal_engine` begins: far from the
#: versions that the refits of a check have.
_FIRST_VERSION = 1000

#: Backends kept for the next check with the same configuration, of each kind.
_KEPT = 3


class Workshop:
    """What the checks of a run share: checkpoints, oracles and running backends.

    Args:
        target: The backend under test.
        settings: Where it runs.
    """

    def __init__(self, target: Target, settings: Settings) -> None:
        self.target = target
        self.settings = settings
        self._scratch = tempfile.TemporaryDirectory(prefix="rl-conformance-")
        self._oracles: dict[Path, Oracle] = {}
        self._certain: dict[tuple[Any, ...], list[Continuation]] = {}
        self._computed: dict[str, Any] = {}
        self._shared: dict[str, dict[str, Any]] = {}
        self._asked_for: Counter[tuple[str, str]] = Counter()
        #: Keys of shared backends that the check that runs has asked for.
        self.in_use: set[str] = set()
        #: How many backends of each kind were built.
        self.built: Counter[str] = Counter()
        self._watched = ExitStack()
        #: Whether the check that runs has a client of the server that the run was given.
        self.serves = False

    def directory(self) -> Path:
        """A new directory that is removed with the workshop."""
        return Path(tempfile.mkdtemp(dir=self._scratch.name))

    def model(self, family: str = "qwen2", **overrides: Any) -> Path:
        """A tiny checkpoint of a family, or the model the run was given."""
        if self.settings.model is not None and not overrides:
            return Path(self.settings.model)
        key = "-".join([family, *(f"{k}={v}" for k, v in sorted(overrides.items()))])
        # Engines look for weights with a glob, to which brackets in a path are no brackets.
        path = Path(self._scratch.name, "models", re.sub(r"[^\w=.-]+", "_", key))
        return path if path.exists() else make_tiny_model(path, family, **overrides)

    def oracle(self, path: Path) -> Oracle:
        """The oracle of a checkpoint, its weights rounded to the dtype of the run."""
        from rl_conformance.oracle import Oracle

        if path not in self._oracles:
            self._oracles[path] = Oracle(path, self.settings.dtype)
        return self._oracles[path]

    def certain(
        self, path: Path, lengths: tuple[int, ...], steps: int, lead: float
    ) -> list[Continuation]:
        """Prompts with a continuation that is certain; searched once, which takes a while."""
        from rl_conformance.continuations import find_certain

        key = path, lengths, steps, lead
        if key not in self._certain:
            oracle = self.oracle(path)
            self._certain[key] = find_certain(oracle, lengths, steps=steps, lead=lead)
        return self._certain[key]

    def once(self, name: str, compute: Callable[[], Any]) -> Any:
        """What several checks compare with, computed by the first of them. Leave it as it is."""
        if name not in self._computed:
            self._computed[name] = compute()
        return self._computed[name]

    def build(self, kind: str, dtype: str, config: dict[str, Any]) -> Any:
        """A new backend of the target, or the suite's reference if it does not offer the kind."""
        self.built[kind] += 1
        own = kind not in self.target.manifest.kinds
        whole = {"model_name": str(self.model()), **config}
        if self.settings.url is not None and kind == "generation":
            return self._connect(dtype, config, whole)
        make: Callable[[dict[str, Any]], Any] = getattr(self.target, f"make_{kind}")
        if own:
            from rl_conformance.reference import make_reference

            make = partial(make_reference, kind)
            whole |= {"torch_dtype": dtype}
        else:
            whole = self.target.base_config(kind, self.settings, dtype) | whole
        with noted(None, f"create_{kind}", **config):
            backend = make(whole)
        made_with(backend, kind, config, own=own)
        watch_calls(backend, self._watched.enter_context)
        return backend

    def _connect(self, dtype: str, config: dict[str, Any], whole: dict[str, Any]) -> Any:
        """A new client of the server that the run was given, with the weights of a checkpoint.

        A refit brings these, as the server may have those of an earlier check.
        """
        from rl_conformance.reference import make_reference
        from rl_core import refit

        assert self.settings.model is not None
        if self.serves:
            raise NotRun("this check needs two engines, and --url gives one", excused=True)
        served, wanted = (
            Path(each, "config.json").read_text()
            for each in (self.settings.model, whole["model_name"])
        )
        if json.loads(served) != json.loads(wanted):
            raise NotRun(
                "this check needs a model with another config.json than the server's", excused=True
            )
        self.serves = True
        kept = self._shared.get("generation", {})
        while kept:
            kept.popitem()[1].shutdown()
        given = self.target.base_config("generation", self.settings, dtype) | whole
        try:
            with noted(None, "create_generation", **config):
                backend = self.target.make_generation(given | {"model_name": self.settings.model})
        except CapabilityError as error:
            raise NotRun(
                f"the server was started without what this check needs: {error}", excused=True
            ) from error
        policy = make_reference("policy", {"model_name": whole["model_name"], "torch_dtype": dtype})
        try:
            with warnings.catch_warnings():  # of the version that an earlier check left
                warnings.simplefilter("ignore", LoopWarning)
                refit(policy, backend)
        except BaseException:
            backend.shutdown()
            raise
        finally:
            policy.shutdown()
        made_with(backend, "generation", config, own=False)
        watch_calls(backend, self._watched.enter_context)
        return backend

    def share(self, kind: str, dtype: str, config: dict[str, Any]) -> Any:
        """A running backend with that configuration, kept for other checks."""
        key = repr((dtype, sorted(config.items())))
        self.serves |= kind == "generation" and key in self._shared.get(kind, {})
        return self.keep(kind, key, lambda: self.build(kind, dtype, config))

    def keep(self, kind: str, key: str, build: Callable[[], Any], most: int = _KEPT) -> Any:
        """What is built for the first check that needs it; of a kind, so many are kept.

        What was asked for the least often makes room, unless the check that runs uses it.
        """
        kept = self._shared.setdefault(kind, {})
        self._asked_for[kind, key] += 1
        self.in_use.add(key)
        if key not in kept:
            while len(kept) >= most and (idle := kept.keys() - self.in_use):
                rarest = min(sorted(idle), key=lambda each: self._asked_for[kind, each])
                kept.pop(rarest).shutdown()
            kept[key] = build()
        return kept[key]

    def discard(self) -> None:
        """Shuts the shared backends down, so that what one check broke stays with it."""
        with ExitStack() as ending:  # one that fails keeps none of the others from it
            for kept in self._shared.values():
                while kept:
                    ending.callback(_shut_down, kept.popitem()[1])

    def close(self) -> None:
        """Shuts everything down and removes every file."""
        try:
            self.discard()
        finally:
            self._watched.close()
            self._scratch.cleanup()


def _shut_down(backend: Any) -> None:
    """A backend that ends the program instead of itself would make a run green."""
    try:
        backend.shutdown()
    except SystemExit as error:
        raise RuntimeError("shutdown called sys.exit") from error


@dataclass(slots=True)
class Context:
    """Handed to one check.

    Attributes:
        workshop: What the checks of the run share.
        outcome_of: What came of another check, which is run if it was not yet.
        measures: What the check measured.
        figures: What it recorded for the plots of the report.
    """

    workshop: Workshop
    outcome_of: Callable[[Check], Outcome]
    measures: list[Measure] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    _exit: ExitStack = field(default_factory=ExitStack)

    @property
    def manifest(self) -> BackendManifest:
        """What the backend under test declares."""
        return self.workshop.target.manifest

    @property
    def target(self) -> Target:
        """The backend under test."""
        return self.workshop.target

    @property
    def settings(self) -> Settings:
        """Where the run takes place."""
        return self.workshop.settings

    # -- backends --------------------------------------------------------------------------------

    @property
    def first_version(self) -> int:
        """Of the weights with which :func:`~rl_conformance.refits.unequal_engine` begins."""
        return _FIRST_VERSION

    def generation(self, *, dtype: str | None = None, **config: Any) -> GenerationInterface:
        """A generation backend that is awake. Shared: leave it as it was."""
        config = {"max_new_tokens": 8, **config}
        backend: GenerationInterface = self.workshop.share(
            "generation", dtype or self.settings.dtype, config
        )
        backend.prepare_for_generation()
        return backend

    def refit_generation(self, **config: Any) -> GenerationInterface:
        """A generation backend that is awake, for checks that begin with a refit of all weights.

        Shared: its version and its weights are those that the check before left it with, whose
        trainer was another.
        """
        self._exit.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".* had version", LoopWarning)
        config = {"model_name": str(self.model("qwen2", seed=0)), "max_new_tokens": 4, **config}
        return self.generation(**config)

    def policy(self, *, dtype: str | None = None, **config: Any) -> ColocatablePolicyInterface:
        """A policy that is ready to score. Shared: do not train it."""
        backend: ColocatablePolicyInterface = self.workshop.share(
            "policy", dtype or self.settings.dtype, config
        )
        backend.prepare_for_lp_inference()
        return backend

    def fresh_generation(self, *, dtype: str | None = None, **config: Any) -> GenerationInterface:
        """A new generation backend, asleep, for this check alone."""
        config = {"max_new_tokens": 8, **config}
        backend = self.workshop.build("generation", dtype or self.settings.dtype, config)
        self._exit.callback(backend.shutdown)
        return backend  # type: ignore[no-any-return]

    def fresh_policy(
        self, *, dtype: str | None = None, **config: Any
    ) -> ColocatablePolicyInterface:
        """A new policy for this check alone; it trains with a fixed seed and a plain optimizer."""
        from rl_conformance.training import training_config

        config = training_config() | config
        backend = self.workshop.build("policy", dtype or self.settings.dtype, config)
        self._exit.callback(backend.shutdown)
        return backend  # type: ignore[no-any-return]

    def closing(self, resource: Any) -> Any:
        """Closes a resource (``shutdown`` or ``close``) when the check ends."""
        self._exit.callback(getattr(resource, "shutdown", None) or resource.close)
        return resource

    # -- material ----------------------------------------------------------------------------------

    def model(self, family: str = "qwen2", **overrides: Any) -> Path:
        """A tiny checkpoint of a family."""
        return self.workshop.model(family, **overrides)

    @contextmanager
    def refusable(self, family: str) -> Generator[None]:
        """Ends the check as not run, with the reason, if the backend refuses the family's models.

        Those of a family that is required fail it.
        """
        try:
            yield
        except (CapabilityError, ConfigError) as error:
            if FAMILIES[family].required:
                raise
            raise NotRun(f"{family} is refused: {error}", excused=True) from error

    def large_model(self, nbytes: int) -> Path:
        """A checkpoint of at least so many bytes in the run's dtype, to measure memory with.

        Its layers and heads have usual sizes, and two ranks can share the layers.
        """
        import torch

        width, itemsize = 1024, getattr(torch, self.settings.dtype).itemsize
        heads = {"num_attention_heads": width // 128, "num_key_value_heads": width // 256}
        layers = 2 + 2 * (nbytes // (18 * width**2 * itemsize))
        return self.model("qwen2", hidden_size=width, num_layers=layers, **heads)

    def oracle(self, path: Path | None = None) -> Oracle:
        """The reference of a checkpoint in float32 arithmetic, by default of the main model."""
        return self.workshop.oracle(path or self.workshop.model())

    def directory(self) -> Path:
        """A new, empty directory."""
        return self.workshop.directory()

    def prompts(self, *lengths: int, seed: int = 0, **extra: Any) -> BatchedDataDict[Any]:
        """Right-padded prompts of random ordinary tokens, one for each length."""
        from rl_conformance.batches import random_prompts

        return random_prompts(lengths, seed=seed, **extra)

    def batch(self, rows: Sequence[Sequence[int]], **extra: Any) -> BatchedDataDict[Any]:
        """Right-padded prompts of the given tokens."""
        from rl_conformance.batches import pad_rows

        return pad_rows(rows, self.oracle().pad_token_id, **extra)

    def certain(
        self, *lengths: int, steps: int = 4, path: Path | None = None
    ) -> list[Continuation]:
        """A prompt for each length with a continuation that the dtype's rounding cannot change."""
        return self.workshop.certain(path or self.workshop.model(), lengths, steps, self.lead)

    @property
    def lead(self) -> float:
        """How far a log-prob is above another if no two errors within tolerance reorder them.

        In float32 more than that, so that a token that differs shows more than a small error.
        """
        return max(2 * self.tolerance[1], 0.1)

    @property
    def tolerance(self) -> tuple[float, float]:
        """Declared largest ``(mean, max)`` log-prob error of the run's dtype."""
        return self.tolerance_of(self.settings.dtype)

    def tolerance_of(self, dtype: str) -> tuple[float, float]:
        """Declared largest ``(mean, max)`` log-prob error of a dtype."""
        if dtype not in self.manifest.tolerances:
            mine = dtype == self.settings.dtype
            raise NotRun(f"the manifest declares no tolerance for {dtype}", excused=not mine)
        return self.manifest.tolerances[dtype]

    # -- verdicts ------------------------------------------------------------------------------

    def measure(
        self, name: str, value: float, tolerance: float, unit: str = "", detail: str = ""
    ) -> None:
        """Records a figure, and fails the check if it is above its tolerance or not a number.

        Args:
            name: What was measured.
            value: The figure.
            tolerance: The most that it may be.
            unit: Of both.
            detail: What the message of a failure has besides the value.
        """
        self.measures.append(Measure(name, float(value), float(tolerance), unit))
        if math.isnan(value) or value > tolerance:
            found = f"{value:.6g} {unit}".rstrip() + (f": {detail}" if detail else "")
            fail(name, f"at most {tolerance:g} {unit}".rstrip(), found)

    def measure_near(
        self, name: str, got: Any, expected: Any, tolerance: float, of: float = 1.0
    ) -> None:
        """Records how far a number is from what it should be, as a share of ``of``."""
        ours, theirs = float(got), float(expected)
        detail = f"{ours:.6g}, not {theirs:.6g}"
        self.measure(name, abs(ours - theirs) / of, tolerance, detail=detail)

    def measure_error(
        self,
        got: Any,
        expected: Any,
        dtype: str | None = None,
        *,
        scale: float = 1.0,
        rounding: float = 1.0,
    ) -> None:
        """Compares log-probs by mean and maximum of the absolute difference.

        Args:
            got: From the backend.
            expected: What it should be.
            dtype: Whose declared tolerance holds, if not that of the run's.
            scale: Factor on it: 2 between two implementations that may both be off, and the
                reciprocal of a temperature, which divides errors of logits as it does logits.
            rounding: Another factor for dtypes below float32: how much further than in a few short
                rows of a plain model rounding may go here, where rows are long, or logits extreme.
        """
        dtype = dtype or self.settings.dtype
        scale *= 1.0 if dtype == "float32" else rounding
        mean, largest = (bound * scale for bound in self.tolerance_of(dtype))
        same(list(got.shape), list(expected.shape), "shape of what is compared")
        if not got.numel():
            fail("what is compared", "at least one value", "none")
        difference = (got.double() - expected.double()).abs()
        at = int(difference.argmax())
        ours, theirs = (float(each.reshape(-1)[at]) for each in (got, expected))
        detail = f"the worst of {got.numel()} values, number {at}, is {ours:.6g}, not {theirs:.6g}"
        self.measure("mean_abs_error", float(difference.mean()), mean, detail=detail)
        self.measure("max_abs_error", float(difference.max()), largest, detail=detail)

    def record(self, figure: Figure) -> None:
        """Keeps a figure for the plots of the report. It does not change the verdict."""
        self.figures.append(figure)

    def record_errors(
        self, title: str, name: str, got: Any, expected: Any, tolerance: float | None = None
    ) -> None:
        """Keeps the distribution of the absolute differences of log-probs."""
        if got.shape == expected.shape:  # else there is none, and measure_error fails
            distances = (got.double() - expected.double()).abs().flatten().tolist()
            self.record(Histogram.of(title, name, distances, tolerance=tolerance, unit="nats"))

    def not_run(self, reason: str, *, excused: bool = False) -> NoReturn:
        """Ends the check as not run."""
        raise NotRun(reason, excused=excused)

    def close(self) -> None:
        """Shuts down what belongs to this check alone."""
        self._exit.close()
        self.workshop.serves = False
        self.workshop.in_use.clear()
