"""Between hosts: ZeroMQ over TCP, and broadcasts in a process group made for this refit's members.

The sender listens on one interface. A receiver gets the endpoint and the key of the control channel
from the trainer's introduction. The members of a group exchange their addresses through torch's
store. Any process that reaches the store's port can use it, and likewise the group's connections.
An attacker on that network can disturb a refit, intercept the bytes, and read them: the weights are
not encrypted. A changed block is detected, because blocks are hashed with a key that the attacker
does not have, unless the refit verifies nothing.
"""

from __future__ import annotations

import errno
import re
import secrets
import socket
import threading
import time
import weakref
from contextlib import closing, suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from rl_collective.groups import GroupLane, GroupRef, Member
from rl_core.errors import (
    ConfigError,
    DeadlineError,
    LifecycleError,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
)
from rl_core.futures import spawn
from rl_core.weights.protocol.timing import HELLO_S, REFUSAL_S
from rl_core.weights.transports.base import (
    CPU,
    RankEnd,
    ReceiverEnd,
    SenderEnd,
    Transport,
    refuse_options,
)
from rl_core.weights.transports.control import ControlClient, ControlServer
from rl_core.weights.transports.cuda import uuid_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["COLLECTIVE", "CollectiveReceiver", "CollectiveSender"]

_JOINED = "refit/joined"
_REFUSED = "refit/refused"
_STORE_TIMEOUT = timedelta(seconds=10)
_POLL_S = 0.02
_REFUSAL_CHARS = 500

_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class _SenderOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ip: str
    port: _Port
    receivers: Annotated[int, msgspec.Meta(ge=1)]
    backend: Literal["gloo", "nccl"] | None = None


class _Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    ip: str
    port: _Port
    control: str = ""
    key: str = ""
    backend: Literal["gloo", "nccl"] | None = None


class _Meeting:
    """What either end has of the place where all members meet.

    Attributes:
        host: The sender's address.
        port: Of the store.
        store: In which members find each other; None before the end is connected and after it was
            closed.
        closed: Whether it was.
    """

    def __init__(self, host: str, port: int) -> None:
        self.host, self.port = host, port
        self.store: c10d.TCPStore | None = None
        self.closed = threading.Event()
        self._lanes: weakref.WeakSet[GroupLane] = weakref.WeakSet()
        self._opened = threading.Event()  # the last group
        self._opened.set()

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def connected(self) -> c10d.TCPStore:
        """The store; raises LifecycleError where there is none."""
        store = self.store  # another thread may close this end
        if store is None:
            raise LifecycleError(
                "this end of the collective transport is not connected",
                fix="call init_collective on both sides first",
            )
        return store

    def wait_for(self, done: Callable[[], bool], deadline_s: float) -> bool:
        """Whether it became so in time; raises LifecycleError if this end was closed."""
        ends = time.monotonic() + deadline_s
        while not done():
            if time.monotonic() >= ends:
                return False
            if self.closed.wait(_POLL_S):
                raise LifecycleError(
                    "this end of the collective transport was closed",
                    fix="call init_collective on both sides again",
                )
        return True

    def join(self, ref: GroupRef, rank: int, device: torch.device) -> GroupLane:
        """The lane of one member of a group, which is made in the background."""
        before, self._opened = self._opened, threading.Event()
        member = Member(ref, rank, self.connected(), self.host, self.port, before, self._opened)
        lane = GroupLane(member, device if ref.backend == "nccl" else CPU)
        self._lanes.add(lane)
        return lane

    def open(self, nbytes: int, device: torch.device, receivers: Sequence[str]) -> GroupLane:
        """The lane of who sends in a new group."""
        backend: Literal["gloo", "nccl"] = "nccl" if device.type == "cuda" else "gloo"
        ref = GroupRef("group", secrets.token_hex(8), backend, tuple(receivers), nbytes)
        return self.join(ref, 0, device)

    def close(self) -> None:
        self.closed.set()
        for lane in list(self._lanes):
            lane.close()
        self.store = None


