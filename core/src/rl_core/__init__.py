"""Contracts, batches, weight refits and plugin discovery for RL post-training.

Every public name is here and is imported when it is first used, so that ``import rl_core`` costs
next to nothing: no torch, no engine.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_core.backends import GenerationBackend, PolicyBackend
    from rl_core.batch import (
        BatchedDataDict,
        SlicedDataDict,
        training_batch,
        verify_right_padding,
    )
    from rl_core.checks import (
        test_generation_consistency,
        test_max_model_len_respected,
        validate_log_probability_consistency,
    )
    from rl_core.create import create_generation, create_policy
    from rl_core.errors import (
        AmbiguousBackendError,
        BackendNotFoundError,
        BrokenPluginError,
        CapabilityError,
        CheckpointError,
        ConfigError,
        DataError,
        DeadlineError,
        IncompatiblePluginError,
        LifecycleError,
        LoopWarning,
        ManifestMismatchError,
        MissingEngineError,
        MissingKeyError,
        PluginError,
        RefitAborted,
        RefitCorrupted,
        RefitError,
        RefitPeerError,
        RefitProtocolError,
        RemoteError,
        RLError,
        TrainingError,
        WeightsTornError,
        WorkerDiedError,
        WorkerError,
    )
    from rl_core.futures import wait
    from rl_core.interfaces import (
        ColocatablePolicyInterface,
        ColocationConfig,
        Future,
        GenerationConfig,
        GenerationDatumSpec,
        GenerationInterface,
        GenerationOutputSpec,
        LogprobOutputSpec,
        LogprobsSpec,
        LossFunction,
        LossInputType,
        LossType,
        PolicyConfig,
        PolicyInterface,
        ReferenceLogprobOutputSpec,
        ResourcesConfig,
        ScoreOutputSpec,
        TensorSpec,
        TopkLogitsOutputSpec,
        TrainingDatumSpec,
        WeightSink,
        WeightSource,
        WorkerContext,
    )
    from rl_core.plugins.manifest import BackendManifest, Capability, EngineRequirement
    from rl_core.refit import refit

__all__ = [
    "__version__",
    "AmbiguousBackendError",
    "BackendManifest",
    "BackendNotFoundError",
    "BatchedDataDict",
    "BrokenPluginError",
    "Capability",
    "CapabilityError",
    "CheckpointError",
    "ColocatablePolicyInterface",
    "ColocationConfig",
    "ConfigError",
    "DataError",
    "DeadlineError",
    "EngineRequirement",
    "Future",
    "GenerationBackend",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "IncompatiblePluginError",
    "LifecycleError",
    "LogprobOutputSpec",
    "LogprobsSpec",
    "LoopWarning",
    "LossFunction",
    "LossInputType",
    "LossType",
    "ManifestMismatchError",
    "MissingEngineError",
    "MissingKeyError",
    "PluginError",
    "PolicyBackend",
    "PolicyConfig",
    "PolicyInterface",
    "RLError",
    "ReferenceLogprobOutputSpec",
    "RefitAborted",
    "RefitCorrupted",
    "RefitError",
    "RefitPeerError",
    "RefitProtocolError",
    "RemoteError",
    "ResourcesConfig",
    "ScoreOutputSpec",
    "SlicedDataDict",
    "TensorSpec",
    "TopkLogitsOutputSpec",
    "TrainingDatumSpec",
    "TrainingError",
    "WeightSink",
    "WeightSource",
    "WeightsTornError",
    "WorkerContext",
    "WorkerDiedError",
    "WorkerError",
    "create_generation",
    "create_policy",
    "refit",
    "test_generation_consistency",
    "test_max_model_len_respected",
    "training_batch",
    "validate_log_probability_consistency",
    "verify_right_padding",
    "wait",
]

#: Where names are that cost something to import; all others are in the two light modules.
_HOME = {
    "BatchedDataDict": "rl_core.batch",
    "SlicedDataDict": "rl_core.batch",
    "training_batch": "rl_core.batch",
    "verify_right_padding": "rl_core.batch",
    "wait": "rl_core.futures",
    "BackendManifest": "rl_core.plugins.manifest",
    "Capability": "rl_core.plugins.manifest",
    "EngineRequirement": "rl_core.plugins.manifest",
    "GenerationBackend": "rl_core.backends",
    "PolicyBackend": "rl_core.backends",
    "create_generation": "rl_core.create",
    "create_policy": "rl_core.create",
    "test_generation_consistency": "rl_core.checks",
    "test_max_model_len_respected": "rl_core.checks",
    "validate_log_probability_consistency": "rl_core.checks",
}
_LIGHT = ("rl_core.errors", "rl_core.interfaces")

#: Version of the installed distribution.
__version__: str


def __getattr__(name: str) -> Any:
    if name == "refit":
        return importlib.import_module("rl_core.refit")  # the package can be called
    if name == "__version__":
        from importlib.metadata import version

        globals()[name] = version("rl-core")
        return globals()[name]
    if name == "RayVirtualCluster":  # whose error says where it is
        return getattr(importlib.import_module("rl_core.cluster"), name)
    homes = () if name not in __all__ else (_HOME[name],) if name in _HOME else _LIGHT
    for home in homes:
        module = importlib.import_module(home)
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AttributeError(f"module 'rl_core' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
