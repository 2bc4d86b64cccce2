"""What a trainer gives and an engine takes in a refit: a source and a sink of named tensors.

Everything else about a refit (buckets, transports, versions, verification, the methods of both
generations of the interface) is written once in :mod:`rl_core.refit` on top of these two.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch

__all__ = ["TensorSpec", "WeightSink", "WeightSource"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor as the manifest names it.

    Attributes:
        name: Its name in the Hugging Face checkpoint of the model.
        shape: Its sizes; ``()`` for a 0-d tensor.
        dtype: Torch's name of the dtype without the prefix, such as ``"bfloat16"``.
        role: ``"parameter"`` or ``"buffer"``.
        alias_of: Name of the tensor whose storage it shares (tied weights). Aliases are declared
            and sent once; a sink that needs a second copy makes it.
        trainable: False for frozen tensors, which a delta may leave out.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "parameter"
    alias_of: str | None = None
    trainable: bool = True


class WeightSource(ABC):
    """The trainer's side: which tensors there are, and their values."""

    @abstractmethod
    def specs(self) -> Sequence[TensorSpec]:
        """All tensors, aliases included, in the order in which :meth:`tensors` yields them."""

    @abstractmethod
    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the named tensors in that order, of the declared shape and dtype, any device.

        A tensor may be made on the fly (gathered, merged, cast) and dropped once the next is
        asked for; it need not be contiguous. Called once per refit; aliases are not asked for.
        """


class WeightSink(ABC):
    """The engine's side: which tensors it expects, and how to write one.

    Calls come from one thread, in the order ``begin, write..., finish``; ``fail`` comes last
    whenever the refit is not committed, also after ``finish``. The caller keeps the engine from
    generating in between.

    Attributes:
        casts: True if the engine chooses its own floating-point dtype: where :meth:`specs` names
            another float dtype than the trainer's, the sender rounds to it before sending.
            Otherwise a difference in dtype is a mismatch.
    """

    casts: bool = False

    @abstractmethod
    def specs(self) -> Sequence[TensorSpec]:
        """The tensors the engine expects, aliases included. Order does not matter."""

    def begin(self, version: int) -> None:
        """Gets ready to be written to; nothing was touched if this raises."""

    @abstractmethod
    def write(self, name: str, offset: int, data: torch.Tensor, *, of: TensorSpec) -> None:
        """Writes a run of elements of one tensor.

        Args:
            name: The tensor.
            offset: Index of the first element in the flattened tensor.
            data: 1-D elements of the declared dtype, on the CPU or on a device; a view into a
                buffer that is reused after the call returns.
            of: The sender's description of the whole tensor.
        """

    def finish(self, version: int) -> None:
        """All tensors were written: refreshes what derives from them (tied copies, caches)."""

    def fail(self) -> None:
        """The transfer failed after :meth:`begin`; the weights may be torn."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields what is installed now, under the manifest's names, for verification.

        Raises:
            CapabilityError: The engine cannot export its weights.
        """
        from rl_core.errors import CapabilityError

        raise CapabilityError(
            f"{type(self).__name__} cannot read its installed weights back",
            fix='use verify="wire", or implement WeightSink.read',
        )
