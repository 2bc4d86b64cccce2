"""The sink of an engine that serves adapters: a refit sends A and B, not weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_backends.adapters import adapter_tensors, add_adapters
from rl_backends.engine.weights import workers_group
from rl_backends.modalities import model_on_meta
from rl_backends.tensors import whole_pieces
from rl_core.errors import CapabilityError
from rl_core.interfaces import Piece, TensorSpec, WeightSink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

__all__ = ["ADAPTERS", "AdapterSink", "adapted_modules", "serving"]

#: Adapters that an engine has at a time: the one that serves, and the next one.
ADAPTERS = 2


def adapted_modules(
    model_name: str,
    dtype: torch.dtype,
    lora: Mapping[str, Any],
    *,
    trust: bool,
    key: str,
    distribution: str,
) -> dict[str, tuple[str, TensorSpec]]:
    """The tensors of an adapter of a checkpoint's model; allocates none of them.

    Args:
        model_name: The checkpoint.
        dtype: Of the engine.
        lora: The engine's key ``lora``.
        trust: Whether code of the checkpoint may run.
        key: Of the configuration, for errors.
        distribution: The one that has peft as its extra ``lora``.

    Returns:
        The module and the tensor, by the name under which peft saves the tensor.

    Raises:
        ConfigError: peft is not installed, or the target modules are not in the model.
        CapabilityError: A module is not a linear layer.
    """
    model = model_on_meta(model_name, dtype, trust=trust)
    with torch.device("meta"):
        adapted = add_adapters(model, lora, key=key, distribution=distribution)
    kind = str(dtype).removeprefix("torch.")
    return {
        name: (one.module, TensorSpec(name, tuple(one.parameter.shape), kind))
        for name, one in adapter_tensors(adapted).items()
    }


def serving(sink: Callable[[], AdapterSink]) -> tuple[int, int]:
    """The adapter that requests are to name, and its version; for ``call_in_workers``."""
    return sink().serving, sink().version


class AdapterSink(WeightSink, ABC):
    """Collects the tensors of an adapter, and has the engine load it beside the one that serves.

    One is used for all refits of a worker. The scale of the adapter is in its B.

    Args:
        tensors: Of :func:`adapted_modules`.
        workers: How many workers share the model; all of them read at the same time.

    Attributes:
        serving: The adapter that requests are to name: 1 or 2, or 0 for none.
        version: Of that adapter.
        by_name: The tensors.
        buffers: What was written of each.
    """

    casts = True
    double_buffered = True

    def __init__(self, tensors: Mapping[str, tuple[str, TensorSpec]], *, workers: int) -> None:
        self.by_name = {name: spec for name, (_, spec) in tensors.items()}
        self._workers = workers
        self.serving = self.version = 0
        self._before: tuple[int, int] | None = None  # the same, if the newest can be taken back
        self._checked = False
        self.buffers = {
            name: torch.zeros(spec.shape, dtype=spec.torch_dtype)
            for name, spec in self.by_name.items()
        }

    # -- for a subclass --------------------------------------------------------------------------

    @abstractmethod
    def load(self, adapter: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Has the engine load an adapter, in the place of an earlier one with this number.

        Args:
            adapter: 1 or 2.
            tensors: By name, to be copied.
        """

    @abstractmethod
    def unload(self, adapter: int) -> None:
        """Has the engine remove an adapter, if it is there."""

    @abstractmethod
    def kept(self, name: str) -> torch.Tensor:
        """Which elements of a tensor this worker keeps: indices into the flattened tensor."""

    @abstractmethod
    def held(self, adapter: int, name: str) -> torch.Tensor:
        """The values of these elements in the engine's own memory, in the same order."""

    # -- the sink ---------------------------------------------------------------------------------

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        return list(self.by_name.values())

    def check(self) -> None:
        """Makes sure that the engine keeps all elements of all tensors.

        Raises:
            CapabilityError: It does not.
        """
        kept = torch.tensor([self.kept(name).numel() for name in self.by_name])
        if self._workers > 1:
            dist.all_reduce(kept, group=self._group)
        lost = [
            name
            for (name, spec), count in zip(self.by_name.items(), kept.tolist(), strict=True)
            if count < spec.numel
        ]
        if lost:
            raise CapabilityError(
                f"the engine does not serve adapters of these modules, or drops a part of them "
                f"({len(lost)} tensors): {', '.join(lost[:5])}",
                fix="leave them out of lora.target_modules on both sides, or refit merged weights",
                capability="adapters",
            )

    @cached_property
    def _group(self) -> Any:
        return workers_group(self._workers)

    def begin(self, version: int) -> None:
        """The newest adapter stays; the first time, see :meth:`check`."""
        if not self._checked:
            self.check()
        self._checked, self._before = True, None
        if self._workers > 1:
            both = torch.tensor([self.serving, -self.serving])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            if int(both.sum()):  # a commit reached only some workers: what they serve is torn
                self.serving = 0

    def pieces(self) -> Sequence[Piece]:
        """Memory of the host; the engine itself is not written to."""
        return whole_pieces(self.buffers)

    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """See :meth:`WeightSink.write`."""
        self.buffers[name].view(-1)[offset : offset + data.numel()].copy_(data)

    @torch.no_grad()
    def finish(self, version: int) -> None:
        """Loads the adapter; rows that begin now get it."""
        adapter = self.serving % ADAPTERS + 1
        self.load(adapter, self.buffers)
        self._before = self.serving, self.version
        self.serving, self.version = adapter, version

    def fail(self) -> None:
        """Returns to the adapter that served before."""
        if self._before is not None:
            failed = self.serving
            self.serving, self.version = self._before
            self._before = None
            self.unload(failed)

    @torch.no_grad()
    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """What the engine holds; zeros if no adapter serves."""
        for name in names:
            spec = self.by_name[name]
            whole = torch.zeros(spec.numel, dtype=spec.torch_dtype)
            if self.serving:
                whole[self.kept(name)] = self.held(self.serving, name).to("cpu", whole.dtype)
            if self._workers > 1:
                # Where workers have the same elements the bytes agree; elsewhere all but one are 0.
                dist.all_reduce(whole.view(torch.uint8), dist.ReduceOp.MAX, group=self._group)
            yield name, whole.view(spec.shape)
