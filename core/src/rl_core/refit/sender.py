"""The trainer's endpoint: hands its tensors to any number of engines, refit after refit."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rl_core.errors import LifecycleError, RefitError
from rl_core.futures import spawn
from rl_core.refit._digests import Window
from rl_core.refit._handles import Handing
from rl_core.refit._introduction import introduction
from rl_core.refit._job import Endpoint, exclusively
from rl_core.refit._send_job import Sending
from rl_core.refit.arena import Arena
from rl_core.refit.manifest import WeightManifest
from rl_core.refit.messages import PROTOCOL
from rl_core.refit.options import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S, SendOptions
from rl_core.refit.plan import SLOTS, Planner
from rl_core.refit.session import Phase
from rl_core.refit.transports import find_transport

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable, Sequence

    import torch

    from rl_core.interfaces.weights import WeightSource
    from rl_core.refit._digests import DigestTable
    from rl_core.refit.hashing import BlockHash
    from rl_core.refit.plan import TransferPlan
    from rl_core.refit.transports.base import Lane, SenderEnd

__all__ = ["RefitSender", "name_of_call"]

#: The transport that every sender offers without being told where to listen.
_LOCAL = "ipc"


class RefitSender(Endpoint["Sending"]):
    """Sends a trainer's weights; one for the trainer's whole life.

    Sockets and buffers are made at the first use and kept. Refits run one after another; those
    that still wait for their receivers are given up when the next is asked for.

    Args:
        source: Gives the tensors as they are now; called once for each refit, and for a description
            that no refit follows. Each one is closed once.
        name: How errors on the other side call this one.

    Attributes:
        token: The secret that messages are authenticated with.
        committed: Digests of what was committed last, if it was hashed.
        planner: Keeps the last plans.
        arena: Knows the tensors that engines read where they are.
        calls: How often a refit was asked for.
    """

    def __init__(self, source: Callable[[], WeightSource], *, name: str) -> None:
        super().__init__(name)
        self.token = secrets.token_hex(32)
        self.committed: DigestTable | None = None
        self.planner = Planner()
        self._source = source
        self._manifest: WeightManifest | None = None
        self._ends: dict[str, SenderEnd] = {}
        self._lanes: dict[tuple[SenderEnd, bool], Lane] = {}
        self.arena = Arena()
        self._windows: list[Window] = []
        self._handing: Handing | None = None
        self._handings = 0
        self._described: tuple[str, WeightSource] | None = None
        self.calls = 0

    # -- refits -----------------------------------------------------------------------------------

    def prepare(self) -> dict[str, Any]:
        """Describes every tensor and where to fetch them, for the engine's ``prepare``.

        The refit that is given the ``refit_id`` in it sends from the source that was described.
        """
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
            "channels": {name: dict(end.address) for name, end in self._ends.items()},
        }

    def open(
        self, transport: str, deadline_s: float, **options: Any
    ) -> concurrent.futures.Future[None]:
        """Makes a transport ready that must be told where to listen, anew if it was before.

        Returns:
            A future that is done when the receivers are there.
        """
        self.check_open()
        for job in self.waiting():
            if job.options.transport == transport:
                job.cancelled = f"the transport {transport} is opened anew"
        with exclusively(self.turn, deadline_s, f"{self.name}: a running refit"):
            if (known := self._ends.pop(transport, None)) is not None:
                self._drop_lanes(known)
                known.close()
            end = self._ends[transport] = find_transport(transport).sender(**options)
        return spawn(f"{transport}-{self.name}", lambda: end.rendezvous(deadline_s))

    def send(self, **options: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Starts one refit.

        Args:
            **options: Those of :class:`~rl_core.refit.options.SendOptions`.

        Returns:
            A future of :class:`RefitReport` as a dict.

        Raises:
            ConfigError: An option is unknown or not legal.
            LifecycleError: There is no committed version to join.
        """
        self.calls += 1
        self.check_open()
        chosen = SendOptions.of(options)
        end = self.end(chosen.transport)
        version = self._next_version(chosen)
        for job in self.waiting():
            job.supersede("a newer refit was asked for")
        source = self._source_for(chosen.refit_id)
        try:
            name = name_of_call(chosen.refit_id, self.calls)
            job = Sending(self, end, source, chosen, version, name)
        except BaseException:
            source.close()
            raise
        return self.start(job)

    def _source_for(self, refit_id: str) -> WeightSource:
        """The source that was described for a refit, or a new one."""
        if self._described is not None and self._described[0] == refit_id:
            (_, source), self._described = self._described, None
            return source
        self._drop_described()
        return self._source()

    def _drop_described(self) -> None:
        described, self._described = self._described, None
        if described is not None:
            described[1].close()

    def _next_version(self, options: SendOptions) -> int:
        if options.join:
            if self.committed is None:
                raise LifecycleError(
                    f"{self.name}: nothing was committed that a late engine could be brought to",
                    fix='refit all engines with verify="wire" first',
                )
            return self.version
        if options.version is not None:
            return options.version
        begun = [job for job in self.jobs if job not in self.waiting()]
        # One that is committed counts at once, whatever its thread still has to do.
        going = [j.version for j in begun if j.session.phase not in (Phase.ABORTED, Phase.TORN)]
        return max([self.version, *going[-1:]]) + 1

    # -- the handles of old -----------------------------------------------------------------------

    def groups(self, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> list[list[str]]:
        """Begins a refit by handles: names in groups that fit a bucket (or of one larger tensor).

        Aliases and empty tensors are not listed: nothing is sent for them.
        """
        self.calls += 1
        self.check_open()
        if self._handing is not None:
            self._handing.close()
            self._handing = None
        self._drop_described()
        source = self._source()
        try:
            handing = Handing(
                self.end(_LOCAL),
                source,
                self.manifest_of(source),
                self._next_version(SendOptions()),
                serial=self._handings + 1,
                bucket_bytes=bucket_bytes,
                name=self.name,
                call=name_of_call("", self.calls),
            )
        except BaseException:
            source.close()
            raise
        self._handings, self._handing = self._handings + 1, handing
        return handing.groups

    def handles(self, keys: list[str]) -> dict[str, Any]:
        """Hands one group over; valid until the next call.

        Args:
            keys: One of :meth:`groups`.

        Returns:
            A dict for the engine's ``load_handles``, free of pickle.

        Raises:
            LifecycleError: :meth:`groups` was not called, or the weights changed since.
            ConfigError: A key is not a tensor of the model.
        """
        self.check_open()
        if self._handing is None:
            raise LifecycleError(
                f"{self.name}: handles were asked for before groups",
                fix="call prepare_weights_for_ipc first",
            )
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            frame = self._handing.hand_over(keys, self.token)
            if not self._handing.left:
                self.version = max(self.version, self._handing.version)
                self.committed = None
        return {"protocol": PROTOCOL, "frame": frame}

    # -- what is held, and asked for by the refits ------------------------------------------------

    def manifest_of(self, source: WeightSource) -> WeightManifest:
        """The source's manifest, the one that is known if nothing changed."""
        self._manifest = WeightManifest.of(source.specs(), self._manifest)
        return self._manifest

    def lane(
        self,
        end: SenderEnd,
        plan: TransferPlan,
        device: torch.device,
        receivers: Sequence[str],
        bucket_bytes: int,
    ) -> Lane:
        """A lane for a plan: the one at hand if it fits, so that memory is touched once."""
        key = (end, plan.direct)
        most = plan.lane_bytes if plan.direct else max(plan.lane_bytes, SLOTS * bucket_bytes)
        lane = self._lanes.get(key)
        if lane is not None:
            if (
                plan.lane_bytes <= lane.data.numel() <= most
                and lane.data.device == device
                and lane.serves(receivers)
            ):
                return lane
            del self._lanes[key]
            lane.close()
        make = end.home if plan.direct else end.lane
        lane = self._lanes[key] = make(plan.lane_bytes, device, receivers)
        return lane

    def window(self, plan: TransferPlan, lane: Lane, block_hash: BlockHash) -> Window:
        """The plan's segments in a lane, whose views are made once."""
        for window in self._windows:
            same = window.plan is plan and window.data is lane.data
            if same and window.block_hash == block_hash:
                return window
        self._windows = [Window(plan, lane.data, block_hash), *self._windows[:1]]
        return self._windows[0]

    def drop_lanes_after_failure(self) -> None:
        """Lets go of buffers that a receiver may still read which did not hear of the failure.

        What is written next goes elsewhere. The trainer's own memory (``direct``) stays: it cannot
        be taken from under the weights, and what is read there late is verified like all else.
        """
        for (end, direct), lane in list(self._lanes.items()):
            if not (direct and lane.outlives_failure):
                del self._lanes[end, direct]
                self._windows = [w for w in self._windows if w.data is not lane.data]
                lane.close()

    def let_go_of_weights(self) -> None:
        """Lets go of the memory that engines read the trainer's tensors in.

        To be called when the tensors have left it (a trainer that gives its device away); the
        next direct refit moves them again. Waits for a refit that is running.

        Raises:
            DeadlineError: That refit hangs.
        """
        with exclusively(self.turn, DEFAULT_DEADLINE_S, f"{self.name}: a running refit"):
            self._forget_weights()

    def stay_put(self, manifest: WeightManifest, why: str) -> None:
        """There was no memory to move the tensors to; they are packed until that is tried again."""
        self._forget_weights()
        self.arena.remember_lack(manifest, why)

    def _forget_weights(self) -> None:
        self.arena, self._windows = Arena(), []
        for key in [key for key in self._lanes if key[1]]:
            self._lanes.pop(key).close()

    def let_go(self) -> None:
        """See :meth:`Endpoint.let_go`."""
        self._forget_weights()
        self._drop_described()
        if self._handing is not None:
            self._handing.close()
            self._handing = None
        for end in self._ends.values():
            self._drop_lanes(end)
            end.close()
        self._ends.clear()

    def _drop_lanes(self, end: SenderEnd) -> None:
        for key in [key for key in self._lanes if key[0] is end]:
            self._lanes.pop(key).close()

    def end(self, transport: str) -> SenderEnd:
        """This side's end of a transport."""
        if transport not in self._ends:
            self._ends[transport] = find_transport(transport).sender()
        return self._ends[transport]


def name_of_call(refit_id: str, number: int) -> str:
    """What all ranks of a trainer call one refit: each counts the calls, which are the same ones.

    Args:
        refit_id: That the call was given, if any.
        number: Of the call on this rank, from 1.
    """
    return refit_id or f"call {number}"


def _meeting_point() -> dict[str, Any]:
    """The address under which other hosts most likely reach this one, and a port that is free."""
    host = "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # a documentation address: nothing is sent
        host = probe.getsockname()[0]
    with socket.socket() as free:
        free.bind((host, 0))
        return {"host": host, "port": free.getsockname()[1]}
