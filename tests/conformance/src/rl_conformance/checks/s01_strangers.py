"""S1 and S2: what strangers send, and sockets and shared memory."""

from __future__ import annotations

import os
import pickle
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import psutil
import torch
import zmq

from rl_conformance.checks.common import frames_of, fresh_doubles, messages_of, renew_tensors
from rl_conformance.deadline import stretched
from rl_conformance.doubles import Engine, Trainer
from rl_conformance.expect import fail, raised, raises, require, same
from rl_conformance.faults import at_the_first_bucket
from rl_conformance.peers import RemotePolicy
from rl_conformance.refits import DEADLINE_S, odd_tensors, run_refit
from rl_conformance.registry import CORE, check
from rl_conformance.ways import by_ticket
from rl_conformance.weights import same_weights
from rl_core.errors import RefitProtocolError, RLError
from rl_core.ports import free_port
from rl_core.weights.protocol import frames, messages
from rl_core.weights.protocol.messages import Offer
from rl_core.weights.transports import find_transport
from rl_core.weights.transports.control import ControlClient
from rl_core.weights.transports.memory import SharedRegion

if TYPE_CHECKING:
    from rl_conformance.context import Context


#: Small enough that there are several buckets.
_BUCKET = 4096


@check("S2", needs=(CORE,))
def a_replayed_hello_is_ignored(ctx: Context) -> None:
    """A replayed Hello of an engine during a refit neither joins nor disturbs the refit."""
    policy, engine = fresh_doubles(ctx)
    run_refit(policy, engine)
    renew_tensors(policy, 3)
    endpoint = policy.sender.prepare()["addresses"]["ipc"]["endpoint"]
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    hellos: list[bytes] = []

    def hear(client: ControlClient, frame: bytes) -> None:
        hellos.append(frame)
        send(client, frame)

    def say_it_again() -> None:
        stranger.connect(endpoint)
        for frame in hellos[:1] * 3:
            stranger.send(frame)
        stranger.poll(300)  # the trainer's thread is this one: it reads them next

    send = ControlClient.send
    try:
        with mock.patch.object(ControlClient, "send", hear), at_the_first_bucket(say_it_again):
            report = run_refit(policy, engine, bucket_bytes=_BUCKET)
    finally:
        context.destroy(0)
    same(report.receivers, 1, "receivers of the report")
    same_weights(engine.tensors, policy.tensors, "the engine")
    run_refit(policy, engine)


@check("S2", needs=(CORE,))
def no_two_refits_share_a_secret(ctx: Context) -> None:
    """Sessions and nonces are new each time, long, and nothing that is sent twice looks alike."""
    policy, engine = fresh_doubles(ctx)
    frames: list[bytes] = []
    sessions: list[str] = []
    for _ in range(3):
        seen: list[Any] = []
        frames += frames_of(
            "sender",
            lambda: seen.extend(messages_of(lambda: run_refit(policy, engine))),  # noqa: B023
        )
        frames += frames_of("receiver", lambda: run_refit(policy, engine))
        sessions += [message.session for message in seen if isinstance(message, Offer)]
    same(len(sessions), 3, "sessions of three refits")
    new = len(set(sessions)) == 3
    require(new, "sessions of three refits", "three different ones", sessions)
    length = min(map(len, sessions))
    require(length >= 16, "characters of a session", ">= 16", length)
    same(len(frames) - len(set(frames)), 0, "frames that were sent twice, bit for bit")


