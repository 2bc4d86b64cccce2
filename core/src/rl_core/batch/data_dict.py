"""The batch that crosses every interface."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Generic, Self, TypeAlias, TypeVar, overload

import torch

from rl_core.batch._columns import (
    common_size,
    concatenate,
    described,
    index_of,
    own_memory,
    permutation_inverse,
    take_rows,
)
from rl_core.batch._gather import gather_batches
from rl_core.batch.microbatches import PlanScope, plan_shards, planner
from rl_core.batch.provenance import Provenance
from rl_core.config import as_int, nearest
from rl_core.errors import ConfigError, DataError, LifecycleError, MissingKeyError

if TYPE_CHECKING:
    import torch.distributed as dist

    from rl_core.batch.microbatches import DynamicBatchingArgs, SequencePackingArgs

__all__ = ["BatchedDataDict", "SlicedDataDict"]

DictT = TypeVar("DictT", bound=Mapping[str, Any])
Rows: TypeAlias = "Sequence[int] | torch.Tensor"


class BatchedDataDict(UserDict[str, Any], Generic[DictT]):
    """A dict of columns: tensors whose dim 0 is the batch, and lists with an item per row.

    Dim 1 of a tensor with two or more dims is the sequence. A value of None is carried along. The
    type argument is a TypedDict that names the columns to expect; it is not checked here. Numbers
    of rows, shards and the like are whole; every method raises ConfigError for others.
    ``batch["key"]`` is a column; ``batch[3]``, ``batch[:8]`` and ``batch[mask]`` are batches of
    those rows. It is a dict: ``len(batch)`` counts columns, ``batch.size`` rows.

    Attributes:
        micro_batch_indices: Of a shard with planned microbatches: for each global batch the
            ``[start, end)`` row pairs, counted from the shard's first row of that global batch.
        micro_batch_lengths: For each global batch the width of each microbatch (dynamic batching)
            or its packed tokens (sequence packing).
        elem_counts_per_gb: For each global batch the number of its rows in this shard.
        provenance: How the rows were generated, where that is known; not sent to other processes.
    """

    micro_batch_indices: list[list[list[int]]] | None = None
    micro_batch_lengths: list[list[int]] | None = None
    elem_counts_per_gb: list[int] | None = None
    provenance: Provenance | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Left out is what typing adds to instances of a subscripted class: it may not import where
        # the batch is read. Views are copied, or all of their storage would travel.
        state = {name: value for name, value in vars(self).items() if name in _STATE}
        state["data"] = {key: own_memory(value) for key, value in self.data.items()}
        return state

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key in self.data:
                return self.data[key]
            text = f"the batch has no column {key!r}; it has {', '.join(self.data) or 'none'}"
            near = nearest(key, self.data)
            raise MissingKeyError(text, fix=f"write {near!r}" if near else "add it", key=key)
        if isinstance(key, slice):
            return self.select_indices(range(self.size)[key])
        whole = isinstance(key, int) and not isinstance(key, bool)
        return self.select_indices([key + self.size if key < 0 else key] if whole else key)

    def __repr__(self) -> str:  # the values are in dict(batch)
        return f"{type(self).__name__}({described(self.data)})"

    # -- size ----------------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """Number of rows; 0 without columns.

        Raises:
            DataError: Columns disagree, or a value is neither a tensor with a dim 0 nor a list.
        """
        return common_size(self.data)

    def get_dict(self) -> dict[str, Any]:
        """The plain dict behind this one, not a copy."""
        return self.data

    # -- rows ----------------------------------------------------------------------------------

    def slice(self, start: int, end: int) -> SlicedDataDict:
        """Rows ``start`` to ``end`` (exclusive); tensors are views.

        Raises:
            DataError: Not ``0 <= start <= end <= size``.
        """
        if not 0 <= as_int("start", start) <= as_int("end", end) <= self.size:
            raise DataError(
                f"there are no rows {start} to {end}: the number of rows is {self.size}",
                fix=f"use 0 <= start <= end <= {self.size}",
            )
        return self._map(lambda value: value[start:end], SlicedDataDict())

    def select_indices(self, indices: Rows) -> Self:
        """The given rows in the given order, copied. Rows may repeat.

        Args:
            indices: Integers in ``[0, size)``, or a bool tensor ``[size]``.

        Raises:
            DataError: An index is outside the batch.
        """
        rows = index_of(indices, self.size)
        return self._map(lambda value: take_rows(value, rows), type(self)())

    def reorder_data(self, reordered_indices: Rows) -> None:
        """Sends row i to place ``reordered_indices[i]``, in place; drops planned microbatches.

        With the order that :meth:`shard_by_batch_size` returns, this undoes the sharding of
        ``from_batches(shards)``.

        Raises:
            DataError: The indices are not a permutation of the rows.
        """
        rows = permutation_inverse(reordered_indices, self.size)
        self.data = self._map(lambda value: take_rows(value, rows), type(self)()).data
        self.micro_batch_indices = self.micro_batch_lengths = self.elem_counts_per_gb = None

    def chunk(self, rank: int, chunks: int) -> SlicedDataDict:
        """The ``rank``-th of ``chunks`` equal runs of rows, copied.

        Raises:
            DataError: The rows do not divide, or there is no such rank.
        """
        if not 0 <= as_int("rank", rank) < as_int("chunks", chunks):
            raise DataError(f"there is no chunk {rank} of {chunks}", fix="use 0 <= rank < chunks")
        rows = plan_shards(self.size, chunks, self.size)[rank]
        return self._map(lambda value: take_rows(value, rows), SlicedDataDict())

    def repeat_interleave(self, num_repeats: int) -> Self:
        """Every row ``num_repeats`` times in a row; list items are deep copies."""
        num_repeats = as_int("num_repeats", num_repeats)
        if num_repeats < 0:
            raise DataError(f"num_repeats is {num_repeats}", fix="use num_repeats >= 0")

        def repeat(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                return value.repeat_interleave(num_repeats, dim=0)
            return [deepcopy(item) for item in value for _ in range(num_repeats)]

        _ = self.size
        return self._map(repeat, type(self)())

    def truncate_tensors(self, dim: int, truncated_len: int) -> None:
        """Narrows every tensor that has ``dim`` to ``truncated_len`` entries or fewer, in place.

        Raises:
            DataError: ``dim`` is the batch, or the length is negative.
        """
        dim, truncated_len = as_int("dim", dim), as_int("truncated_len", truncated_len)
        if dim < 1 or truncated_len < 0:
            raise DataError(
                f"cannot truncate dim {dim} to {truncated_len}",
                fix="use dim >= 1 and truncated_len >= 0; to leave out rows, use slice",
            )
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor) and value.dim() > dim:
                self.data[key] = value.narrow(dim, 0, min(truncated_len, value.shape[dim]))

    def to(self, device: str | torch.device) -> Self:
        """Moves the tensors to a device, in place, and returns the batch."""
        for key, value in self.data.items():
            if isinstance(value, torch.Tensor):
                self.data[key] = value.to(device)
        return self

    # -- several batches -----------------------------------------------------------------------

    @classmethod
    def from_batches(
        cls, batches: Iterable[Mapping[str, Any]], pad_value_dict: Mapping[str, float] | None = None
    ) -> Self:
        """Puts batches below one another.

        Lists and 1-D tensors are concatenated; wider tensors are right-padded on dim 1 to the
        longest. Microbatch plans are not carried over.

        Args:
            batches: Batches with the same keys; those without rows may lack some.
            pad_value_dict: Value that pads a key, 0 for the others.

        Raises:
            MissingKeyError: A batch with rows lacks a key that another has (also a KeyError).
            DataError: A key's values differ in kind, dtype or trailing shape, the columns of one
                batch disagree on its rows, or a pad value is none of its key's dtype.
        """
        pads: Any = {} if pad_value_dict is None else pad_value_dict
        if not isinstance(pads, Mapping) or not hasattr(batches, "__iter__"):
            raise DataError(
                "from_batches takes a list of batches, and pad_value_dict as a mapping",
                fix='such as from_batches([batch, other], pad_value_dict={"input_ids": 0})',
            )
        batches = list(batches)
        sizes = [common_size(batch) for batch in batches]
        keys = dict.fromkeys(key for batch in batches for key in batch)
        merged = cls()
        for key in keys:
            parts: list[Any] = []
            for number, batch in enumerate(batches):
                if key in batch:
                    parts.append(batch[key])
                elif sizes[number]:
                    raise MissingKeyError(
                        f"batch {number} has no key {key!r}, which other batches have",
                        fix="give every batch the same keys",
                        key=key,
                        batch=number,
                    )
            merged[key] = concatenate(key, parts, pads.get(key, 0))
        merged.provenance = Provenance.common(getattr(b, "provenance", None) for b in batches)
        return merged

    def all_gather(self, group: dist.ProcessGroup | None = None) -> Self:
        """The batches of all ranks of a group (or the default one) below one another, in order.

        Ranks may hold different numbers of rows and different widths (padded with 0). Nothing is
        pickled; waiting ends with the group's timeout.

        Raises:
            DataError: A list holds what cannot travel, see :mod:`rl_core.batch._gather`.
        """
        _ = self.size
        tensors = [value for value in self.data.values() if isinstance(value, torch.Tensor)]
        gathered = self.from_batches(gather_batches(self.data, group))
        return gathered.to(tensors[0].device) if tensors else gathered

    # -- shards --------------------------------------------------------------------------------

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: None = None,
        sequence_packing_args: None = None,
        *,
        group_size: int = 1,
    ) -> list[SlicedDataDict]: ...

    @overload
    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        *,
        group_size: int = 1,
    ) -> tuple[list[SlicedDataDict], list[int]]: ...

    def shard_by_batch_size(
        self,
        shards: int,
        batch_size: int | None = None,
        allow_uneven_shards: bool = False,
        dynamic_batching_args: DynamicBatchingArgs | None = None,
        sequence_packing_args: SequencePackingArgs | None = None,
        *,
        group_size: int = 1,
    ) -> list[SlicedDataDict] | tuple[list[SlicedDataDict], list[int]]:
        """Deals the rows to shards; every row is copied to exactly one.

        The batch is first cut into global batches of ``batch_size`` rows; each shard then holds
        its part of the first global batch, of the second, and so on. With ``batch_size=2`` and two
        shards, rows ``[0 1 2 3]`` become ``[0 2]`` and ``[1 3]``.

        Args:
            shards: Number of shards.
            batch_size: Rows of a global batch; None takes all rows as one.
            allow_uneven_shards: Let shards differ by a row; needs ``batch_size=None``.
            dynamic_batching_args: Also plan microbatches of rows of similar length.
            sequence_packing_args: Also plan microbatches of rows laid end to end; shards then
                hold equal numbers of microbatches and differ in rows.
            group_size: So many neighbouring rows stay together.

        Returns:
            The shards. With dynamic batching or packing also ``order``: row j of all shards below
            one another is row ``order[j]`` of this batch.

        Raises:
            ConfigError: Arguments are wrong or exclude each other.
            DataError: Numbers do not divide, or a row exceeds the bound of a microbatch.
        """
        size, shards = self.size, as_int("shards", shards, 1)
        if batch_size is None:
            batch_size = size
        elif allow_uneven_shards:
            raise ConfigError(
                "batch_size and allow_uneven_shards exclude each other",
                fix="leave batch_size out; the shards then cut the whole batch",
                key="batch_size",
            )
        elif size % as_int("batch_size", batch_size, 1):
            raise DataError(
                f"batch_size {batch_size} does not divide the number of rows {size}",
                fix="use a batch_size that divides the number of rows",
            )
        if dynamic_batching_args is None and sequence_packing_args is None:
            uneven = allow_uneven_shards
            parts = plan_shards(size, shards, batch_size, uneven=uneven, group_size=group_size)
            return [self._shard(rows) for rows in parts]
        plan, options = planner(dynamic_batching_args, sequence_packing_args)
        lengths = self._column(options.get("input_lengths_key", "input_lengths"))
        width = self._column(options.get("input_key", "input_ids"), 2).shape[1]
        plans = [
            plan(
                lengths[start : start + batch_size],
                options,
                PlanScope(start, group_size, shards, width),
            )
            for start in range(0, size, max(batch_size, 1))
        ]
        result, order = [], []
        for chunks in zip(*plans, strict=True) if plans else [()] * shards:
            rows = [part.rows for chunk in chunks for part in chunk]
            ends = [list(accumulate(len(part.rows) for part in chunk)) for chunk in chunks]
            order.append(torch.cat(rows) if rows else torch.arange(0))
            shard = self._shard(order[-1])
            shard.micro_batch_indices = [[list(p) for p in pairwise([0, *to])] for to in ends]
            shard.micro_batch_lengths = [[part.length for part in chunk] for chunk in chunks]
            shard.elem_counts_per_gb = [to[-1] for to in ends]
            result.append(shard)
        return result, torch.cat(order).tolist()

    def get_batch(self, batch_idx: int, batch_size: int | None = None) -> SlicedDataDict:
        """This shard's rows of one global batch, with its planned microbatches.

        Raises:
            DataError: There is no such batch, or no plan and no ``batch_size``.
        """
        batch_idx, counts = as_int("batch_idx", batch_idx), self.elem_counts_per_gb
        if counts is None:
            if batch_size is None:
                raise DataError(
                    "get_batch needs batch_size if the batch has no planned microbatches",
                    fix="give batch_size, or shard with dynamic batching or sequence packing",
                )
            start = batch_idx * as_int("batch_size", batch_size, 1)
            return self.slice(start, start + batch_size)
        if not 0 <= batch_idx < len(counts):
            raise DataError(f"there is no batch {batch_idx} of {len(counts)}", fix="count from 0")
        start = sum(counts[:batch_idx])
        batch = self.slice(start, start + counts[batch_idx])
        assert self.micro_batch_indices is not None
        assert self.micro_batch_lengths is not None
        batch.micro_batch_indices = [self.micro_batch_indices[batch_idx]]
        batch.micro_batch_lengths = [self.micro_batch_lengths[batch_idx]]
        batch.elem_counts_per_gb = [counts[batch_idx]]
        return batch

    # -- microbatches --------------------------------------------------------------------------

    def make_microbatch_iterator(self, microbatch_size: int) -> Iterator[SlicedDataDict]:
        """Runs of ``microbatch_size`` rows.

        Raises:
            DataError: The rows are no multiple of it.
        """
        count = self.get_microbatch_iterator_len(microbatch_size)
        return (self.slice(i * microbatch_size, (i + 1) * microbatch_size) for i in range(count))

    def get_microbatch_iterator_len(self, microbatch_size: int) -> int:
        """Number of microbatches of :meth:`make_microbatch_iterator`; raises as that does."""
        if as_int("microbatch_size", microbatch_size) < 1 or self.size % microbatch_size:
            raise DataError(
                f"microbatch_size {microbatch_size} does not divide the number of rows {self.size}",
                fix="use a microbatch_size that divides the number of rows",
            )
        return self.size // microbatch_size

    def make_microbatch_iterator_with_dynamic_shapes(
        self, sequence_dim: int = 1
    ) -> Iterator[SlicedDataDict]:
        """The planned microbatches of one global batch, ``sequence_dim`` cut to their widths.

        Raises:
            LifecycleError: The rows were not sharded with a plan, or hold several global batches.
        """

        def narrowed(start: int, end: int, length: int) -> SlicedDataDict:
            microbatch = self.slice(start, end)
            microbatch.truncate_tensors(sequence_dim, length)
            return microbatch

        indices, lengths = self._plan()
        planned = zip(indices, lengths, strict=True)
        return (narrowed(start, end, length) for (start, end), length in planned)

    def get_microbatch_iterator_dynamic_shapes_len(self) -> int:
        """Number of planned microbatches."""
        return len(self._plan()[0])

    def make_microbatch_iterator_for_packable_sequences(self) -> Iterator[SlicedDataDict]:
        """The rows of each planned bin, padded as in the batch.

        Raises:
            LifecycleError: The rows were not sharded with a plan, or hold several global batches.
        """
        return (self.slice(start, end) for start, end in self._plan()[0])

    def get_microbatch_iterator_for_packable_sequences_len(self) -> tuple[int, int]:
        """Number of planned bins, and the tokens in the fullest."""
        indices, lengths = self._plan()
        return len(indices), max(lengths, default=0)

    # -- inner parts ---------------------------------------------------------------------------

    def _plan(self) -> tuple[list[list[int]], list[int]]:
        indices, lengths = self.micro_batch_indices, self.micro_batch_lengths
        if indices is None or lengths is None or len(indices) != 1:
            found = "no plan" if indices is None else f"plans for {len(indices)} global batches"
            raise LifecycleError(
                f"this call needs a batch with one plan of microbatches; this batch has {found}",
                fix="shard with dynamic batching or sequence packing, then take get_batch(i)",
            )
        return indices[0], lengths[0]

    def _column(self, key: str, dims: int = 1) -> torch.Tensor:
        value = self.data.get(key)
        if not isinstance(value, torch.Tensor) or value.dim() < dims:
            raise MissingKeyError(
                f"the microbatch plan needs a tensor {key!r} of {dims} or more dims",
                fix="add it, or name another with input_key and input_lengths_key",
                key=key,
            )
        return value

    def _shard(self, rows: torch.Tensor) -> SlicedDataDict:
        return self._map(lambda value: take_rows(value, rows), SlicedDataDict())

    def _map(self, function: Callable[[Any], Any], into: BatchT) -> BatchT:
        for key, value in self.data.items():
            into.data[key] = None if value is None else function(value)
        into.provenance = self.provenance
        return into


_STATE = frozenset({"data", "micro_batch_indices", "micro_batch_lengths", "elem_counts_per_gb"})
BatchT = TypeVar("BatchT", bound=BatchedDataDict[Any])


class SlicedDataDict(BatchedDataDict[Any]):
    """A part of a larger batch: a slice, or a shard that may carry planned microbatches."""


# torch.load(weights_only=True) reads batches: they hold nothing but tensors and plain values, of
# which b"" is stored as a call of its class.
torch.serialization.add_safe_globals([BatchedDataDict, SlicedDataDict, bytes])
