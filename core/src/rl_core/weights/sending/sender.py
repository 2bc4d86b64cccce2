"""The trainer's endpoint: hands its tensors to any number of engines, refit after refit."""

from __future__ import annotations

import concurrent.futures
from contextlib import closing
from typing import TYPE_CHECKING, Any

from rl_core.errors import RefitError
from rl_core.ports import default_address, free_port
from rl_core.weights.connections import Connection
from rl_core.weights.engine_lock import exclusively
from rl_core.weights.job import Endpoint
from rl_core.weights.options import DEFAULT_DEADLINE_S, SendOptions
from rl_core.weights.protocol.handshake import introduction
from rl_core.weights.protocol.messages import Abort
from rl_core.weights.protocol.session import Phase, describe
from rl_core.weights.sending.kept import Kept
from rl_core.weights.sending.send_job import SendJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces.weights import WeightSource
    from rl_core.weights.job import Runtime
    from rl_core.weights.sending.ranks import Ranks
    from rl_core.weights.transports.base import SenderEnd

__all__ = ["RefitSender"]

#: The transport that every sender offers without an address from the user.
_LOCAL = "ipc"


class RefitSender(Endpoint[Any]):
    """Sends a trainer's weights; one on each of its ranks, for the trainer's whole life.

    Sockets and buffers are made at the first use and kept. Refits run one after another; a
    new request supersedes those that still wait for their receivers.

    Args:
        source: Gives the tensors as they are now; called once for each refit, and for a description
            that no refit follows. Each one is closed once.
        name: How errors on the other side call this one.
        runtime: What its refits take from outside, such as their clock.

    Attributes:
        kept: What it has committed, and memory for the next refit.
        ranks: All of the trainer, if it has several; set before the first refit. Rank 0 sends; how
            the others take part is :mod:`rl_backends.rank_job`.
    """

    def __init__(
        self, source: Callable[[], WeightSource], *, name: str, runtime: Runtime | None = None
    ) -> None:
        super().__init__(name, runtime)
        self.kept = Kept()
        self.ranks: Ranks | None = None
        self._source = source
        self._described: WeightSource | None = None

    @property
    def version(self) -> int:
        """Last committed version, 0 at first."""
        return self.kept.version

    @property
    def origin(self) -> int:
        """Identifies this trainer, for as long as this object lives."""
        return self.kept.origin

    # -- refits -----------------------------------------------------------------------------------

    def source(self) -> WeightSource:
        """The tensors as they are now, for one refit."""
        return self._source()

    def prepare(self) -> dict[str, Any]:
        """Describes every tensor and where to fetch them, for the engine's ``prepare``.

        The ``number`` in it is that of the next refit, which sends from the source that was
        described if it is given a number.
        """
        with self.asking:  # or else two callers would each make an end
            self.check_open()
            self._drop_described()
            self._described = self._source()
            manifest = self.kept.manifest_of(self._described)
            lacks = {}
            try:
                self.connection(_LOCAL)
            except RefitError as error:  # who uses another transport does not need this one
                lacks[_LOCAL] = str(error)
            return {
                **introduction(manifest, self.kept.token),
                "number": self.number + 1,
                "host": default_address(),
                "port": free_port(),
                "lacks": lacks,
                "addresses": {n: dict(c.end.address) for n, c in self.kept.connections.items()},
            }

    def names(self) -> list[str]:
        """The names of all tensors."""
        self.check_open()
        with closing(self._source()) as source:
            return [spec.name for spec in source.specs()]

    def open(
        self, transport: str, deadline_s: float, **options: Any
    ) -> concurrent.futures.Future[None]:
        """Opens a transport that needs an address to listen on; closes an earlier one first."""
        self.check_open()
        for job in self.waiting():
            if job.options.transport == transport:
                job.cancelled = f"the transport {transport} was opened again"
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            self.kept.connections.close(transport)
            end = self.runtime.transport(transport).sender(**options)
            self.kept.connections[transport] = Connection(end)
        return self.runtime.spawn(f"{transport}-{self.name}", lambda: end.rendezvous(deadline_s))

    def send(self, **options: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts one refit. All ranks learn how it ends, also if it cannot begin."""
        with self.asking:
            self.check_open()
            number = self.next_number(SendOptions.of({"number": options.get("number")}).number)
            try:
                return self._send(SendOptions.of(options), number)
            except BaseException as error:
                self._never_begins(number, error)
                raise

    def _send(self, chosen: SendOptions, number: int) -> concurrent.futures.Future[dict[str, Any]]:
        self.number = number
        try:
            connection = self.connection(chosen.transport)
        except RefitError as error:
            self._never_begins(number, error)
            failed: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
            failed.set_exception(error)
            return failed
        begun = [job for job in self.jobs if job not in self.waiting()]
        # One that is committed counts at once, whatever its thread still has to do.
        going = [j.version for j in begun if j.session.phase not in (Phase.ABORTED, Phase.TORN)]
        following = max([self.version, *going[-1:]]) + 1
        version = chosen.version or following
        if chosen.number is None:  # the weights may have changed since
            self._drop_described()
        described, self._described = self._described, None
        source = self._source() if described is None else described
        try:
            job = SendJob(self, self.kept, self.ranks, connection, source, chosen, version, number)
        except BaseException:
            source.close()
            raise
        return self.start(job)

    def cancel(self, number: int) -> bool:
        """See :meth:`Endpoint.cancel`; the other ranks learn of it, too."""
        found = super().cancel(number)
        if not found:
            self._never_begins(number, RefitError("it was cancelled before it began"))
        return found

    def _never_begins(self, number: int, error: BaseException) -> None:
        """Informs the other ranks that this refit ends before it has begun."""
        if self.ranks is not None and self.ranks.rank == 0:
            self.number = max(self.number, number)
            self.ranks.end(number, Abort("", *describe(error)), {}, set())

    def _drop_described(self) -> None:
        described, self._described = self._described, None
        if described is not None:
            described.close()

    def connection(self, transport: str) -> Connection[SenderEnd]:
        """This side of a transport."""
        if (kept := self.kept.connections.get(transport)) is not None:
            try:
                kept.end.check_room()
            except RefitError:
                with self.between_refits() as idle:
                    if idle:
                        self.kept.connections.close(transport)
                raise
            return kept
        made = self.kept.connections[transport] = Connection(
            self.runtime.transport(transport).sender()
        )
        return made

    def release_weights(self) -> None:
        """Closes the memory that engines read the trainer's tensors in.

        To be called when the tensors have left it (a trainer that gives its device away); the
        next direct refit moves them again. Waits for a refit that is running.
        """
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self.kept.drop_moved_tensors()

    def release_resources(self) -> None:  # noqa: D102
        self._drop_described()
        if self.ranks is not None:
            self.ranks.close()
        self.kept.drop_moved_tensors()
        for transport in list(self.kept.connections):
            self.kept.connections.close(transport)
