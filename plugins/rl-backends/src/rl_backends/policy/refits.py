"""The part of the base class of policy backends that hands weights over."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rl_backends.gathering import GatheredSource
from rl_backends.policy.loop_checks import Admission
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import ColocatablePolicyInterface
from rl_core.weights import DEFAULT_DEADLINE_S, RefitSender, SendOptions
from rl_core.weights.options import MAX_DEADLINE_S
from rl_core.weights.sending.sources import GuardedSource, WeightChanges

if TYPE_CHECKING:
    import concurrent.futures
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


class PolicyRefits(ColocatablePolicyInterface):
    """Both generations of the refit methods, over a weight source.

    Args:
        worker: Given when it is one of several workers, all of which are called for a refit. The
            first one sends. Where it does not have all weights itself, each sets
            :attr:`refit_ranks` when it is built, and :meth:`weight_source` returns a
            :class:`~rl_core.weights.GatheredSource`.

    Attributes:
        config: What the policy was built with; a subclass sets it.
        worker: Who this is, if it is one of several workers.
        refit_ranks: Those that a refit needs; None if the first worker has all weights itself.
        admission: Refuses, or warns of, training calls that would go wrong without a word.
        changes: What changes the weights does so in ``with self.changes.declared()``; a refit that
            reads them meanwhile then fails.
    """

    config: Mapping[str, Any]

    def __init__(self, worker: WorkerContext | None = None) -> None:
        self.worker = worker
        self.refit_ranks: RefitRanks | None = None
        self._streams = self._sets = 0  # that this rank was asked for: all ranks are for the same
        self._following: concurrent.futures.Future[None] | None = None
        self.changes = WeightChanges()
        self._sender = RefitSender(self.refit_source, name=type(self).__name__)
        self.admission = Admission(
            lambda: getattr(self, "config", {}),
            lambda: self.weights_version,
            # The driver checks the rows before it sends them to its workers.
            lambda: 0 if worker else self.weights_origin,
        )
        self._collective_receivers = 1

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
    def weights_version(self) -> int:
        """The version of the last refit that was committed; 0 before the first."""
        return self._sender.version

    @property
    def weights_origin(self) -> int:
        """Identifies this trainer; 0 on every worker but the one that sends weights."""
        return self._sender.origin if self._sends else 0

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """See :meth:`ColocatablePolicyInterface.prepare_refit_info`; None on all but one worker."""
        return self._sender.prepare() if self._sends else None

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """See :meth:`ColocatablePolicyInterface.stream_weights_via_ipc_zmq`."""
        return self._send(*args, **kwargs)

    def cancel_refit(self, refit_id: str) -> None:
        """See :meth:`ColocatablePolicyInterface.cancel_refit`."""
        self._sender.cancel(refit_id)

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """See :meth:`ColocatablePolicyInterface.prepare_weights_for_ipc`."""
        before, self._sets = f"set {self._sets}", self._sets + 1
        call_id, ranks = f"set {self._sets}", self.refit_ranks
        if not self._sends:
            if ranks is not None:
                self._following = ranks.follower.follow(self._part, call_id, MAX_DEADLINE_S)
            return []
        if ranks is not None and self._sets > 1:
            ranks.leader.dismiss(before, "another set was begun")  # also one that was never read
        try:
            return self._sender.groups(*args, rank_call_id=call_id, **kwargs)
        except BaseException as error:
            if ranks is not None:
                ranks.leader.dismiss(call_id, str(error))
            raise

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """See :meth:`ColocatablePolicyInterface.get_weights_ipc_handles`."""
        if self._sends:
            return self._sender.handles(keys)
        if self._following is not None and self._following.done():
            self._following.result()  # why it ended, if it was not complete
        return {}

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """See :meth:`ColocatablePolicyInterface.init_collective`."""
        if not self._sends:
            return []
        receivers = world_size - train_world_size
        self._collective_receivers = receivers
        opened = self._sender.open(
            "collective", DEFAULT_DEADLINE_S, ip=ip, port=port, receivers=receivers
        )
        return [opened]

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> list[Future]:
        """See :meth:`ColocatablePolicyInterface.broadcast_weights_for_collective`."""
        options.setdefault("receivers", self._collective_receivers)
        return self._send(transport="collective", kv_scales=kv_scales or {}, **options)

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

    def _send(self, **options: Any) -> list[Future]:
        """Sends, or follows who does."""
        self._streams += 1
        call_id, ranks = options.get("refit_id") or f"call {self._streams}", self.refit_ranks
        if not self._sends:
            deadline_s = SendOptions.of(options).deadline_s
            return [ranks.follower.follow(self._part, call_id, deadline_s)] if ranks else []
        if ranks is None:
            return [self._sender.send(**options)]
        leader = ranks.leader
        try:
            sending = self._sender.send(call_id, **options)
        except BaseException as error:
            leader.dismiss(call_id, str(error))
            raise
        sending.add_done_callback(lambda done: leader.dismiss(call_id, str(done.exception() or "")))
        return [sending]

    def _part(self) -> GatheredSource:
        """This rank's part of what is gathered."""
        source = self.weight_source()
        if not isinstance(source, GatheredSource):
            raise ConfigError(
                f"{type(self).__name__} has ranks that a refit needs, and a weight source that "
                f"does not gather: {type(source).__name__}",
                fix="return a rl_core.weights.GatheredSource, or leave refit_ranks out",
                key="refit_ranks",
            )
        return source

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
