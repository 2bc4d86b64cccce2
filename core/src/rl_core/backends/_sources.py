"""Sources of tensors around other sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from rl_core.interfaces import WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from rl_core.interfaces import TensorSpec

__all__ = ["RenamedSource", "WrappedSource"]


class WrappedSource(WeightSource):
    """Another source as it is, to derive from.

    Args:
        source: Gives the tensors.
    """

    def __init__(self, source: WeightSource) -> None:
        self.device = source.device
        self._source = source

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._source.specs()

    def open(self, refit: str, deadline_s: float) -> None:
        """See :meth:`WeightSource.open`."""
        self._source.open(refit, deadline_s)

    def check(self) -> None:
        """See :meth:`WeightSource.check`."""
        self._source.check()

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        return self._source.tensors(names)

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        return self._source.persistent()

    def confirm(self) -> None:
        """See :meth:`WeightSource.confirm`."""
        self._source.confirm()

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._source.close()


class RenamedSource(WrappedSource):
    """Another source, whose tensors have other names.

    Args:
        source: Gives the tensors under the trainer's names.
        names: The new name of each that gets one; no two tensors may then have one name.
    """

    def __init__(self, source: WeightSource, names: Mapping[str, str]) -> None:
        super().__init__(source)
        self._new = names
        self._old = {new: old for old, new in names.items()}

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        new = self._new
        return [
            msgspec.structs.replace(
                spec,
                name=new.get(spec.name, spec.name),
                alias_of=spec.alias_of and new.get(spec.alias_of, spec.alias_of),
            )
            for spec in super().specs()
        ]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`."""
        for name, tensor in super().tensors([self._old.get(name, name) for name in names]):
            yield self._new.get(name, name), tensor

    def persistent(self) -> Mapping[str, torch.Tensor] | None:
        """See :meth:`WeightSource.persistent`."""
        tensors = super().persistent()
        if tensors is None:
            return None
        return {self._new.get(name, name): tensor for name, tensor in tensors.items()}
