"""Microbatches through megatron-core's schedules: rows in, per-token results out.

Attention is causal, so padding on the right never reaches a real token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossInputType
from rl_megatron.attention import AttentionRows
from rl_megatron.cpu import without_cuda
from rl_megatron.engine import get_forward_backward_func, parallel_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rl_megatron.parallel import ParallelState
    from rl_megatron.vocabulary import Vocabulary

__all__ = ["Forward", "Laid", "Results"]

Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Laid:
    """The rows of a microbatch as the model reads them: padded, or end to end in one row.

    Attributes:
        ids: ``[b, s]`` int64 on the model's device.
        positions: ``[b, s]`` int64.
        lengths: Of the sequences in the only row, padding last; None if rows are padded.
        sizes: ``[rows, width]`` of the microbatch.
        rows: ``[N]`` int64 row of every real token.
        columns: ``[N]`` int64 its place in that row.
        places: ``[N]`` int64 its place among all tokens of the model's output.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    lengths: list[int] | None
    sizes: tuple[int, int]
    rows: torch.Tensor
    columns: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, batch: BatchedDataDict[Any], device: torch.device, *, packed: bool, multiple: int
    ) -> Laid:
        """Lays rows out.

        Args:
            batch: ``input_ids`` and ``input_lengths``, on the CPU.
            device: Of the model.
            packed: End to end.
            multiple: The model's rows are as long as a multiple of it.
        """
        ids, lengths = batch["input_ids"], batch["input_lengths"]
        real = torch.arange(ids.shape[1]) < lengths[:, None]
        rows, columns = real.nonzero(as_tuple=True)
        width = len(rows) if packed else ids.shape[1]
        padded = -(-width // multiple) * multiple
        sizes: list[int] | None = None
        if packed:
            sizes = [*lengths.tolist(), *([padded - width] if padded > width else [])]
            laid = torch.zeros(1, padded, dtype=torch.int64)
            laid[0, :width] = ids[rows, columns]
            positions = torch.cat([torch.arange(size) for size in sizes])[None]
            places = torch.arange(width)
        else:
            laid = torch.zeros(len(ids), padded, dtype=torch.int64)
            laid[:, :width] = torch.where(real, ids, 0)
            positions = torch.arange(padded).expand(len(ids), -1)
            places = rows * padded + columns
        on = (tensor.to(device) for tensor in (laid, positions, rows, columns, places))
        ids_, positions_, rows_, columns_, places_ = on
        shape = (ids.shape[0], ids.shape[1])
        return cls(ids_, positions_, sizes, shape, rows_, columns_, places_)


class Forward:
    """Runs microbatches through this rank's part of a model, and the others'.

    Args:
        model: Wrapped for gradients.
        parallel: The ranks.
        vocabulary: Of the output.
        device: Of the model.
        temperature: Divides the logits.
        packed: Lay the rows of a microbatch end to end instead of padding them.
    """

    def __init__(
        self,
        model: Any,
        parallel: ParallelState,
        vocabulary: Vocabulary,
        device: torch.device,
        *,
        temperature: float,
        packed: bool,
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._vocabulary = vocabulary
        self._device = device
        self._temperature = temperature
        self._packed = packed
        self._config: Any = model.config
        self._multiple = parallel.sizes.tensor if self._config.sequence_parallel else 1

    # -- what is computed -------------------------------------------------------------------------

    def logprobs(self, logits: torch.Tensor, laid: Laid) -> torch.Tensor:
        """``[b, s]`` float32; entry t scores token t, entry 0 and padding are 0."""
        scored = laid.columns > 0
        index, columns = laid.rows[scored], laid.columns[scored]
        targets = laid.ids.flatten()[laid.places[scored]]
        values = self._vocabulary.logprobs(
            logits, laid.places[scored] - 1, targets, self._temperature
        )
        result = torch.zeros(laid.sizes, dtype=torch.float32, device=logits.device)
        return result.index_put((index, columns), values)

    def logits(self, logits: torch.Tensor, laid: Laid) -> torch.Tensor:
        """``[b, s, V]`` float32 with the temperature; padding is 0."""
        values = self._vocabulary.whole(logits[laid.places]).float() / self._temperature
        result = values.new_zeros(*laid.sizes, values.shape[-1])
        return result.index_put((laid.rows, laid.columns), values)

    def topk(self, k: int, logits: torch.Tensor, laid: Laid) -> Results:
        """``[b, s-1, k]`` float32 values, descending, and int64 indices; 0 at each row's end."""
        lengths = laid.rows.bincount(minlength=laid.sizes[0])
        predicts = laid.columns < lengths[laid.rows] - 1
        index, columns = laid.rows[predicts], laid.columns[predicts]
        top, chosen = self._vocabulary.topk(logits[laid.places[predicts]], k)
        shape = (laid.sizes[0], max(laid.sizes[1] - 1, 0), k)
        values = torch.zeros(shape, dtype=torch.float32, device=logits.device)
        indices = torch.zeros(shape, dtype=torch.int64, device=logits.device)
        values[index, columns] = top.float() / self._temperature
        indices[index, columns] = chosen
        return values, indices

    # -- how --------------------------------------------------------------------------------------

    def accumulate(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        share: Callable[[int, torch.Tensor], torch.Tensor],
        wanted: LossInputType,
        *,
        learn: bool,
        dropout: int | None,
    ) -> None:
        """See :meth:`PolicyModel.accumulate`, which has all but ``dropout``.

        What is dropped is drawn from ``dropout``, the same on all ranks of a copy of the model.
        """
        compute = self.logits if wanted is LossInputType.LOGIT else self.logprobs
        failed: list[Exception] = []

        def loss(number: int, laid: Laid, output: torch.Tensor) -> Any:
            nothing = output.flatten()[:0].sum()
            value = nothing
            if number < len(parts) and not failed:
                inputs = compute(self._rows(output), laid)
                try:
                    value = share(number, inputs)
                except Exception as error:  # other ranks wait for this one, which goes on first
                    failed.append(error)
            if not value.requires_grad:  # the schedule goes back through it whatever it is
                value = value + nothing
            return value, torch.zeros((), dtype=torch.int), None

        self._run(parts, loss, forward_only=not learn, dropout=dropout)
        if failed:
            raise failed[0]

    def over(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        compute: Callable[[torch.Tensor, Laid], Results],
        empty: Callable[[Laid], Results],
    ) -> list[Results]:
        """What is computed of the logits of each microbatch, on every rank of the copy.

        Args:
            parts: The microbatches.
            compute: From ``[M, V]`` logits of a microbatch.
            empty: Tensors of the same shapes, for ranks that have no logits.
        """

        def keep(number: int, laid: Laid, output: torch.Tensor, non_loss_data: bool = True) -> Any:
            del non_loss_data
            return compute(self._rows(output), laid) if number < len(parts) else None

        found = self._run(parts, keep, forward_only=True, collect_non_loss_data=True)
        results = []
        for number, part in enumerate(parts):
            tensors = found[number] if found else empty(self._laid(part))
            self._from_last_stage(tensors)
            results.append(tensors)
        return results

    def observe(self, parts: Sequence[BatchedDataDict[Any]], observer: Any) -> None:
        """Shows an observer the attention of every real token of this stage's layers."""

        def nothing(*_: Any, **__: Any) -> None:
            return None

        self._run(
            parts,
            nothing,
            forward_only=True,
            collect_non_loss_data=True,
            observer=observer,
            packed=True,
        )

    def _run(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        finish: Callable[..., Any],
        *,
        forward_only: bool,
        collect_non_loss_data: bool = False,
        dropout: int | None = None,
        observer: Any = None,
        packed: bool | None = None,
    ) -> list[Any]:
        """All microbatches through all stages; what ``finish`` made on the last one.

        Ranks that share experts run as many, so that some run rows that do not count.
        """
        count = len(parts)
        if self._parallel.sizes.expert > 1:
            count = max(self._parallel.ranks.gather(count))
        if not count:
            return []
        one = torch.ones(1, 1, dtype=torch.int64)
        empty = BatchedDataDict[Any]({"input_ids": one, "input_lengths": one[0]})
        padding = [empty] * (count - len(parts))
        numbered = iter(enumerate([*parts, *padding]))

        def step(data: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            number, part = next(data)
            laid = self._laid(part, packed=packed)

            def real(layer: int, *tensors: torch.Tensor) -> None:
                observer(layer, *(tensor[:, :, : len(laid.rows)] for tensor in tensors))

            rows = AttentionRows(
                positions=laid.positions.t(),
                lengths=laid.lengths,
                observer=real if observer is not None and number < len(parts) else None,
                dropout=None if dropout is None else hash((dropout, number)),
            )
            return self._outputs(laid.ids, rows, model), partial(finish, number, laid)

        options = {"forward_only": forward_only, "collect_non_loss_data": collect_non_loss_data}
        return self._schedule(step, numbered, count, **options)

    def next_logits(
        self, ids: torch.Tensor, rows: AttentionRows, keep: torch.Tensor | None
    ) -> torch.Tensor:
        """Logits of whole rows' next tokens, on every rank of the copy.

        Args:
            ids: ``[1, T]`` or ``[R, 1]`` int64.
            rows: What attention knows of them.
            keep: ``[n]`` int64 places among T; None: of all rows.

        Returns:
            ``[1, n, V]`` or ``[R, 1, V]``.
        """

        def whole(output: torch.Tensor, **_: Any) -> torch.Tensor:
            return self._vocabulary.whole(output).contiguous()

        def step(_: Any, model: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
            return self._outputs(ids, rows, model), whole

        module: Any = self._model.module
        hook = None
        if keep is not None and self._parallel.here.last:
            hook = module.output_layer.register_forward_pre_hook(
                lambda _, given: (given[0][keep], *given[1:])
            )
        try:
            found = self._schedule(step, None, 1, collect_non_loss_data=True)
        finally:
            if hook is not None:
                hook.remove()
        logits = found[0] if found else None
        if logits is None:
            shape = (len(ids), ids.shape[1] if keep is None else len(keep), self._vocabulary.size)
            logits = torch.empty(shape, dtype=self._config.params_dtype, device=self._device)
        self._from_last_stage([logits])
        return logits

    def _schedule(
        self, step: Callable[..., Any], data: Any, count: int, **options: Any
    ) -> list[Any]:
        """megatron-core's schedule for this pipeline."""
        with without_cuda(), self._parallel.ranks.collectives("a pass through the model"):
            found: list[Any] = get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=data,
                model=self._model,
                num_microbatches=count,
                # Not used: stages tell each other how large what they send is.
                seq_length=1,
                micro_batch_size=1,
                **{"forward_only": True, **options},
            )
        return found

    def _from_last_stage(self, tensors: Iterable[torch.Tensor]) -> None:
        """Brings what the last stage has to the others, in place."""
        if self._parallel.sizes.pipeline > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            group = parallel_state.get_pipeline_model_parallel_group()
            with self._parallel.ranks.collectives("sending what the last stage computed"):
                for tensor in tensors:
                    dist.broadcast(tensor, last, group=group)

    @staticmethod
    def _outputs(ids: torch.Tensor, rows: AttentionRows, model: Any) -> torch.Tensor:
        """``[b, s, V]`` logits of ``[b, s]`` ids; hidden states before the last stage."""
        model.module.rotary_pos_emb.positions = rows.positions
        output: torch.Tensor = model(
            ids, rows.positions.t(), None, extra_block_kwargs={"attention_bias": rows}
        )
        return output

    def _laid(self, part: BatchedDataDict[Any], *, packed: bool | None = None) -> Laid:
        packed = self._packed if packed is None else packed
        return Laid.of(part, self._device, packed=packed, multiple=self._multiple)

    @staticmethod
    def _rows(output: torch.Tensor) -> torch.Tensor:
        """``[M, V]`` of ``[b, s, V]``."""
        return output.flatten(0, 1)
