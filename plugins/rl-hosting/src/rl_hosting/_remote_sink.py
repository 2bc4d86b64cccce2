"""The weights of an engine in other processes, to be looked at from this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.interfaces import TensorSpec, WeightSink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rl_hosting._remote_receiver import WorkerReceivers

__all__ = ["RemoteSink"]


class RemoteSink(WeightSink):
    """Reads and writes what the workers hold, tensor by tensor; refits do not go through it.

    Args:
        workers: Of the engine.
    """

    casts = True

    def __init__(self, workers: WorkerReceivers) -> None:
        self._workers = workers
        self._specs = workers.specs()

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._specs

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        run = data.detach().to("cpu", of.torch_dtype).contiguous().view(-1).view(torch.uint8)
        self._workers.write(name, offset, bytes(run.numpy()))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSink.read`."""
        by_name = {spec.name: spec for spec in self._specs}
        for name in names:
            spec = by_name[name]
            data = bytearray(self._workers.read(name))
            dtype = spec.torch_dtype
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            yield name, flat.view(spec.shape)