class CollectiveSender(ControlServer, SenderEnd):
    """The sender's end.

    Args:
        ip: An address of this host that the receivers reach.
        port: Where they meet; 0 takes a free one.
        receivers: How many :meth:`rendezvous` waits for; more may join later.
        backend: ``"nccl"`` between GPUs, else ``"gloo"``; default: by the tensors' device.

    Raises:
        ConfigError: The address is not this host's, or is in use.
    """

    def __init__(
        self, ip: str, port: int, receivers: int, backend: Literal["gloo", "nccl"] | None = None
    ) -> None:
        listener = _listen(ip, port)
        host, port = listener.getsockname()[:2]
        self._receivers, self._backend = receivers, backend
        self._meeting = _Meeting(host, port)
        bind = f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*"
        try:
            super().__init__(bind, encrypted=True)
        except BaseException:
            listener.close()
            raise
        self._meeting.store = c10d.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )
        self.address = {"ip": host, "port": port, "control": self.endpoint, "key": self.key}
        if backend is not None:
            self.address["backend"] = backend

    def rendezvous(self, deadline_s: float) -> None:
        """Waits until as many receivers have joined as were announced.

        Raises:
            DeadlineError: Fewer came; counts the missing ones.
            LifecycleError: This end was closed.
        """
        joined = 0

        def complete() -> bool:
            nonlocal joined
            joined = self._meeting.connected().add(_JOINED, 0)
            return joined >= self._receivers

        if not self._meeting.wait_for(complete, deadline_s):
            missing = self._receivers - joined
            raise DeadlineError(
                f"{missing} of {self._receivers} receivers did not join {self._meeting} "
                f"within {deadline_s:g} s",
                fix="start them with this address, and check that they reach it (firewall, route)",
                seconds=deadline_s,
                missing=missing,
            )

    def refused(self) -> str | None:
        """See :meth:`SenderEnd.refused`; anybody may have written it, so it only ends a wait."""
        store = self._meeting.connected()
        if not store.check([_REFUSED]):
            return None
        text = store.get(_REFUSED)[:_REFUSAL_CHARS].decode(errors="replace")
        store.delete_key(_REFUSED)
        return text

    def lane_device(self, device: torch.device, gpus: Sequence[Sequence[str]]) -> torch.device:
        """See :meth:`RankEnd.lane_device`: NCCL needs a separate GPU for every member.

        Raises:
            ConfigError: ``backend`` is NCCL, and there are not so many.
        """
        return _lane_device(self._backend, device, gpus)

    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> GroupLane:
        """See :meth:`SenderEnd.lane`; returns before the receivers have joined the group."""
        return self._meeting.open(nbytes, device, receivers)

    def close(self) -> None:
        self._meeting.close()
        super().close()


class CollectiveRank(RankEnd):
    """Where another rank of the trainer makes its lanes: each is a group of it and the receivers.

    Args:
        address: That of rank 0's end, in whose store the members of all groups meet.

    Raises:
        RefitPeerError: The store cannot be reached.
    """

    def __init__(self, address: Mapping[str, Any]) -> None:
        where = _address(address)
        self._backend = where.backend
        self._meeting = _Meeting(where.ip, where.port)
        try:
            self._meeting.store = c10d.TCPStore(
                where.ip, where.port, wait_for_workers=False, timeout=_STORE_TIMEOUT
            )
        except dist.DistError as error:
            raise RefitPeerError(
                f"rank 0's store at {self._meeting} cannot be reached: {error}",
                fix="call init_collective with an address that the other ranks reach, too",
                peer="rank 0",
            ) from error

    def lane_device(self, device: torch.device, gpus: Sequence[Sequence[str]]) -> torch.device:
        """See :meth:`CollectiveSender.lane_device`."""
        return _lane_device(self._backend, device, gpus)

    def lane(
        self, nbytes: int, device: torch.device, receivers: Sequence[str], *, direct: bool = False
    ) -> GroupLane:
        """See :meth:`CollectiveSender.lane`."""
        return self._meeting.open(nbytes, device, receivers)

    def close(self) -> None:
        self._meeting.close()


