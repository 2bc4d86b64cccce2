"""A generation backend whose replicas run as Ray actors."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_core.backends.inputs import as_batch
from rl_core.backends.prompts import (
    CONSUMED_KEYS,
    PromptBatch,
    SamplingParams,
    carried,
    greedy_params,
    provenance_of,
    repeated,
)
from rl_core.batch import BatchedDataDict
from rl_core.batch.provenance import moment
from rl_core.cluster.remote import RemoteBackend
from rl_core.cluster.sharding import collect, deal
from rl_core.errors import DeadlineError, WeightsTornError
from rl_core.interfaces import GenerationInterface

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from rl_core.backends.prompts import ModelFacts
    from rl_core.batch.provenance import Provenance
    from rl_core.interfaces import Future, GenerationOutputSpec

__all__ = ["RemoteGeneration"]


class RemoteGeneration(RemoteBackend, GenerationInterface):
    """Replicas of one engine; behaves as the embedded backend does.

    Every row is sampled from a stream of its own that is fixed before the rows are dealt out, so
    that a seed gives the same tokens with any number of replicas.
    """

    _kind = "generation"

    def _connect(self) -> None:
        self.receiver_count = sum(self._group.attributes("receiver_count"))
        self.facts: ModelFacts = self._group.attributes("facts")[0]
        self.sampling = SamplingParams.from_config(self.config, self.facts)
        self._calls = itertools.count()  # that drew from the seed

    def _worker_config(self) -> dict[str, Any]:
        # Samples are multiplied here: a replica completes each of its rows once.
        return {key: value for key, value in self.config.items() if key != "num_samples"}

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationInterface.generate`."""
        call = self._accept(data, greedy, "generate")
        results = [
            self._group.submit(rank, "generate", call.prompts.select_indices(rows), greedy)
            for rank, rows in call.shards.items()
        ]
        output = collect(
            self._group.wait(results),
            torch.cat(list(call.shards.values())),
            call.prompts.size,
            output_ids=self.facts.pad_token_id,
        )
        _same_version(output["weights_version"].unique().tolist())
        output.update(call.extras)
        output.provenance = call.provenance
        return output

    def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationInterface.generate_async`.

        As with an embedded backend, prompts take their random streams when it is called.
        """
        return self._stream(self._accept(data, greedy, "generate_async"), greedy)

    async def _stream(
        self, call: _Call, greedy: bool
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        stream_id = uuid.uuid4().hex
        streams = {
            rank: self._group.stream(rank, stream_id, call.prompts.select_indices(rows), greedy)
            for rank, rows in call.shards.items()
        }
        pending = {asyncio.create_task(_next(stream)): rank for rank, stream in streams.items()}
        try:
            while pending:
                for task in await self._first(pending):
                    rank = pending.pop(task)
                    if (reference := task.result()) is None:
                        continue
                    pending[asyncio.create_task(_next(streams[rank]))] = rank
                    [(index, output)] = await asyncio.to_thread(self._group.wait, [reference])
                    row = int(call.shards[rank][index])
                    output.update(
                        {
                            key: None if value is None else value[row : row + 1]
                            for key, value in call.extras.items()
                        }
                    )
                    output.provenance = call.provenance
                    yield row, output
        finally:
            for task, rank in pending.items():
                task.cancel()
                self._group.abandon(rank, stream_id)

    async def _first(self, pending: Mapping[asyncio.Task[Any], int]) -> set[asyncio.Task[Any]]:
        deadline = self._group.call_deadline_s
        done, _ = await asyncio.wait(pending, timeout=deadline, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise DeadlineError(
                f"{self._group.name}: no row finished within {deadline:g} s",
                fix="raise call_deadline_s, or look at the workers' logs",
                seconds=deadline,
            )
        return done

    def _accept(self, data: BatchedDataDict[Any], greedy: bool, method: str) -> _Call:
        """Checks the batch and deals its rows to ranks."""
        sampling = greedy_params(self.sampling) if greedy or self.sampling.greedy else self.sampling
        data = repeated(as_batch(data, needed_by=method), sampling.num_samples)
        stops = self.config.get("stop_strings") or ()
        checked = PromptBatch.from_data(data, sampling, self.facts, stops, calls=self._calls)
        consumed = {key: data[key] for key in data if key in CONSUMED_KEYS}
        seeds = {"seed": checked.seeds} if checked.seeded else {}
        table = deal(checked.lengths, self._group.size)
        shards = {rank: rows[rows < len(checked)] for rank, rows in enumerate(table)}
        return _Call(
            prompts=BatchedDataDict({**consumed, **seeds}),
            extras=carried(data),
            # An empty batch still goes to one replica, for a result of the right keys.
            shards={rank: rows for rank, rows in shards.items() if len(rows) or rank == 0},
            provenance=provenance_of(sampling, moment()),
        )

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.prepare_for_generation`."""
        return all(self._group.call_all("prepare_for_generation", *args, **kwargs))

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.finish_generation`."""
        return all(self._group.call_all("finish_generation", *args, **kwargs))

    # -- refit ----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """The version that all replicas serve.

        Raises:
            WeightsTornError: They differ.
        """
        return _same_version(self._group.attributes("weights_version"))

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return any(self._group.attributes("requires_kv_scale_sync"))

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`GenerationInterface.prepare_refit_info`."""
        self._group.call_all("prepare_refit_info", state_dict_info)

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """One Ray reference for each replica; see the interface."""
        return self._refit("update_weights_via_ipc_zmq", *args, **kwargs)

    def update_weights_from_collective(
        self, info: dict[str, Any] | None = None, **options: Any
    ) -> list[Future]:
        """One Ray reference for each replica; see the interface."""
        self._group.require("collective")
        return self._refit("update_weights_from_collective", info, **options)

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """One Ray reference for each replica; see the interface."""
        self._group.require("collective")
        return self._refit(
            "init_collective", ip, port, world_size, train_world_size=train_world_size
        )

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """See :meth:`GenerationInterface.update_weights`."""
        return all(self._group.call_all("update_weights", ipc_handles))

    def invalidate_kv_cache(self) -> bool:
        """See :meth:`GenerationInterface.invalidate_kv_cache`."""
        return all(self._group.call_all("invalidate_kv_cache"))


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, as it was accepted.

    Attributes:
        prompts: With a seed for each row, if any were asked for.
        extras: The keys that are only carried through; they stay here.
        shards: For each rank its rows.
        provenance: Of the output.
    """

    prompts: BatchedDataDict[Any]
    extras: dict[str, Any]
    shards: dict[int, torch.Tensor]
    provenance: Provenance


async def _next(stream: Any) -> Any:
    """The next reference of Ray's generator, or None at its end."""
    return await anext(stream, None)


def _same_version(versions: list[int]) -> int:
    if len(set(versions)) > 1:
        raise WeightsTornError(
            f"the replicas serve different weights: versions {sorted(set(versions))}",
            fix="refit all of them: refit(policy, generation)",
            phase="serving",
        )
    return versions[0] if versions else 0
