"""NeMo RL's batch, by the methods and arguments that rl-core's has not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from rl_core.batch import BatchedDataDict as CoreBatch

if TYPE_CHECKING:
    import torch

__all__ = ["BatchedDataDict"]

DictT = TypeVar("DictT", bound=Mapping[str, Any])
#: What they count as data of images, although it is a column as any other.
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")


class BatchedDataDict(CoreBatch[DictT]):
    """For loops of your own that were written for NeMo RL's batch.

    A ``PackedTensor``, which holds images or sound, raises a DataError that names the column.
    Slices and shards are rl-core's, and so is the batch in another process.
    """

    def get_multimodal_dict(
        self, as_tensors: bool = False, device: Any = None, pixel_dtype: Any = None
    ) -> dict[str, Any]:
        """The columns of token types; there are no images, so the arguments change nothing."""
        del as_tensors, device, pixel_dtype
        _ = self.size  # raises for a PackedTensor
        return {key: self[key] for key in _TOKEN_TYPES if key in self}

    @classmethod
    def from_batches(
        cls,
        batches: Iterable[Mapping[str, Any]],
        pad_value_dict: Mapping[str, float] | None = None,
        *,
        allow_missing_packed_tensors: bool = False,
    ) -> Self:
        """As rl-core's; there are no packed tensors, so none can be missing."""
        del allow_missing_packed_tensors
        return super().from_batches(batches, pad_value_dict)

    def repeat_interleave(self, num_repeats: int, *, share_immutable_media: bool = False) -> Self:
        """As rl-core's; list items are copied, also where they could be shared."""
        del share_immutable_media
        return super().repeat_interleave(num_repeats)

    def reorder_data(self, reorded_indices: Sequence[int] | torch.Tensor) -> None:
        """As rl-core's."""
        super().reorder_data(reorded_indices)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # An engine in an environment of its own has no rl-nemo.
        reduced: Any = super().__reduce_ex__(protocol)
        return (CoreBatch, (), *reduced[2:])