class _Bomb:
    """Fault: bytes that create a file when they are unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


_TOKEN = "of the checks"


def _authentic(body: bytes, side: frames.Side = "sender") -> bytes:
    """A frame with the right code around any bytes."""
    with mock.patch.object(frames, "_encoder", mock.Mock(encode=lambda _: body)):
        return frames.Channel(_TOKEN, b"", side).encode(None)


_FRAMES: dict[str, Any] = {
    "empty": b"",
    "short": b"0123456789abcdef",
    "unsigned": b"x" * 64,
    "truncated": frames.Channel(_TOKEN, b"", "sender").encode(messages.Seal("s", "d"))[:-3],
    "oversized": b"x" * (frames.MAX_FRAME_BYTES + 1),
}


#: What somebody who holds the token could put into a frame.
_BODIES: dict[str, bytes] = {
    "no_msgpack": b"\xc1" * 9,
    "unknown_message": b"\x81\xa4type\xa4Nope",
    "nested": b"\x91" * 100_000,
}


_CASES: dict[str, Any] = {name: {"frame": frame} for name, frame in _FRAMES.items()}


_CASES |= {name: {"body": body} for name, body in _BODIES.items()}


@check("S1", cases=_CASES, needs=(CORE,))
def a_malformed_frame_is_refused(ctx: Context, frame: bytes = b"", body: bytes = b"") -> None:
    """Both directions raise RefitProtocolError, whatever the bytes."""
    sides: tuple[tuple[frames.Side, frames.Side], ...]
    sides = (("sender", "receiver"), ("receiver", "sender"))
    for author, reader in sides:
        with raises(RefitProtocolError):
            given = _authentic(body, author) if body else frame
            frames.Channel(_TOKEN, b"", reader).decode(given)


@check("S1", needs=(CORE,))
def nothing_is_unpickled(ctx: Context) -> None:
    """A pickle that would act when loaded is refused and does not act."""
    path = ctx.directory() / "unpickled"
    bomb = pickle.dumps(_Bomb(path))
    with raises(RefitProtocolError):
        frames.Channel(_TOKEN, b"", "receiver").decode(_authentic(bomb))
    engine = ctx.closing(Engine(odd_tensors(2)))
    with raises(RefitProtocolError):
        engine.update_weights(bomb)
    require(not path.exists(), "a pickle that was received", "it is refused", "it was loaded")


@check("S1")
def malformed_refit_info_is_refused(ctx: Context) -> None:
    """The engine refuses what is no description of tensors."""
    generation = ctx.generation()
    wrong: tuple[Any, ...] = (
        {},
        {"protocol": 1},
        {"protocol": 99, "tensors": []},
        {"tensors": "x"},
    )
    for info in wrong:
        with raises(RLError):
            generation.prepare_refit_info(info)


@check("S1", needs=(CORE,), cases={name: {"name": name} for name in ("ipc", "collective")})
def a_malformed_reference_is_refused(ctx: Context, name: str) -> None:
    """Addresses and references to memory that are not what they must be: RefitProtocolError."""
    transport = find_transport(name)
    for address in ({}, {"endpoint": 7}, {"endpoint": "tcp://1.2.3.4:5"}, {"ip": [], "port": -1}):
        with raises(RefitProtocolError):
            transport.receiver(address)
    policy = ctx.closing(Trainer(odd_tensors(1)))
    policy.init_collective("127.0.0.1", free_port(), 2)
    sound = policy.prepare_refit_info()["addresses"][name]
    receiver = ctx.closing(transport.receiver(sound))
    receiver.rendezvous(DEADLINE_S)
    for ref in _references(ctx):
        with raises(RefitProtocolError):
            receiver.attach(ref, "somebody", torch.device("cpu"))


def _references(ctx: Context) -> list[dict[str, Any]]:
    """What no sender of ours would send: no reference, a wrong one, somebody else's file."""
    other = ctx.directory() / "not-memory"
    other.write_bytes(bytes(64))
    found = other.stat()
    file = {"kind": "memory", "path": str(other), "nbytes": 64, "device": found.st_dev}
    gpu = {"kind": "cuda", "uuid": "GPU-0", "handle": b"x", "nbytes": 64, "offset": 0}
    group = {"kind": "group", "epoch": "e", "backend": "gloo", "members": ["another"]}
    return [
        {},
        {"kind": "memory"},
        file | {"inode": found.st_ino + 1},
        file | {"inode": found.st_ino, "nbytes": 1 << 40},
        file | {"inode": found.st_ino, "path": str(other) + "-missing"},
        file | {"inode": found.st_ino, "surplus": 1},
        gpu | {"pid": 1, "key": "k"},
        gpu | {"handle": 7, "pid": 1, "key": "k"},
        group | {"nbytes": 0},
        group | {"nbytes": 64},
        group | {"nbytes": 64, "backend": "mpi"},
    ]


_TRANSPORTS = {name: {"transport": name} for name in ("ipc", "collective")}


@check("S2", needs=(CORE,), cases=_TRANSPORTS)
def a_stranger_on_the_socket_is_refused(ctx: Context, transport: str) -> None:
    """Frames from someone without the token neither join nor disturb a refit."""
    policy = ctx.closing(Trainer(odd_tensors(1)))
    engine = ctx.closing(Engine(odd_tensors(2)))
    run_refit(policy, engine, transport=transport)
    for name, tensor in odd_tensors(3).items():
        policy.tensors[name].copy_(tensor)
    endpoint = policy.sender.connection(transport).end.endpoint
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(endpoint)
        with suppress(zmq.Again):  # where connections are encrypted, his may be refused by now
            hello = messages.Hello("stranger", "stranger", os.getpid(), os.urandom(16), 1)
            signed = frames.write_hello(hello, _TOKEN)  # with another token
            for frame in (b"", b"let me in", _authentic(b"\x80"), os.urandom(4096), signed):
                stranger.send(frame, zmq.NOBLOCK)
            stranger.send_multipart([b"several", b"parts"], zmq.NOBLOCK)
        report = run_refit(policy, engine, transport=transport)
        answers: list[bytes] = []
        while stranger.poll(100):
            answers += stranger.recv_multipart()
    finally:
        context.destroy(0)
    same(report.receivers, 1, "receivers of the report")
    same_weights(engine.tensors, policy.tensors, "the engine")
    token = policy.sender.kept.token.encode()
    for what, secret in (("the token", token), ("an offer", b"Offer")):
        leaked = [frame for frame in answers if secret in frame]
        same(leaked, [], f"frames with {what} that were sent to a stranger")


