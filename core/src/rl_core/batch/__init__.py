"""Batches of rows: sharding, microbatches, sequence packing, padding."""

from rl_core.batch.data_dict import BatchedDataDict, SlicedDataDict
from rl_core.batch.microbatches import DynamicBatchingArgs, SequencePackingArgs, plan_microbatches
from rl_core.batch.packing import pack
from rl_core.batch.padding import verify_right_padding
from rl_core.batch.training import Completion, completions, training_batch

__all__ = [
    "BatchedDataDict",
    "Completion",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
    "completions",
    "pack",
    "plan_microbatches",
    "training_batch",
    "verify_right_padding",
]
