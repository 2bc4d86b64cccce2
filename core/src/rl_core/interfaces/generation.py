"""The contract of a generation backend (the inference engine)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rl_core.batch.data_dict import BatchedDataDict
    from rl_core.interfaces.specs import GenerationDatumSpec, GenerationOutputSpec
    from rl_core.interfaces.worker import Future

__all__ = ["GenerationInterface"]


class GenerationInterface(ABC):
    """An engine that generates and takes new weights.

    The loop is ``prepare_for_generation -> generate* -> finish_generation``, with a refit wherever
    the weights changed. Authors derive from :class:`rl_backends.GenerationBackend`, which
    implements everything about refits, input checks and output layout.

    Attributes:
        cfg: The configuration, ``backend`` included, for loops that look something up in it.
    """

    cfg: dict[str, Any]

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Completes every prompt.

        Args:
            data: Right-padded prompts. Another mapping will do, such as what a tokenizer returns.
            greedy: Take the argmax; temperature and truncation do not apply.

        Returns:
            Prompts with completions, row for row, see :class:`GenerationOutputSpec`.

        Raises:
            DataError: A row is left-padded, empty or inconsistent with its length.
            LifecycleError: Called before ``prepare_for_generation`` or after ``shutdown``.
            WeightsTornError: The last refit failed after weights were touched.
        """

    def generate_async(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """Yields ``(row index, one-row output)`` as rows finish; the union equals ``generate``.

        Rows take the streams of a configured seed in the order in which calls are made.

        Raises:
            CapabilityError: The backend lacks ``async_generation``.
        """
        raise CapabilityError(
            f"{type(self).__name__} does not generate asynchronously",
            fix="call generate, or choose a backend that declares async_generation",
        )

    @abstractmethod
    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Wakes the engine. Idempotent; True on success, an exception otherwise.

        Args:
            *args: For backends' own use.
            **kwargs: ``tags`` (a list of ``"weights"``, ``"kv_cache"``) wakes only a part.
        """

    @abstractmethod
    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Frees the memory that generation needs. Idempotent; True on success.

        Args:
            *args: For backends' own use.
            **kwargs: ``tags``, as in :meth:`prepare_for_generation`, puts only a part to sleep;
                ``release_gpu=False`` puts nothing to sleep: the engine goes on serving. So does
                one that is configured with ``colocated.enabled`` False, unless the
                call names what to release.

        Raises:
            ConfigError: There is no such keyword or tag.
        """

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the engine and everything it started. Idempotent; True on success."""

    # -- refit ------------------------------------------------------------------------------

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Version of the weights that serve now; 0 until the first refit commits."""

    @property
    def weights_origin(self) -> int:
        """Identifies the trainer that counts this version; 0 until the first refit commits."""
        return 0

    @property
    def requires_kv_scale_sync(self) -> bool:
        """True when FP8 key/value scales must travel with the weights."""
        return False

    @abstractmethod
    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """Takes the trainer's description of its tensors and checks it against the engine's.

        Args:
            state_dict_info: What the policy's ``prepare_refit_info`` returned.

        Raises:
            ManifestMismatchError: Names every tensor that is missing, unexpected, mis-shaped or
                mis-typed. Nothing was touched.
        """

    @abstractmethod
    def receive_weights(self, **options: Any) -> list[Future]:
        """Takes one refit (``transport``, ``deadline_s``, ``number``); ends with its commit."""

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """Another name of :meth:`receive_weights`."""
        return self.receive_weights(*args, **kwargs)

    def cancel_refit(self, number: int) -> None:
        """Cancels a refit of this number, requested or not yet, unless its transfer has begun."""

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """Joins the process group of the ``collective`` transport.

        ``world_size`` counts trainer and engine ranks; from rank 0 on, ``train_world_size`` of them
        are the trainer's.
        """

    @abstractmethod
    def update_weights_from_collective(
        self, info: dict[str, Any] | None = None, **options: Any
    ) -> list[Future]:
        """Receives one refit over the ``collective`` transport.

        Args:
            info: The older way to hand over what ``prepare_refit_info`` takes.
            **options: ``deadline_s``.
        """

    @abstractmethod
    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """Takes the refit of a ticket of ``get_weights_ipc_handles``: all of it, or it raises."""

    @abstractmethod
    def invalidate_kv_cache(self) -> bool:
        """Drops every cache that was filled with other weights. True on success."""
