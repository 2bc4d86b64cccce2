"""Batches of rows: sharding, microbatches, sequence packing, padding."""

from rl_core.batch.microbatches import (
    DynamicBatchingArgs,
    Microbatch,
    SequencePackingArgs,
    plan_microbatches,
)
from rl_core.batch.packing import PackingMetrics, pack, packing_metrics

__all__ = [
    "DynamicBatchingArgs",
    "Microbatch",
    "PackingMetrics",
    "SequencePackingArgs",
    "pack",
    "packing_metrics",
    "plan_microbatches",
]
