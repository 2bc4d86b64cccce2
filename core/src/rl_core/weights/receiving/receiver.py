"""The engine's endpoint: takes refits, and knows whether the weights are whole."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from rl_core.errors import LifecycleError, WeightsTornError
from rl_core.weights.data.manifest import compare
from rl_core.weights.engine_lock import exclusively
from rl_core.weights.job import keep_two
from rl_core.weights.options import DEFAULT_DEADLINE_S, check_deadline
from rl_core.weights.protocol.handshake import trainer_of
from rl_core.weights.receiving.receive_job import ReceiveJob
from rl_core.weights.receiving.receiver_base import ReceiverBase

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSink
    from rl_core.weights.engine_lock import Lock
    from rl_core.weights.job import Runtime
    from rl_core.weights.protocol.handshake import SenderInfo

__all__ = ["RefitReceiver"]

#: Seconds between looks at whether the trainer still has the memory that is mapped here.
_LOOK_S = 5.0


class RefitReceiver(ReceiverBase[ReceiveJob]):
    """Takes weights into an engine; one for the engine's whole life.

    Args:
        sink: Makes what is written to; called once for each refit, and for a description that no
            refit follows.
        name: How errors on the other side call this one.
        lock: Held while the engine generates, and by a refit while it writes.
        on_commit: Called with the new version before it serves; drops caches.
        runtime: What its refits take from outside, such as their clock.
    """

    def __init__(
        self,
        sink: Callable[[], WeightSink],
        *,
        name: str,
        lock: Lock,
        on_commit: Callable[[int], None] | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        super().__init__(name, sink, lock, on_commit, runtime)
        self._trainer: SenderInfo | None = None
        self._trainers: dict[str, SenderInfo] = {}  # of the last refits that it was prepared for
        self._looked = 0.0
        self._earlier: ReceiveJob | None = None

    # -- what the engine has ----------------------------------------------------------------------

    def check(self) -> None:
        """Raises unless the weights are whole.

        Now and then it looks whether the trainer has ended, and then unmaps the trainer's memory.

        Raises:
            WeightsTornError: A refit failed.
        """
        with self.between_refits() as idle:
            if idle and (now := self.runtime.clock()) >= self._looked + _LOOK_S:
                self._looked = now
                # A trainer that has ended: its own memory may be its whole model.
                direct = self._direct_lanes().items()
                if left := [key for key, lane in direct if lane.sender_gone()]:
                    self._close_lanes(left)
                    self.remove_leftovers(self._trainer)
        if self.torn:
            raise WeightsTornError(
                f"{self.name}: the weights are partly of version {self.version} and partly newer, "
                "or were dropped",
                fix="refit again; the engine needs no restart",
                version=self.version,
            )

    def dropped(self) -> None:
        """The engine dropped its weights: it is torn until a full refit commits."""
        self.torn = True
        self.forget()

    def release_weights(self) -> None:
        """Drops what refits keep of the engine's tensors, so that their memory can be freed.

        A refit that is under way ends: the tensors that it knows may not be the engine's any more.
        Its thread goes on with the dicts that it has, and what they hold is dropped with it.
        """
        self.outside_changes += 1
        self._prepared = None
        self.buckets = {}
        self.second_copy = {}

    def release_resources(self) -> None:
        """Closes everything. Idempotent."""
        self.release_weights()
        self.remove_leftovers(self._trainer)
        for transport in list(self.ends):
            self.disconnect(transport)

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned.

        Raises:
            RefitProtocolError: It is not such a dict, or of another protocol version.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self.check_open()
        changes = self.outside_changes
        sink = self.new_sink()
        match = partial(compare, expected=self.manifest_of(sink), casts=sink.casts)
        trainer = trainer_of(info, match, self._trainer)
        self.device = torch.device(sink.device)
        self._prepared = str(info.get("refit_id")), changes, sink
        for job in self.waiting():
            if job.trainer != trainer:
                job.supersede("the engine was prepared for other tensors or another trainer")
        before, self._trainer = self._trainer, trainer
        keep_two(self._trainers, str(info.get("refit_id")), trainer)
        if before is not None and before.token != trainer.token:
            # The earlier trainer may have died after its last refit, so that nobody cleaned up.
            self.remove_leftovers(before)
            with self.between_refits() as idle:  # what a running refit uses, the next replaces
                for transport, (address, _) in list(self.ends.items()):
                    if idle and address == before.addresses.get(transport):
                        self.disconnect(transport)
        self._earlier = self._last_waiting()

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any], **options: Any
    ) -> concurrent.futures.Future[None]:
        """Goes to where a sender listens on a transport, anew if it did before.

        Returns:
            A future that is done when the sender was found.
        """
        self.check_open()
        for job in self.waiting():
            if job.transport == transport:
                job.supersede(f"the transport {transport} is opened anew")
        check_deadline(deadline_s)
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            end = self._connect(transport, address, options)
        return self.meeting(end, deadline_s)

    def receive(
        self,
        *,
        transport: str = "ipc",
        deadline_s: float = DEFAULT_DEADLINE_S,
        refit_id: str = "",
        lock: Lock | None = None,
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit from the sender that ``prepare`` was given for its id, or last.

        Args:
            transport: Name of the transport that the sender uses.
            deadline_s: Seconds for the whole refit, the wait for the sender included.
            refit_id: As the sender's call has it; empty if that names none.
            lock: Held while this refit writes; the receiver's by default.

        Returns:
            A future of a dict with ``version``, ``origin``, ``bytes``, ``seconds`` and ``name``;
            and ``replaced``, which is the version and origin of before if these were another
            trainer's, else None.

        Raises:
            LifecycleError: ``prepare`` was not called, or the sender does not offer the transport.
        """
        with self.asking:
            self.check_open()
            check_deadline(deadline_s)
            trainer = self._trainers.get(refit_id, self._trainer)
            if trainer is None:
                raise LifecycleError(
                    f"{self.name}: no trainer is known",
                    fix="call prepare_refit_info(policy.prepare_refit_info()) first",
                )
            try:
                trainer.address_of(transport, self.name)
            except LifecycleError as error:
                if transport in self.ends:  # the sender may wait for us there
                    self.ends[transport][1].refuse(str(error))
                raise
            job = ReceiveJob(self, transport, trainer, deadline_s, refit_id, lock)
            if refit_id:
                for older in self.waiting():
                    if not older.refit_id:  # those with an id learn the outcome from the sender
                        older.supersede("a newer refit was asked for")
            else:
                # Calls without ids are matched as they come: one that was waiting may
                # take the refit that this one is meant for, and both then report it.
                earlier, self._earlier = self._earlier or self._last_waiting(), None
                if earlier is not None and earlier.trainer == trainer:
                    job.earlier = earlier
            return self.start(job)

    def awaits_generation(self, refit: concurrent.futures.Future[dict[str, Any]]) -> bool:
        """Whether a refit waits for the engine to stop generating.

        Args:
            refit: What :meth:`receive` returned.
        """
        return any(job.future is refit and job.session.held_up for job in list(self.jobs))

    def _last_waiting(self) -> ReceiveJob | None:
        return next((job for job in reversed(self.waiting()) if not job.cancelled), None)
