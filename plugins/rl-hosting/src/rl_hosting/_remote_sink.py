"""The weights of a hosted engine, read and written from the driver, tensor by tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_core.errors import RefitProtocolError
from rl_core.interfaces import TensorSpec, WeightSink
from rl_core.weights.data.runs import flat

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from rl_hosting._remote_receiver import RemoteReceiver

__all__ = ["RemoteSink"]


class RemoteSink(WeightSink):
    """What ``weight_sink`` of a hosted backend returns, for checks; refits do not go through it.

    Args:
        receiver: Of the engine.
    """

    casts = True

    def __init__(self, receiver: RemoteReceiver) -> None:
        self._receiver = receiver
        self._specs = receiver.specs()

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return self._specs

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        run = flat(data.to("cpu", of.torch_dtype).contiguous()).view(torch.uint8)
        self._receiver.write(name, offset, bytes(run.numpy()))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """See :meth:`WeightSink.read`."""
        by_name = {spec.name: spec for spec in self._specs}
        for name in names:
            spec = by_name[name]
            whole = torch.empty(spec.shape, dtype=spec.torch_dtype)
            pieces = self._receiver.read(name)
            if any(data is None for _, data in pieces):
                yield name, None
                continue
            seen = torch.zeros(spec.shape, dtype=torch.bool)
            for box, data in pieces:
                if data:
                    flat = torch.frombuffer(bytearray(data), dtype=whole.dtype)
                    index = tuple(slice(*ends) for ends in box)
                    whole[index] = flat.view(whole[index].shape)
                    seen[index] = True
            if not seen.all():
                raise RefitProtocolError(
                    f"the engine has {int(seen.sum())} of the {seen.numel()} elements of {name}",
                    fix="correct the pieces() of its workers' weight sinks",
                )
            yield name, whole