@check("S2", needs=(CORE,))
def a_group_listens_on_one_interface(ctx: Context) -> None:
    """What the collective transport opens is reachable at the address that was given alone."""
    policy = ctx.closing(Trainer(odd_tensors(1)))
    before = _listening()
    policy.init_collective("127.0.0.1", free_port(), 2)
    opened = _listening() - before
    require(opened, "addresses that listen", "at least one", opened)
    local = all(ip == "127.0.0.1" for ip, _ in opened)
    require(local, "addresses that listen", "127.0.0.1 only", opened)
    policy.close()
    left = _listening() - before
    same(sorted(left), [], "addresses that listen after close")


def _listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {tuple(c.laddr) for c in connections if c.status == psutil.CONN_LISTEN}


@check("S2", needs=(CORE,))
def the_socket_is_in_a_private_directory(ctx: Context) -> None:
    """Mode 0700, this user's, an unguessable name, and removed after close."""
    policies = [ctx.closing(Trainer(odd_tensors(1))) for _ in range(2)]
    directories = [_directory(policy.prepare_refit_info()) for policy in policies]
    for policy, directory in zip(policies, directories, strict=True):
        found = directory.stat()
        same(found.st_uid, os.getuid(), f"owner of {directory}")
        same(oct(stat.S_IMODE(found.st_mode)), "0o700", f"mode of {directory}")
        policy.close()
        same(directory.exists(), False, f"{directory} exists after close")
    require(directories[0] != directories[1], "directories of two senders", "two", directories)


def _directory(info: dict[str, Any]) -> Path:
    return Path(info["addresses"]["ipc"]["endpoint"].removeprefix("ipc://")).parent


@check("S2", needs=(CORE,))
def tokens_are_unguessable(ctx: Context) -> None:
    """At least 128 bits that are new for every sender."""
    tokens = set()
    for _ in range(3):
        policy = ctx.closing(Trainer(odd_tensors(1)))
        tokens.add(policy.prepare_refit_info()["token"])
    same(len(tokens), 3, "different tokens of three senders")
    require(min(map(len, tokens)) >= 32, "characters of a token", ">= 32", min(map(len, tokens)))


@check("S2", needs=(CORE,))
def shared_memory_is_private(ctx: Context) -> None:
    """Mode 0600 and this user's, and its path leads nowhere after close."""
    region = SharedRegion.create(4096)
    path = Path(region.ref["path"])
    found = path.stat()
    same(oct(stat.S_IMODE(found.st_mode)), "0o600", f"mode of {path}")
    same(found.st_uid, os.getuid(), f"owner of {path}")
    region.close()
    left = path.exists() and path.stat().st_ino == found.st_ino
    same(left, False, f"{path} exists after close")


@check("S2", timeout_s=180.0)
def a_survivor_cleans_up_after_a_killed_trainer(ctx: Context) -> None:
    """What a trainer killed by SIGKILL leaves is removed once the engine is shut down."""
    generation = ctx.fresh_generation()
    generation.prepare_for_generation()
    with RemotePolicy(ctx) as policy:
        info = policy.prepare_refit_info()
        directory = _directory(info)
        same(directory.exists(), True, f"{directory} exists while the trainer lives")
        policy.die_at("tensors", 1)
        generation.prepare_refit_info(info)
        deadline_s = stretched(DEADLINE_S)
        policy.send_weights(deadline_s=deadline_s)
        (receiving,) = generation.receive_weights(deadline_s=deadline_s)
        raised(receiving.exception(deadline_s + 10), Exception)
    generation.shutdown()
    same(directory.exists(), False, f"{directory} exists after the engine was shut down")


_REFITS: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "packed"},
    {"transport": "collective"},
    {"delta": True},
)


@check("S1", needs=(CORE,))
def no_refit_unpickles(ctx: Context) -> None:
    """Over shared memory, a group, and by ticket: nothing is given to pickle or torch.load."""
    policy = ctx.closing(Trainer(odd_tensors(1)))
    engine = ctx.closing(Engine(odd_tensors(2)))
    run_refit(policy, engine, transport="collective")  # opens the group

    def refused(*_: Any, **__: Any) -> Any:
        fail("what was received", "it is never unpickled", "pickle or torch.load was called")

    with ExitStack() as patches:
        for module, name in (
            (pickle, "loads"),
            (pickle, "load"),
            (pickle, "Unpickler"),
            (torch, "load"),
        ):
            patches.enter_context(mock.patch.object(module, name, refused))
        for seed, options in enumerate(_REFITS, 3):
            for tensor in policy.tensors.values():
                if tensor.is_floating_point():
                    tensor.copy_(tensor.float() + seed)  # nothing adds float8
            run_refit(policy, engine, **options)
            same_weights(engine.tensors, policy.tensors, "the engine")
        by_ticket(policy, engine)
    same_weights(engine.tensors, policy.tensors, "the engine")
