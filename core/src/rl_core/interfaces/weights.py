"""The two ends of a refit: the trainer's source and the engine's sink of named tensors.

All else about a refit is written once in :mod:`rl_core.weights` on top of these two.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import msgspec

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from typing import Self

    import torch

__all__ = ["Box", "Piece", "TensorSpec", "WeightSink", "WeightSource"]

#: For each dimension of a tensor, the first index and the one after the last; ``()`` for 0-d.
Box: TypeAlias = tuple[tuple[int, int], ...]


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor as the manifest names it.

    Attributes:
        name: Its name in the Hugging Face checkpoint of the model.
        shape: Its sizes; ``()`` for a 0-d tensor.
        dtype: Torch's name of the dtype without the prefix, such as ``"bfloat16"``.
        role: ``"parameter"`` or ``"buffer"``.
        alias_of: Name of the tensor whose storage it shares (tied weights). Aliases are declared
            and sent once; a sink that needs a second copy makes it.
        trainable: False for frozen tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "parameter"
    alias_of: str | None = None
    trainable: bool = True

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype itself, or an AttributeError if torch has none of that name."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.numel * self.torch_dtype.itemsize


@lru_cache(maxsize=1024)
def whole_box(shape: tuple[int, ...]) -> Box:
    """The box of all elements: one object for each shape, as there is one for every tensor."""
    return tuple((0, size) for size in shape)


class Piece(NamedTuple):
    """Some elements of a tensor, and where one side has them.

    Attributes:
        name: The tensor's.
        box: Which of its elements these are.
        tensor: Exactly these elements, of the declared dtype and the sizes of the box, at any
            strides: the same object, with the same storage, from refit to refit. None in a sink's
            piece that is the whole tensor and is written by :meth:`WeightSink.write`, and in a
            source's piece that is made when it is sent.
    """

    name: str
    box: Box
    tensor: torch.Tensor | None

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> Self:
        """All of a tensor."""
        return cls(name, whole_box(tensor.shape), tensor)


class WeightSource(ABC):
    """The trainer's side: which tensors there are, and their values.

    One is made for each refit, on every rank of the trainer, and closed once. All ranks describe
    the same whole tensors (:meth:`specs`), and each has some :meth:`pieces` of them. The
    calls are ``specs, open, tensors..., confirm, close``, each of which may be the last before
    ``close``.

    Attributes:
        device: Where the tensors are, such as ``"cuda:0"``. Buffers are made there if the engines
            can reach it, otherwise on the CPU.
        state: Of the weights, where a trainer has several ranks: it changes with every step and
            checkpoint, and is the same on ranks whose weights belong together.
    """

    device: str = "cpu"
    state: int = 0

    @abstractmethod
    def specs(self) -> Sequence[TensorSpec]:
        """All tensors, aliases included, in the order in which :meth:`tensors` yields them."""

    def open(self, number: int, deadline_s: float) -> None:
        """A refit begins that reads this source. Called again by one that is given more time.

        Args:
            number: Of the refit, the same on every rank of the trainer.
            deadline_s: Seconds from now until it must have ended.
        """

    @abstractmethod
    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the named tensors in that order, of the declared shape and dtype, any device.

        A tensor may be made on the fly (gathered, merged, cast) and dropped once the next is
        asked for; it need not be contiguous. Aliases are not asked for. Called once per refit,
        and once before it for a delta, which hashes all tensors first, and for `check_finite`.
        """

    def pieces(self) -> Sequence[Piece] | None:
        """What this process has of each tensor, if that keeps its storage from refit to refit.

        With tensors a refit can be ``direct``: core moves their storages, once, to memory that
        engines read (it assigns ``tensor.data``; code that holds the tensor object sees no
        difference), if it knows all tensors that use them: those of pieces, what these are views
        of, and :meth:`memory_users`. What is cut is sent by pieces alone, without :meth:`tensors`.

        Returns:
            Pieces on one device. Those of all ranks cover every tensor that is not an alias; ranks
            may have the same ones. None if tensors are whole here and made on the fly. Pieces of
            aliases may be among them. A piece without a tensor is the only one of its tensor here,
            and made during the refit: :meth:`tensors` yields just its elements.
        """
        return None

    def memory_users(self) -> Sequence[torch.Tensor]:
        """Further tensors that use the memory of pieces, such as parameters with views as pieces.

        A refit is not direct, and says so, if a piece shares memory with a tensor that is not here.
        """
        return ()

    @abstractmethod
    def confirm(self) -> None:
        """Raises LifecycleError unless all that was given since it was made is of one state.

        Called before the commit, when everything was read. Only the source knows: a transfer is
        verified against what was read, which is a mixture if a step was taken in between. The
        usual way is a count of the changes to the weights, taken when the source is made and
        compared here. Empty only where the weights cannot change while a source is in use.
        """

    def close(self) -> None:
        """Releases what the source holds; called once, however the refit ended or if none began."""


class WeightSink(ABC):
    """The engine's side: which tensors it expects, and how to write one.

    Calls come from one thread, in the order ``begin, write..., finish``; ``fail`` comes last
    whenever the refit is not committed, also after ``finish``. The caller keeps the engine from
    generating in between.

    Attributes:
        casts: True if the engine chooses its own floating-point dtype: where :meth:`specs` names
            another float dtype than the trainer's, the sender rounds to it before sending.
            Otherwise a difference in dtype is a mismatch.
        double_buffered: True if only :meth:`finish` changes what the engine serves, and
            :meth:`fail` takes that back. A refit then tears nothing, and a ``staged`` one needs no
            second copy: it calls :meth:`begin` and :meth:`write` while the engine generates.
        device: Where the tensors are, such as ``"cuda:0"``.
        always_sent: Names of tensors that the engine takes only together: no delta leaves them out.
    """

    casts: bool = False
    double_buffered: bool = False
    device: str = "cpu"
    always_sent: Collection[str] = ()

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

    def pieces(self) -> Sequence[Piece] | None:
        """What this process keeps of each tensor: nothing else is sent to it.

        Returns:
            Pieces that are written in place, which is faster than :meth:`write`, and where that
            cannot be, whole tensors without one. No aliases. None if all tensors are whole and
            written by :meth:`write`.
        """
        return None

    def scale_kv(self, scales: Mapping[str, float]) -> None:
        """Takes the scales of an FP8 key/value cache that travel with the weights.

        Called before :meth:`finish`, if the sender has any; and before :meth:`begin` with none.

        Args:
            scales: As ``PolicyInterface.calibrate_qkv_fp8_scales`` gives them, by name.

        Raises:
            CapabilityError: The engine has no such cache.
        """
        raise CapabilityError(
            f"{type(self).__name__} takes no key/value scales",
            fix="refit without kv_scales, or implement WeightSink.scale_kv",
            capability="kv_scales",
        )

    def finish(self, version: int) -> None:
        """All tensors were written: refreshes what derives from them (tied copies, caches)."""

    def fail(self) -> None:
        """The transfer failed after :meth:`begin`; the weights may be torn."""

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Yields what is installed now, under the manifest's names, for verification.

        Of each name in turn: its pieces in the order of :meth:`pieces`, those of the owner for an
        alias; the whole tensor if there are no pieces. None stands for a tensor of which the engine
        keeps only what it computed: the sink compares that itself, and gives it back in
        :meth:`fail` if it was read before the first write.

        Raises:
            CapabilityError: The engine cannot export its weights.
        """
        raise CapabilityError(
            f"{type(self).__name__} cannot read its installed weights back",
            fix='use verify="wire", or implement WeightSink.read',
        )
