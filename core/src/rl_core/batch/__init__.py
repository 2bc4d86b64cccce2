"""Batches of rows: sharding, microbatches, sequence packing, padding."""

from rl_core.batch.data_dict import BatchedDataDict, SlicedDataDict
from rl_core.batch.microbatches import DynamicBatchingArgs, SequencePackingArgs, plan_microbatches
from rl_core.batch.packing import pack
from rl_core.batch.padding import verify_right_padding

__all__ = [
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
    "pack",
    "plan_microbatches",
    "verify_right_padding",
]
