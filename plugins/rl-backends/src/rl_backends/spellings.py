"""The methods of a refit by all the names that loops call them, over one sender or one receiver.

A trainer derives from :class:`SendsWeights`, an engine from :class:`TakesWeights`. What has no
sender or receiver here, such as several engines or workers as one, supplies the first methods of
each itself; the others follow from those. A policy derives from :class:`LoopPolicy`, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from rl_core.errors import ConfigError
from rl_core.futures import wait
from rl_core.interfaces import ColocatablePolicyInterface
from rl_core.weights.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.protocol.timing import DRIVER_GRACE_S

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Mapping

    from rl_core.interfaces import Future
    from rl_core.weights.sending.sender import RefitSender

__all__ = ["AxisSizes", "LoopPolicy", "Receiver", "SendsWeights", "TakesWeights"]


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Into how many parts a trainer divides what, by axis."""

    sizes: Mapping[str, int]

    def get_axis_size(self, axis: str) -> int:
        """The number of parts along an axis, such as ``"data_parallel"``.

        Raises:
            ConfigError: There is no such axis.
        """
        if axis not in self.sizes:
            raise ConfigError(
                f"the trainer has no axis {axis!r}", fix=f"ask for one of {sorted(self.sizes)}"
            )
        return self.sizes[axis]


class LoopPolicy(ColocatablePolicyInterface):
    """A policy with what NeMo RL's loops call and the interface does not have."""

    def finalize_async_save(self) -> None:
        """Waits for a checkpoint that is still being written; here ``save_checkpoint`` did."""

    @property
    def sharding_annotations(self) -> AxisSizes:
        """The sizes of the trainer's axes, of which ``"data_parallel"`` is always there."""
        return AxisSizes({"data_parallel": self.data_parallel_size})


