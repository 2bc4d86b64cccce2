"""What a generation backend needs of the receiving side of refits, wherever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import concurrent.futures


class Receiver(Protocol):
    """A :class:`rl_core.weights.RefitReceiver`, or what stands for several in other processes."""

    @property
    def version(self) -> int:
        """Last committed version, 0 at first."""

    @property
    def origin(self) -> int:
        """Of the trainer whose version that is, 0 at first."""

    def check(self) -> None:
        """Raises WeightsTornError unless the weights are whole."""

    def prepare(self, info: dict[str, Any]) -> None:
        """Takes what the sender's ``prepare`` returned."""

    def open(
        self, transport: str, deadline_s: float, address: dict[str, Any]
    ) -> concurrent.futures.Future[None]:
        """Goes to where a sender listens on a transport."""

    def receive(
        self, *, transport: str = ..., deadline_s: float = ..., refit_id: str = ...
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts to take one refit."""

    def cancel(self, refit_id: str) -> None:
        """Ends a refit that failed on its other side."""

    def load_handles(self, handles: dict[str, Any]) -> bool:
        """Loads one group of tensors by handles."""

    def release_weights(self) -> None:
        """Drops what is kept of the engine's tensors, before they sleep."""

    def close(self) -> None:
        """Ends every refit."""