class CollectiveReceiver(ControlClient, ReceiverEnd):
    """A receiver's end; :meth:`rendezvous` comes first.

    Args:
        address: The sender's; for a rendezvous ``ip`` and ``port`` are enough.
    """

    def __init__(self, address: Mapping[str, Any]) -> None:
        super().__init__("")
        self._meeting = _Meeting(address["ip"], address["port"])

    def rendezvous(self, deadline_s: float) -> None:
        """Waits until the sender is there, and joins it.

        Raises:
            DeadlineError: It did not come.
            LifecycleError: This end was closed.
        """
        ip, port = self._meeting.host, self._meeting.port

        def listens() -> bool:
            with suppress(OSError), closing(socket.create_connection((ip, port), 1)):
                return True
            return False

        ends = time.monotonic() + deadline_s
        cause = "no process listens there"
        if self._meeting.wait_for(listens, deadline_s):
            try:
                left = timedelta(seconds=max(ends - time.monotonic(), 1))
                store = c10d.TCPStore(ip, port, wait_for_workers=False, timeout=left)
                store.set_timeout(_STORE_TIMEOUT)
                store.add(_JOINED, 1)
                self._meeting.store = store
                return
            except dist.DistError as error:
                cause = str(error).splitlines()[0]
        raise DeadlineError(
            f"no connection to the sender at {self._meeting} within {deadline_s:g} s: {cause}",
            fix="call init_collective in the trainer, too, and check that this host reaches it "
            "(firewall, route)",
            seconds=deadline_s,
        )

    def refuse(self, why: str) -> None:
        """See :meth:`ReceiverEnd.refuse`; repeats it, as the sender may only be about to wait.

        A sender that begins to wait ignores refusals from before.
        """
        store, closed = self._meeting.store, self._meeting.closed
        if store is None:
            return

        def repeat() -> None:
            with suppress(dist.DistError):
                store.set(_REFUSED, why[:_REFUSAL_CHARS])
                while not closed.wait(HELLO_S) and time.monotonic() < ends:
                    store.set(_REFUSED, why[:_REFUSAL_CHARS])

        ends = time.monotonic() + REFUSAL_S
        with suppress(RefitError):  # of a lack of threads: the sender waits until its deadline
            spawn("rl-refit-refuse", repeat)

    def connect(self, address: Mapping[str, Any]) -> None:
        """See :meth:`ReceiverEnd.connect`.

        Raises:
            LifecycleError: The sender was never met.
            RefitProtocolError: ``address`` lacks the sender's endpoint or key.
        """
        self._meeting.connected()
        where = _address(address)
        if not where.control or not where.key:
            raise RefitProtocolError(
                f"{self._meeting}: the refit info lacks the sender's address or key",
                fix="pass the policy's prepare_refit_info() to the engine after init_collective",
            )
        self.endpoint, self.key = where.control, where.key
        self.open()

    def attach(
        self, ref: Mapping[str, Any], receiver: str, device: torch.device = CPU
    ) -> GroupLane:
        """See :meth:`ReceiverEnd.attach`; returns before the group is complete."""
        try:
            wanted = msgspec.convert(ref, GroupRef)
        except msgspec.ValidationError as error:
            raise RefitProtocolError(f"received a malformed group reference: {error}") from error
        if receiver not in wanted.members:
            raise RefitProtocolError(f"{receiver} is not a member of the sender's group")
        if wanted.backend == "nccl" and device.type != "cuda":
            raise RefitProtocolError(
                f"the sender broadcasts between GPUs, and {receiver} receives on {device}",
                fix="put the engine's tensors on a GPU, or call the sender's init_collective with "
                "backend='gloo'",
            )
        rank = 1 + wanted.members.index(receiver)
        return self._meeting.join(wanted, rank, device)

    def close(self) -> None:
        self._meeting.close()
        super().close()


class _Collective(Transport):
    """Options: those of :class:`CollectiveSender`; a receiver has none."""

    def sender(self, **options: Any) -> CollectiveSender:
        try:
            given = msgspec.convert(options, _SenderOptions)
        except msgspec.ValidationError as error:
            names = re.findall(r"`\$?\.?(\w+)`", str(error))
            raise ConfigError(
                f"the options of the collective transport are not valid: {error}",
                fix=f"use only these: {', '.join(_SenderOptions.__struct_fields__)}",
                key=names[-1] if names else "",
            ) from error
        return CollectiveSender(given.ip, given.port, given.receivers, given.backend)

    def rank(self, address: Mapping[str, Any]) -> CollectiveRank:
        return CollectiveRank(address)

    def receiver(self, address: Mapping[str, Any], **options: Any) -> CollectiveReceiver:
        refuse_options("the collective transport's receiver", options)
        _address(address)
        return CollectiveReceiver(address)


#: The transport named ``collective``.
COLLECTIVE: Transport = _Collective()


def _address(given: Mapping[str, Any]) -> _Address:
    try:
        return msgspec.convert(given, _Address)
    except msgspec.ValidationError as error:
        raise RefitProtocolError(f"received a malformed collective address: {error}") from error


def _lane_device(
    backend: str | None, device: torch.device, gpus: Sequence[Sequence[str]]
) -> torch.device:
    own = [uuid_of(device), *(seen[0] if seen else None for seen in gpus)]
    apart = None not in own and len(set(own)) == len(own)
    if backend == "nccl" and not apart:
        raise ConfigError(
            "backend='nccl' needs a different GPU for the trainer and for every engine, but "
            f"their tensors are on {', '.join(name or 'no GPU' for name in own)}",
            fix="leave backend out, or give the trainer and each engine a GPU of their own",
            key="backend",
        )
    return device if apart and backend != "gloo" else CPU


def _listen(ip: str, port: int) -> socket.socket:
    """A socket that listens on one interface of this host."""
    listener = None
    try:
        family, _, _, _, where = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
        if ip_address(where[0]).is_unspecified:
            raise OSError("it means all addresses, and receivers need one")
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(1024)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ConfigError(
            f"the sender cannot listen on {ip}:{port}: {error.strerror or error}",
            fix="give an address of the trainer's host that the engines can reach, and a free port",
            key="port" if error.errno == errno.EADDRINUSE else "ip",
        ) from error
    return listener