class SendsWeights:
    """A trainer's methods; each is documented in ``ColocatablePolicyInterface``."""

    _sender: RefitSender
    _collective_receivers = 1

    # -- supplied -------------------------------------------------------------------------------

    def prepare_refit_info(self) -> dict[str, Any] | None:  # noqa: D102
        return self._sender.prepare()

    def send_weights(self, **options: Any) -> list[Future]:  # noqa: D102
        return [self._sender.send(**options)]

    def cancel_refit(self, number: int) -> None:  # noqa: D102
        self._sender.cancel(number)

    def init_collective(  # noqa: D102
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        receivers = self._collective_receivers = world_size - train_world_size
        where = {"ip": ip, "port": port, "receivers": receivers}
        return [self._sender.open("collective", DEFAULT_DEADLINE_S, **where)]

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:  # noqa: D102
        del args, kwargs  # sizes of buffers are the refit's
        return [self._sender.names()]

    @property
    def weights_version(self) -> int:
        """The version of the last refit that was committed; 0 before the first."""
        return self._sender.version

    @property
    def weights_origin(self) -> int:
        """Identifies this trainer, for as long as this object lives."""
        return self._sender.origin

    # -- derived --------------------------------------------------------------------------------

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:  # noqa: D102
        return self.send_weights(*args, **kwargs)

    def broadcast_weights_for_collective(  # noqa: D102
        self, kv_scales: Mapping[str, float] | None = None, **options: Any
    ) -> list[Future]:
        options = {"receivers": self._collective_receivers, **options, "kv_scales": kv_scales or {}}
        return self.send_weights(transport="collective", **options)

    def get_weights_ipc_handles(self, keys: list[str], **options: Any) -> dict[str, Any]:
        """Starts a refit in the background.

        Returns:
            A ticket for an engine's :meth:`TakesWeights.update_weights`; empty on a rank that takes
            part and does not send.

        Raises:
            ConfigError: The keys are not those of all tensors, or an option is not legal.
        """
        [names] = self.prepare_weights_for_ipc()
        if wrong := set(keys) ^ set(names):
            raise ConfigError(
                f"{type(self).__name__}: keys must name all {len(names)} tensors; keys and names "
                f"differ in {', '.join(sorted(wrong)[:5])}",
                fix="pass the only group that prepare_weights_for_ipc returned, unchanged",
                key="keys",
            )
        chosen = SendOptions.of(options)
        info = self.prepare_refit_info()
        if info is None:
            self.send_weights(**options)
            return {}
        self.send_weights(**{**options, "number": info["number"]})
        return {**info, "receivers": chosen.receivers, "deadline_s": chosen.deadline_s}


class Receiver(Protocol):
    """A :class:`rl_core.weights.RefitReceiver`, or what stands for several in other processes."""

    @property
    def version(self) -> int:
        """Last committed version, 0 at first."""

    @property
    def origin(self) -> int:
        """Identifies the trainer of that version; 0 at first."""

    def check(self) -> None:
        """Raises WeightsTornError unless the weights are whole."""

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned."""

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any]
    ) -> concurrent.futures.Future[None]:
        """Goes to where a sender listens on a transport."""

    def receive(
        self, *, transport: str = ..., deadline_s: float = ..., number: int | None = ...
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit."""

    def cancel(self, number: int) -> object:
        """Ends a refit that failed on its other side."""

    def release_weights(self) -> None:
        """Drops what is kept of the engine's tensors, before they sleep."""

    def close(self) -> None:
        """Ends every refit."""


class TakesWeights:
    """An engine's methods; each is documented in ``GenerationInterface``."""

    _receiver: Receiver
    #: Engines behind this object that take a refit each; a proxy over replicas has more.
    receiver_count = 1

    def _check_open(self, method: str) -> None:
        """Raises if the engine was shut down; by default its receiver does."""

    # -- supplied -------------------------------------------------------------------------------

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:  # noqa: D102
        self._check_open("prepare_refit_info")
        self._receiver.prepare(state_dict_info)

    def receive_weights(self, **options: Any) -> list[Future]:  # noqa: D102
        self._check_open("receive_weights")
        return [self._receiver.receive(**options)]

    def cancel_refit(self, number: int) -> None:  # noqa: D102
        self._receiver.cancel(number)

    def init_collective(  # noqa: D102
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        self._check_open("init_collective")
        del world_size, train_world_size  # the trainer counts
        return [self._receiver.open("collective", DEFAULT_DEADLINE_S, {"ip": ip, "port": port})]

    @property
    def weights_version(self) -> int:
        """Version of the weights that are installed; 0 until the first refit commits."""
        return self._receiver.version

    @property
    def weights_origin(self) -> int:
        """Identifies the trainer of that version; 0 until the first refit commits."""
        return self._receiver.origin

    # -- derived --------------------------------------------------------------------------------

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:  # noqa: D102
        return self.receive_weights(*args, **kwargs)

    def update_weights_from_collective(  # noqa: D102
        self, info: dict[str, Any] | None = None, **options: Any
    ) -> list[Future]:
        if info is not None:
            self.prepare_refit_info(info)
        return self.receive_weights(transport="collective", **options)

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """Takes the refit of a ticket.

        Raises:
            ConfigError: The ticket is for fewer engines than there are behind this object.
        """
        self.prepare_refit_info(ipc_handles)
        receivers = ipc_handles.get("receivers", 1)
        if receivers < self.receiver_count:
            raise ConfigError(
                f"{type(self).__name__}: the ticket has receivers={receivers}, but this engine has "
                f"{self.receiver_count}",
                fix=f"call get_weights_ipc_handles(keys, receivers={self.receiver_count})",
                key="receivers",
            )
        deadline_s = ipc_handles.get("deadline_s", DEFAULT_DEADLINE_S)
        receiving = self.receive_weights(number=ipc_handles.get("number"), deadline_s=deadline_s)
        wait(receiving, deadline_s + DRIVER_GRACE_S)
        return True
