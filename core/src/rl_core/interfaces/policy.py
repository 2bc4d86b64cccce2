"""The contract of a policy backend (the trainer)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.errors import CapabilityError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager

    from rl_core.batch.data_dict import BatchedDataDict
    from rl_core.interfaces.loss import LossFunction
    from rl_core.interfaces.specs import (
        GenerationDatumSpec,
        GenerationOutputSpec,
        LogprobOutputSpec,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )
    from rl_core.interfaces.worker import DataParallelRank, Future

__all__ = ["ColocatablePolicyInterface", "PolicyInterface", "Timer"]


class Timer(Protocol):
    """A loop's stopwatch; what it does with the times is its own."""

    def time(self, label: str) -> AbstractContextManager[object]:
        """Measures what is done in the body, under a label such as ``"get_logprobs"``."""


class PolicyInterface(ABC):
    """A model that is trained and scores sequences."""

    @abstractmethod
    def get_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Scores every token given those before it.

        Args:
            data: Right-padded sequences with ``input_ids`` and ``input_lengths``.
            micro_batch_size: Rows per forward pass; the configured value if None.
            timer: Measures the call, under its name.

        Returns:
            ``logprobs`` ``[B, S]`` float32 with the policy's temperature applied; entry t scores
            token t, entry 0 and padding are 0.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """As :meth:`get_logprobs` under the weights the policy started with.

        Returns:
            ``reference_logprobs`` ``[B, S]`` float32.
        """

    def get_reference_logprobs(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """The older name of :meth:`get_reference_policy_logprobs`."""
        return self.get_reference_policy_logprobs(data, micro_batch_size, timer)

    @abstractmethod
    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """The k largest logits of every position that predicts a token.

        They are divided by the policy's temperature, as those behind its log-probs are.

        Returns:
            ``topk_logits`` float32 and ``topk_indices`` int64, ``[B, S-1, k]``, descending.
        """

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """Takes one optimizer step for every ``gbs`` rows.

        Args:
            data: Right-padded sequences, see :class:`TrainingDatumSpec`;
                :func:`rl_losses.training_batch` makes them of what an engine generated.
            loss_fn: The loss; the result does not depend on how rows are split.
            eval_mode: Compute the loss and change nothing: weights, optimizer, RNG.
            gbs: Global batch size; the configured value (or all rows) if None.
            mbs: Micro batch size; the configured value if None.
            timer: Measures the call, as ``"train"``.

        Returns:
            Of the last step at least ``loss`` and ``grad_norm`` (floats, with the ``item()`` and
            ``numpy()`` of 0-d tensors), ``lr``, ``global_valid_toks``, ``global_valid_seqs``, and
            the loss function's metrics. Under ``step_metrics`` every step's values are lists.
            Under ``all_mb_metrics`` they are parts, which a loop adds up to the mean over steps;
            ``lr``, counts and extremes are there as they are.

        Raises:
            ConfigError: The loss is a class, or wants what no policy has.
            DataError: The batch is generation output as it came, or rollouts without
                ``token_mask``.
            TrainingError: A loss or gradient is not finite; the step was not taken.
        """

    @abstractmethod
    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """Scales per layer for an FP8 key/value cache, from observed magnitudes.

        Args:
            data: Sequences to observe.
            micro_batch_size: Rows per forward pass.
            percentile: Of ``|activation|`` per tensor, in (0, 100].
            margin: Factor on top.
            include_q: Also scale the queries.

        Returns:
            ``{"format": "e4m3", "layers": {"layer_0": {"k_scale": ..., "v_scale": ...}, ...}}``;
            a refit's ``kv_scales`` take it as it is.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Brings model and optimizer to where they train. Idempotent."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Frees the memory that only training needs. Idempotent."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Writes weights, optimizer, scheduler, RNG and step to ``path`` (the first argument).

        An interrupted save never leaves something that loads as a checkpoint.

        Args:
            *args: ``path``.
            **kwargs: ``weights_path`` is another name of ``path``. With it come
                ``optimizer_path``, ``tokenizer_path`` and ``checkpointing_cfg``, by which
                others choose where and how they write parts; here all parts are in one directory.
        """

    @property
    def data_parallel_size(self) -> int:
        """Number of parts into which rows are divided."""
        return 1

    @abstractmethod
    def shutdown(self) -> bool:
        """Ends the policy and everything it started. Idempotent; True on success."""

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """Generates with the policy's own weights, to the contract of a generation backend.

        Raises:
            CapabilityError: The backend lacks ``policy_generate``.
        """
        raise CapabilityError(
            f"{type(self).__name__} does not generate", fix="use a generation backend"
        )

    def score(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """Scores whole sequences with a reward model: ``scores`` ``[B]`` float32.

        Raises:
            CapabilityError: The backend or the model has no scoring head.
        """
        raise CapabilityError(
            f"{type(self).__name__} does not score", fix="use a backend that declares score"
        )


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can send its weights to an engine, on the same devices or others.

    Authors derive from :class:`rl_backends.PolicyBackend`, which implements the transfer.

    Attributes:
        data_parallel: Which rows this worker gets, where it is one of several that do not each have
            separate rows; None otherwise.
    """

    data_parallel: DataParallelRank | None = None

    @abstractmethod
    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """Joins the process group of the ``collective`` transport."""

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Makes room on the device for an engine that wakes up. Idempotent."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Moves the weights off the device once the engine has them. Idempotent."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Describes every tensor, where engines fetch it, and the number of the next refit."""

    @abstractmethod
    def send_weights(self, **options: Any) -> list[Future]:
        """Sends one refit, with :class:`~rl_core.weights.SendOptions`; ends with its commit."""

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """Another name of :meth:`send_weights`."""
        return self.send_weights(*args, **kwargs)

    @abstractmethod
    def broadcast_weights_for_collective(
        self, kv_scales: Mapping[str, float] | None = None, **options: Any
    ) -> list[Future]:
        """As :meth:`send_weights` with ``transport="collective"``."""

    def cancel_refit(self, number: int) -> None:
        """Cancels a refit of this number, requested or not yet, unless its transfer has begun."""

    @abstractmethod
    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Brings the model to where it scores, without the optimizer, unless that is to stay."""

    # -- the older spelling --------------------------------------------------------------------

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """The names of all tensors, as one group; sizes of buffers that are given are ignored."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str], **options: Any) -> dict[str, Any]:
        """Starts a refit of all ``keys``; the ticket for an engine's ``update_weights``."""

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """The older name of :meth:`prepare_refit_info`."""
        return self.prepare_refit_info() or {}
