"""Mutants of what is declared, of what compares a pair, and of what keeps others out."""

from __future__ import annotations

import runpy
import tempfile
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from msgspec import structs

from mutants.engines import SamplesAreDealtInRounds
from mutants.mutant import Mutant, breaks, registered, target
from rl_conformance.checks import a01_agreement as agreement
from rl_conformance.reference import MANIFEST, make_reference, reference_target
from rl_conformance.reference.generation import ReferenceGeneration
from rl_core.errors import DataError, RLError
from rl_core.weights.data import manifest as manifests
from rl_core.weights.receiving import receiver

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from rl_backends import Completion, PromptBatch, SamplingParams
    from rl_conformance.target import Target


def _without_a_capability() -> Target:
    generation = dict(MANIFEST.capabilities["generation"])
    del generation["staged"]
    capabilities = {**MANIFEST.capabilities, "generation": generation}
    return reference_target(manifest=replace(MANIFEST, capabilities=capabilities))


def _careless_of_keys() -> Target:
    known = reference_target().config_keys

    def make(kind: str, config: Mapping[str, Any]) -> Any:
        return make_reference(kind, {k: v for k, v in config.items() if k in known[kind]})

    return reference_target(
        make_generation=lambda config: make("generation", config),
        make_policy=lambda config: make("policy", config),
    )


registered += [
    Mutant(
        "ACapabilityIsNotMentioned",
        "The manifest is silent about one capability.",
        ("D2",),
        _without_a_capability,
        checks="D2",
        module=__name__,
    ),
    Mutant(
        "ATolerancePassesAnything",
        "The manifest declares how far log-probs may be off, and is generous.",
        ("D2",),
        lambda: reference_target(manifest=replace(MANIFEST, tolerances={"float32": (1.0, 9.0)})),
        checks="D2",
        module=__name__,
    ),
    Mutant(
        "ACapabilityIsClaimed",
        "A capability is declared as full, and is wrong.",
        ("D3", "G17"),
        lambda: target(SamplesAreDealtInRounds),
        checks="D3 or G17",
        module=__name__,
    ),
    Mutant(
        "UnknownKeysAreIgnored",
        "A misspelt key of the configuration does nothing.",
        ("D4",),
        _careless_of_keys,
        checks="D4",
        module=__name__,
    ),
]


@breaks("A1")
def an_empty_mask_passes() -> AbstractContextManager[Any]:
    """Nothing to compare counts as agreement."""
    name = "validate_log_probability_consistency"
    honest = getattr(agreement, name)

    def lenient(*args: Any, **kwargs: Any) -> Any:
        try:
            return honest(*args, **kwargs)
        except DataError:
            return True

    return mock.patch.object(agreement, name, lenient)


@breaks("A3", "A1", checks="A1 or A3")
class LogprobsAreOff(ReferenceGeneration):
    """The engine's log-probs are lower than the policy's, everywhere."""

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().complete(prompts, sampling):
            yield structs.replace(done, logprobs=[value - 0.3 for value in done.logprobs])


@breaks("R2")
def names_are_not_compared() -> AbstractContextManager[Any]:
    """What trainer and engine call their tensors is found out while they are written."""

    def lenient(*args: Any, **kwargs: Any) -> dict[str, str]:
        with suppress(RLError):
            return manifests.compare(*args, **kwargs)
        return {}

    return mock.patch.object(receiver, "compare", lenient)


@breaks("S2", checks="S2 and (private_directory or unguessable)")
def the_directory_is_everybodys() -> AbstractContextManager[Any]:
    """Whoever has an account may look into the socket's directory."""
    honest = tempfile.mkdtemp

    def make(*args: Any, **kwargs: Any) -> Any:
        path = honest(*args, **kwargs)
        Path(path).chmod(0o755)
        return path

    return mock.patch.object(tempfile, "mkdtemp", make)


@breaks("S1")
class AnyDescriptionWillDo(ReferenceGeneration):
    """Refit information that is none is taken without a word."""

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        with suppress(RLError):
            super().prepare_refit_info(state_dict_info)


@breaks("S3")
class CodeOfTheCheckpointRuns(ReferenceGeneration):
    """Python that comes with a checkpoint is run without being asked for."""

    def __init__(self, model_name: str, **config: Any) -> None:
        for path in Path(model_name).glob("*.py"):
            runpy.run_path(str(path))
        super().__init__(model_name, **config)
