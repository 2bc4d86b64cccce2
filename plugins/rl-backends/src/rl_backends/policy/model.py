"""What the author of a policy writes: the model, its gradients, its checkpoints and its weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    import torch
    from torch import nn

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import LossInputType, WeightSource

__all__ = ["PolicyModel"]

MODEL, OPTIMIZER = frozenset({"model"}), frozenset({"optimizer"})


class PolicyModel(ABC):
    """The methods that :class:`~rl_backends.PolicyBackend` is built on.

    Attributes:
        model: The module that is trained.
    """

    model: nn.Module

    @abstractmethod
    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        """Scores one microbatch, with gradients where torch has them enabled.

        Args:
            rows: On the CPU; ``input_ids`` ``[b, s]`` int64, right-padded with anything,
                ``input_lengths`` ``[b]`` int64, the longest of which is ``s``, and further columns;
                in training ``token_mask`` ``[b, s]`` and ``sample_mask`` ``[b]``.
            wanted: Log-probs or logits.

        Returns:
            On the model's device, with the policy's temperature: ``[b, s]`` float32 log-probs where
            entry t scores token t, and entry 0 and padding are 0; or ``[b, s, V]`` logits where
            position t predicts token t+1. Log-probs of tokens that the masks leave out may be 0.
            If :attr:`microbatching` packs, rows lie end to end in the model, and the result is the
            same.
        """

    @abstractmethod
    def reference(self) -> AbstractContextManager[None]:
        """In its body :meth:`forward` uses the weights of the start.

        Raises:
            CapabilityError: They are not kept.
        """

    def keep_reference(self) -> None:
        """Called before the weights change; for a reference that is copied the first time."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Sums the gradients over data-parallel workers; returns the L2 norm of all of them.

        Called on all workers once :meth:`accumulate` is over.
        """

    @abstractmethod
    def take_step(self, lr: float, scale: float) -> None:
        """Scales the gradients, and takes an optimizer step along them.

        If it raises on one worker, the weights of all are torn: only a load helps.

        Args:
            lr: The learning rate of this step.
            scale: At most 1; what clips the norm.
        """

    @abstractmethod
    def clear_gradients(self) -> None:
        """Forgets the gradients; called after every step, also after one that failed."""

    @abstractmethod
    def write_checkpoint(self, directory: Path) -> None:
        """Writes weights and optimizer, but neither random state nor steps.

        Called on all workers with one directory, which becomes the checkpoint when all have
        written: the model as a Hugging Face directory, all else in its folder ``rl_training``.
        """

    @abstractmethod
    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        """Reads what :meth:`write_checkpoint` wrote, of which every byte was verified.

        Called on all workers. It changes nothing.

        Returns:
            What puts it into model and optimizer; called once all workers have read.

        Raises:
            CheckpointError: It does not fit, see
                :func:`~rl_backends.policy.checkpoint_directory.check_fit`.
        """

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """The tensors of the model as they are now, under their Hugging Face names.

        Called once for each refit, and closed once; also for a description
        (``prepare_refit_info``) that no refit follows.
        """

    @abstractmethod
    def on_shutdown(self) -> None:
        """Frees the model and its memory; called once."""

    def accumulate(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        share: Callable[[int, torch.Tensor], torch.Tensor],
        wanted: LossInputType,
        *,
        learn: bool,
    ) -> None:
        """Computes the loss of microbatches, and adds up their gradients.

        A trainer that schedules microbatches itself (a pipeline) overrides it.

        Args:
            parts: The microbatches, as :meth:`forward` takes them. Workers may have different
                numbers of them.
            share: Called with the index of a microbatch and what :meth:`forward` made of it;
                returns its 0-d share of the loss. On workers that report no results it need not
                be called.
            wanted: See :meth:`forward`.
            learn: Whether gradients are wanted.
        """
        for number, rows in enumerate(parts):
            loss = share(number, self.forward(rows, wanted))
            if learn and loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]

    def forward_all(
        self, parts: Sequence[BatchedDataDict[Any]], wanted: LossInputType
    ) -> Iterable[torch.Tensor]:
        """:meth:`forward` of several microbatches, in their order.

        A pipeline, which should not run empty between two of them, overrides it.
        """
        return (self.forward(rows, wanted) for rows in parts)

    def topk_all(
        self, parts: Sequence[BatchedDataDict[Any]], k: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """:meth:`topk` of several microbatches, likewise."""
        return (self.topk(rows, k) for rows in parts)

    def topk(self, rows: BatchedDataDict[Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest logits of one microbatch, for a policy that declares ``topk_logits``.

        Args:
            rows: See :meth:`forward`.
            k: At least 1, at most the vocabulary.

        Returns:
            ``[b, s-1, k]`` float32 with the temperature, descending, and int64 indices; 0 where
            nothing is predicted.
        """
        raise NotImplementedError(f"{type(self).__name__} has no topk")

    def on_wake(self, parts: frozenset[str]) -> None:
        """Brings ``"model"`` or ``"optimizer"`` to where they compute. Idempotent."""

    def on_sleep(self, parts: frozenset[str]) -> None:
        """Frees the device memory of ``"model"`` or ``"optimizer"``. Idempotent.

        Where the tensors of the model leave their memory, :meth:`weights_moved` is to be called.
        """
