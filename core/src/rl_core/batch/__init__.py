"""Batches of rows: sharding, microbatches, sequence packing, padding."""

from rl_core.batch.data_dict import BatchedDataDict, SlicedDataDict
from rl_core.batch.microbatches import DynamicBatchingArgs, SequencePackingArgs
from rl_core.batch.packing import pack
from rl_core.batch.padding import verify_right_padding

__all__ = [
    "BatchedDataDict",
    "DynamicBatchingArgs",
    "SequencePackingArgs",
    "SlicedDataDict",
    "pack",
    "verify_right_padding",
]
