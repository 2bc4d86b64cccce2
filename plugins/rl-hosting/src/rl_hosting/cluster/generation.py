"""A generation backend whose replicas run in workers of a cluster."""

from __future__ import annotations

import asyncio
import time
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.generation.prompts import (
    CONSUMED_KEYS,
    PromptBatch,
    RowStreams,
    greedy_params,
    passthrough_columns,
    provenance_of,
    repeat_for_samples,
)
from rl_backends.generation.row_stream import RowStream
from rl_backends.generation.rows import SamplingParams
from rl_backends.inputs import as_batch, check_greedy
from rl_backends.spellings import TakesWeights
from rl_core.batch import BatchedDataDict
from rl_core.errors import DeadlineError, WeightsTornError
from rl_core.futures import as_concurrent
from rl_core.interfaces import GenerationInterface
from rl_hosting.cluster.remote import RemoteBackend, through
from rl_hosting.cluster.sharding import Loads, collect

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    from rl_backends.generation.rows import ModelFacts
    from rl_core.batch.provenance import Provenance
    from rl_core.interfaces import GenerationOutputSpec

__all__ = ["RemoteGeneration"]

#: Seconds for a refit to commit on all replicas, once it has on one, and between two looks.
_SETTLE_S, _PAUSE_S = 10.0, 0.02
#: How often a call that refits overtake begins anew.
_TRIES = 10


