"""The contract and nothing else: abstract classes and TypedDicts, no logic, no heavy imports."""

from rl_core.interfaces.generation import GenerationInterface
from rl_core.interfaces.loop import AxisSizes, Timer
from rl_core.interfaces.loss import LossFunction, LossInputType, LossType
from rl_core.interfaces.policy import ColocatablePolicyInterface, PolicyInterface
from rl_core.interfaces.specs import (
    ColocationConfig,
    DynamicBatchingConfig,
    GenerationConfig,
    GenerationDatumSpec,
    GenerationOutputSpec,
    LogprobOutputSpec,
    LogprobsSpec,
    OptimizerConfig,
    PolicyConfig,
    ReferenceLogprobOutputSpec,
    ResourcesConfig,
    SchedulerConfig,
    ScoreOutputSpec,
    SequencePackingConfig,
    TopkLogitsOutputSpec,
    TrainingDatumSpec,
)
from rl_core.interfaces.weights import TensorSpec, WeightSink, WeightSource
from rl_core.interfaces.worker import Cluster, DataParallelRank, Future, WorkerContext

__all__ = [
    "AxisSizes",
    "Cluster",
    "ColocatablePolicyInterface",
    "ColocationConfig",
    "DataParallelRank",
    "DynamicBatchingConfig",
    "Future",
    "GenerationConfig",
    "GenerationDatumSpec",
    "GenerationInterface",
    "GenerationOutputSpec",
    "LogprobOutputSpec",
    "LogprobsSpec",
    "LossFunction",
    "LossInputType",
    "LossType",
    "OptimizerConfig",
    "PolicyConfig",
    "PolicyInterface",
    "ReferenceLogprobOutputSpec",
    "ResourcesConfig",
    "SchedulerConfig",
    "ScoreOutputSpec",
    "SequencePackingConfig",
    "TensorSpec",
    "Timer",
    "TopkLogitsOutputSpec",
    "TrainingDatumSpec",
    "WeightSink",
    "WeightSource",
    "WorkerContext",
]
