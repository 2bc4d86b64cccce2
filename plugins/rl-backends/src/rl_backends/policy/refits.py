"""The part of the base class of policy backends that hands weights over."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rl_backends.gathering import GatheredSource
from rl_backends.gathering.changes import WeightChanges
from rl_backends.policy.loop_checks import LoopChecks
from rl_backends.spellings import SendsWeights
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import ColocatablePolicyInterface
from rl_core.weights import RefitSender, SendOptions
from rl_core.weights.sending.sources import GuardedSource

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends.gathering import RefitRanks
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import (
        Future,
        GenerationDatumSpec,
        WeightSource,
        WorkerContext,
    )

__all__ = ["PolicyRefits"]


class PolicyRefits(SendsWeights, ColocatablePolicyInterface):
    """Both generations of the refit methods, over a weight source.

    Args:
        worker: Given when it is one of several workers, all of which are called for a refit. The
            first one sends. Where it does not have all weights itself, each sets
            :attr:`refit_ranks` when it is built, and :meth:`weight_source` returns a
            :class:`~rl_backends.gathering.GatheredSource`.

    Attributes:
        config: What the policy was built with; a subclass sets it.
        worker: Who this is, if it is one of several workers.
        refit_ranks: Those that a refit needs; None if the first worker has all weights itself.
        loop_checks: Refuses, or warns of, training calls that would go wrong without a word.
        changes: What changes the weights does so in ``with self.changes.declared()``; a refit that
            reads them meanwhile then fails.
    """

    config: Mapping[str, Any]

    def __init__(self, worker: WorkerContext | None = None) -> None:
        self.worker = worker
        self.refit_ranks: RefitRanks | None = None
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
        return GuardedSource(self.weight_source(), unchanged)

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
        """Sends, or follows who does."""
        sender, ranks = self._sender, self.refit_ranks

        def part() -> GatheredSource:
            source = self.weight_source()
            if not isinstance(source, GatheredSource):
                raise ConfigError(
                    f"{type(self).__name__} sets refit_ranks, but its weight source does not "
                    f"gather tensors of other ranks: {type(source).__name__}",
                    fix="make weight_source return a GatheredSource, or leave refit_ranks out",
                    key="refit_ranks",
                )
            return source

        if ranks is None:
            SendOptions.of(options)  # refused on all ranks alike
            return super().send_weights(**options) if self._sends else []
        if self._sends:
            return [ranks.leader.send(sender, options)]
        with sender.asking:
            sender.number = sender.next_number(SendOptions(number=options.get("number")).number)
            deadline_s = SendOptions.of(options).deadline_s
            return [ranks.follower.follow(part, sender.number, deadline_s)]

    def cancel_refit(self, number: int) -> None:
        """See :meth:`ColocatablePolicyInterface.cancel_refit`."""
        if not self._sender.cancel(number) and self._sends and self.refit_ranks is not None:
            self.refit_ranks.leader.dismiss(number, "it was cancelled")

    def close_refits(self) -> None:
        """Ends all refits, and closes sockets and shared memory; for ``shutdown``. Idempotent.

        Raises:
            DeadlineError: A refit hangs in the backend's code.
        """
        self._sender.close()
        if self.refit_ranks is not None:
            self.refit_ranks.close()

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
