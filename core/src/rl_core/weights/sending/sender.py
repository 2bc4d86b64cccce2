"""The trainer's endpoint: hands its tensors to any number of engines, refit after refit."""

from __future__ import annotations

import concurrent.futures
import secrets
import socket
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any

from rl_core.errors import RefitError
from rl_core.ports import free_port
from rl_core.weights.engine_lock import exclusively
from rl_core.weights.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.protocol.handshake import introduction
from rl_core.weights.protocol.session import Phase
from rl_core.weights.sending.send_job import SendJob
from rl_core.weights.sending.sender_base import SenderBase
from rl_core.weights.sending.shared_tensors import SharedTensors

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.job import Runtime

__all__ = ["RefitSender"]

#: The transport that every sender offers without an address from the user.
_LOCAL = "ipc"


class RefitSender(SenderBase[SendJob]):
    """Sends a trainer's weights; one for the trainer's whole life.

    Sockets and buffers are made at the first use and kept. Refits run one after another; a
    new request supersedes those that still wait for their receivers.

    Args:
        source: Gives the tensors as they are now; called once for each refit, and for a description
            that no refit follows. Each one is closed once.
        name: How errors on the other side call this one.
        runtime: What its refits take from outside, such as their clock.

    Attributes:
        calls: How many refits were requested.
    """

    def __init__(
        self, source: Callable[[], WeightSource], *, name: str, runtime: Runtime | None = None
    ) -> None:
        super().__init__(name, runtime)
        self.calls = 0
        self._source = source
        self._described: tuple[str, WeightSource] | None = None

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Describes every tensor and where to fetch them, for the engine's ``prepare``.

        The refit that is given the ``refit_id`` in it sends from the source that was described.
        """
        with self.asking:  # or else two callers would each make an end
            self.check_open()
            self._drop_described()
            refit_id, source = secrets.token_hex(8), self._source()
            self._described = refit_id, source
            manifest = self.manifest_of(source)
            with suppress(RefitError):  # who uses another transport does not need this one
                self.end(_LOCAL)
            return {
                **introduction(manifest, self.token),
                "refit_id": refit_id,
                **_meeting_point(),
                "addresses": {name: dict(end.address) for name, end in self.ends.items()},
            }

    def names(self) -> list[str]:
        """The names of all tensors."""
        self.check_open()
        with closing(self._source()) as source:
            return [spec.name for spec in source.specs()]

    def open(
        self, transport: str, deadline_s: float, **options: Any
    ) -> concurrent.futures.Future[None]:
        """Opens a transport that needs an address to listen on; closes an earlier one first.

        Returns:
            A future that is done when the receivers are there.
        """
        self.check_open()
        for job in self.waiting():
            if job.options.transport == transport:
                job.cancelled = f"the transport {transport} is opened anew"
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            self.close_end(transport)
            end = self.ends[transport] = self.runtime.transport(transport).sender(**options)
        return self.runtime.spawn(f"{transport}-{self.name}", lambda: end.rendezvous(deadline_s))

    def send(
        self, rank_call_id: str = "", /, **options: Any
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts one refit.

        Args:
            rank_call_id: What every rank of the trainer calls it.
            **options: Those of :class:`~rl_core.weights.options.SendOptions`.

        Returns:
            A future of :class:`RefitReport` as a dict.

        Raises:
            ConfigError: An option is unknown or not legal.
        """
        with self.asking:
            self.calls += 1
            self.check_open()
            chosen = SendOptions.of(options)
            try:
                end = self.end(chosen.transport)
            except RefitError as error:
                failed: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
                failed.set_exception(error)
                return failed
            begun = [job for job in self.jobs if job not in self.waiting()]
            # One that is committed counts at once, whatever its thread still has to do.
            going = [j.version for j in begun if j.session.phase not in (Phase.ABORTED, Phase.TORN)]
            following = max([self.version, *going[-1:]]) + 1
            version = chosen.version or following
            for job in self.waiting():
                job.supersede("a newer refit was asked for")
            if self._described is not None and self._described[0] == chosen.refit_id:
                (_, source), self._described = self._described, None
            else:
                self._drop_described()
                source = self._source()
            try:
                call_id = rank_call_id or f"call {self.calls}"
                job = SendJob(self, end, source, chosen, version, call_id)
            except BaseException:
                source.close()
                raise
            return self.start(job)

    def _drop_described(self) -> None:
        described, self._described = self._described, None
        if described is not None:
            described[1].close()

    # -- what is kept -----------------------------------------------------------------------------

    def release_weights(self) -> None:
        """Closes the memory that engines read the trainer's tensors in.

        To be called when the tensors have left it (a trainer that gives its device away); the
        next direct refit moves them again. Waits for a refit that is running.

        Raises:
            DeadlineError: That refit hangs.
        """
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self.drop_moved_tensors()

    def release_resources(self) -> None:  # noqa: D102
        self._drop_described()
        self.moved = SharedTensors()
        self._close_lanes(list(self._lanes))
        for end in self.ends.values():
            end.close()
        self.ends.clear()


def _meeting_point() -> dict[str, Any]:
    """The address under which other hosts most likely reach this one, and a port that is free."""
    host = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        host = probe.getsockname()[0]
    return {"host": host, "port": free_port()}
