"""The part of the base class of policy backends that hands weights over."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rl_backends.changes import WeightChanges
from rl_backends.policy.loop_checks import LoopChecks
from rl_backends.rank_job import follow
from rl_backends.sources import GuardedSource
from rl_backends.spellings import LoopPolicy, SendsWeights
from rl_core.errors import CapabilityError
from rl_core.weights import RefitSender, SendOptions

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import (
        Future,
        GenerationDatumSpec,
        WeightSource,
        WorkerContext,
    )
    from rl_core.weights.sending.ranks import Ranks

__all__ = ["PolicyRefits"]


class PolicyRefits(SendsWeights, LoopPolicy):
    """Both generations of the refit methods, over a weight source.

    Args:
        worker: Given when it is one of several workers, all of which are called for a refit. The
            first one decides on it. Where it does not have all weights itself, each sets
            :attr:`refit_ranks` when it is built, and its :meth:`weight_source` gives the pieces
            that it has.

    Attributes:
        config: What the policy was built with; a subclass sets it.
        worker: Who this is, if it is one of several workers.
        refit_ranks: Those that a refit needs (:class:`~rl_backends.refit_ranks.RefitRanks`); None
            if the first worker has all weights itself.
        loop_checks: Refuses, or warns of, training calls that would go wrong without a word.
        changes: What changes the weights does so in ``with self.changes.declared()``; a refit that
            reads them meanwhile then fails.
    """

    config: Mapping[str, Any]

    def __init__(self, worker: WorkerContext | None = None) -> None:
        self.worker = worker
        self.changes = WeightChanges()
        self._sender = RefitSender(self.refit_source, name=type(self).__name__)
        self.loop_checks = LoopChecks(
            lambda: getattr(self, "config", {}),
            lambda: self.weights_version,
            # The driver checks the rows before it sends them to its workers.
            lambda: 0 if worker else self.weights_origin,
        )

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """The tensors of the model as they are now; called once for each refit, and closed once.

        Also for a description (``prepare_refit_info``) that no refit follows.
        """

    # -- refit ----------------------------------------------------------------------------------

    def refit_source(self) -> WeightSource:
        """What a refit reads: :meth:`weight_source`, as long as its tensors are of one state."""
        unchanged = self.changes.watch()
        return GuardedSource(self.weight_source(), unchanged, state=lambda: self.changes.state)

    @property
    def refit_ranks(self) -> Ranks | None:  # noqa: D102
        return self._sender.ranks

    @refit_ranks.setter
    def refit_ranks(self, ranks: Ranks) -> None:
        self._sender.ranks = ranks

    @property
    def weights_origin(self) -> int:
        """Identifies this trainer; 0 on every worker but the one that sends weights."""
        return super().weights_origin if self._sends else 0

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """See :meth:`ColocatablePolicyInterface.prepare_refit_info`; None on all but one worker."""
        return super().prepare_refit_info() if self._sends else None

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """See :meth:`ColocatablePolicyInterface.init_collective`."""
        if not self._sends:
            return []
        return super().init_collective(ip, port, world_size, train_world_size=train_world_size)

    def send_weights(self, **options: Any) -> list[Future]:
        """Sends, or takes part in the refit of the worker that does."""
        if self._sends:
            return super().send_weights(**options)
        if self.refit_ranks is not None:
            return [follow(self._sender, **options)]
        SendOptions.of(options)  # refused on all ranks alike
        return []

    def close_refits(self) -> None:
        """Ends all refits, and closes sockets and shared memory; for ``shutdown``. Idempotent.

        Raises:
            DeadlineError: A refit hangs in the backend's code.
        """
        self._sender.close()

    def weights_moved(self) -> None:
        """To be called when the weights have left the memory that engines read them in.

        A direct refit moved them there, and the next one moves them again. Waits for a refit that
        is running.

        Raises:
            DeadlineError: That refit hangs.
        """
        self._sender.release_weights()

    @property
    def _sends(self) -> bool:
        return self.worker is None or self.worker.rank == 0

    # -- optional capabilities ------------------------------------------------------------------

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        raise self._refuse("FP8 scales", "use a backend that declares fp8_kv_scales")

    def _refuse(self, what: str, fix: str) -> CapabilityError:
        return CapabilityError(f"{type(self).__name__} does not offer {what}", fix=fix)