class RemoteGeneration(RemoteBackend, TakesWeights, GenerationInterface):
    """Replicas of one engine; behaves as the embedded backend does.

    Every row is sampled from its own stream, which is fixed before the rows are dealt out, so that
    a seed gives the same tokens with any number of replicas.
    """

    _kind = "generation"

    def _connect(self) -> None:
        self.cfg = self.config
        self.receiver_count = sum(self._group.attributes("receiver_count"))
        self.facts: ModelFacts = self._group.attributes("facts")[0]
        self.sampling = SamplingParams.from_config(self.config, self.facts)
        self._streams = RowStreams()
        self._loads = Loads(self._group.size)

    def _worker_config(self) -> dict[str, Any]:
        # Samples are multiplied here: a replica completes each of its rows once.
        return {key: value for key, value in self.config.items() if key != "num_generations"}

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationInterface.generate`."""
        call = self._accept(data, greedy, "generate")
        output = self._complete(call, torch.arange(call.prompts.size), greedy)
        for _ in range(_TRIES):
            weights = torch.stack([output["weights_version"], output["weights_origin"]], 1)
            if (weights == weights[:1]).all():
                break
            # A refit reached one replica before these rows, and another one after them.
            is_fresh = (weights == torch.tensor(self._settled_weights())).all(1)
            fresh, stale = is_fresh.nonzero().flatten(), (~is_fresh).nonzero().flatten()
            again = self._complete(call, stale, greedy)
            parts = [output.select_indices(fresh), again]
            output = collect(
                parts,
                torch.cat([fresh, stale]),
                call.prompts.size,
                output_ids=self.facts.pad_token_id,
            )
        output.update(call.extras)
        output.provenance = call.provenance
        return output

    def _complete(
        self, call: _Call, rows: torch.Tensor, greedy: bool
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Some rows of a call, in their order."""
        shards = self._assign(call, rows)
        results = []
        for rank, part in shards.items():
            shard = call.prompts.select_indices(rows[part])
            results.append(as_concurrent(self._group.submit_generate(rank, shard, greedy)))
            size = int(call.sizes[rows[part]].sum())
            results[-1].add_done_callback(partial(self._loads.release, rank, size))
        return collect(
            self._group.wait(results),
            torch.cat(list(shards.values())),
            len(rows),
            output_ids=self.facts.pad_token_id,
        )

    def _settled_weights(self) -> tuple[int, int]:
        """Version and origin of all replicas, once a refit that goes on has reached all of them.

        Raises:
            WeightsTornError: They go on to differ.
        """
        end = time.monotonic() + _SETTLE_S
        while True:
            weights = self._weights()
            if len(set(weights)) == 1 or time.monotonic() > end:
                return _same(weights)
            time.sleep(_PAUSE_S)

    def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationInterface.generate_async`.

        As with an embedded backend, prompts take their random streams when it is called.
        """
        return RowStream(self._stream(self._accept(data, greedy, "generate_async"), greedy))

    async def _stream(
        self, call: _Call, greedy: bool
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        stream_id = uuid.uuid4().hex
        shards = self._assign(call, torch.arange(call.prompts.size))
        streams = {
            rank: self._group.stream(rank, stream_id, call.prompts.select_indices(rows), greedy)
            for rank, rows in shards.items()
        }
        pending = {asyncio.create_task(_next(stream)): rank for rank, stream in streams.items()}
        left = {rank: int(call.sizes[rows].sum()) for rank, rows in shards.items()}
        try:
            while pending:
                done, _ = await asyncio.wait(
                    pending,
                    timeout=self._group.call_deadline_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    raise DeadlineError(
                        f"{self._group.name}: no row finished within "
                        f"{self._group.call_deadline_s:g} s",
                        fix="look at the workers' logs; for more time, pass call_deadline_s to "
                        "RemoteGeneration",
                        seconds=self._group.call_deadline_s,
                    )
                for task in done:
                    rank = pending.pop(task)
                    if (reference := task.result()) is None:
                        continue
                    pending[asyncio.create_task(_next(streams[rank]))] = rank
                    [(index, output)] = await asyncio.to_thread(self._group.wait, [reference])
                    row = int(shards[rank][index])
                    left[rank] -= int(call.sizes[row])
                    self._loads.release(rank, int(call.sizes[row]))
                    output.update(
                        {
                            key: None if value is None else value[row : row + 1]
                            for key, value in call.extras.items()
                        }
                    )
                    output.provenance = call.provenance
                    yield row, output
        finally:
            for rank, size in left.items():
                self._loads.release(rank, size)
            for task, rank in pending.items():
                task.cancel()
                self._group.abandon(rank, stream_id)

    def _accept(self, data: BatchedDataDict[Any], greedy: bool, method: str) -> _Call:
        """Checks the batch, and fixes what its rows draw from."""
        check_greedy(greedy)
        sampling = greedy_params(self.sampling) if greedy or self.sampling.greedy else self.sampling
        data = repeat_for_samples(as_batch(data, needed_by=method), sampling.num_generations)
        stops = self.config.get("stop_strings") or ()
        first = self._streams.first_of(data, sampling)
        checked = PromptBatch.from_data(data, sampling, self.facts, stops, first_stream=first)
        consumed = {key: data[key] for key in data if key in CONSUMED_KEYS}
        seeds = {"seed": checked.seeds} if checked.seeded else {}
        return _Call(
            prompts=BatchedDataDict({**consumed, **seeds}),
            extras=passthrough_columns(data),
            sizes=checked.lengths + checked.budgets,
            provenance=provenance_of(sampling),
        )

    def _assign(self, call: _Call, rows: torch.Tensor) -> dict[int, torch.Tensor]:
        """Places in ``rows`` of each replica's; nothing still goes to one, for the right keys."""
        shards = self._loads.assign(call.sizes[rows].tolist()) or {0: []}
        return {rank: torch.tensor(rows, dtype=torch.int64) for rank, rows in shards.items()}

    def _agreed(self, method: str, *args: Any, **kwargs: Any) -> bool:
        """Calls it on every replica; whether all of them return True."""
        return all(self._group.call_all(method, *args, **kwargs))

    prepare_for_generation = through(_agreed, GenerationInterface.prepare_for_generation)
    finish_generation = through(_agreed, GenerationInterface.finish_generation)

    # -- refit ----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """The version that all replicas serve.

        Raises:
            WeightsTornError: They differ.
        """
        return _same(self._weights())[0]

    @property
    def weights_origin(self) -> int:
        """Of the trainer that sent the version that all replicas serve.

        Raises:
            WeightsTornError: They differ.
        """
        return _same(self._weights())[1]

    def _weights(self) -> list[tuple[int, int]]:
        """Version and origin of each replica."""
        names = "weights_version", "weights_origin"
        return list(zip(*map(self._group.attributes, names), strict=True))

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return any(self._group.attributes("requires_kv_scale_sync"))

    prepare_refit_info = through(RemoteBackend._on_all, GenerationInterface.prepare_refit_info)
    receive_weights = through(RemoteBackend._refit, GenerationInterface.receive_weights)
    init_collective = through(RemoteBackend._collective, GenerationInterface.init_collective)
    update_weights_from_collective = through(
        RemoteBackend._collective, GenerationInterface.update_weights_from_collective
    )
    invalidate_kv_cache = through(_agreed, GenerationInterface.invalidate_kv_cache)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, as it was accepted.

    Attributes:
        prompts: With a seed for each row, if the call has any.
        extras: The keys that are only carried through; they stay here.
        sizes: ``[B]`` int64 tokens that each row may come to.
        provenance: Of the output.
    """

    prompts: BatchedDataDict[Any]
    extras: dict[str, Any]
    sizes: torch.Tensor
    provenance: Provenance


async def _next(stream: Any) -> Any:
    """The next future of a stream, or None at its end."""
    return await anext(stream, None)


def _same(weights: list[tuple[int, int]]) -> tuple[int, int]:
    if len(set(weights)) > 1:
        served = ", ".join(
            f"{version} of origin {origin}" for version, origin in sorted({*weights})
        )
        raise WeightsTornError(
            f"the replicas of the engine have different weights: versions {served}",
            fix="refit all of them: refit(policy, generation)",
            phase="serving",
        )
    return weights[0] if weights else (0, 0)
