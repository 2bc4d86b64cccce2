"""The control channel and the transport within a host: who is gone is known, nothing is left."""

from __future__ import annotations

import gc
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from remote import Remote, warm_up
from simple_pair import SOON
from transport_processes import ReceivingProcess, SendingProcess

from rl_core.errors import ConfigError, RefitError, RefitPeerError, RefitProtocolError
from rl_core.weights.protocol.frames import MAX_FRAME_BYTES
from rl_core.weights.transports.base import CPU, SenderEnd
from rl_core.weights.transports.control import ControlClient, ControlServer
from rl_core.weights.transports.ipc import IPC
from rl_core.weights.transports.memory import SharedRegion

#: What a ZMTP 3.1 client says: signature, version, mechanism, padding; then what it is.
SHAKES_HANDS = b"".join(
    [
        b"\xff",
        bytes(8),
        b"\x7f\x03\x01NULL",
        bytes(48),
        b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    ]
)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary directory of this test's own, with a path short enough for a socket."""
    warm_up()  # which has a directory that stays
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


@pytest.fixture(params=["ipc", "tcp"])
def ends(request: pytest.FixtureRequest, temporary: Path) -> Iterator[Any]:
    bind = {"ipc": f"ipc://{temporary}/s", "tcp": "tcp://127.0.0.1:*"}[request.param]
    server = ControlServer(bind)
    client = ControlClient(server.endpoint)
    yield server, client
    client.close()
    server.close()


def frames_of(server: Any, count: int) -> list[tuple[str, bytes]]:
    frames: list[tuple[str, bytes]] = []
    until(lambda: len(frames) >= count, lambda: frames.extend(server.receive(0.1)))
    return frames


def departures(server: Any) -> list[str]:
    """The first connections that were found lost."""
    found: list[str] = []
    until(lambda: bool(found), lambda: (server.receive(0.1), found.extend(server.departed())))
    return found


def until(done: Any, step: Any) -> None:
    ends = time.monotonic() + SOON
    while not done():
        assert time.monotonic() < ends, "it does not come about"
        step()


# -- the channel -----------------------------------------------------------------------------------


def test_frames_travel_both_ways_on_one_connection(ends):
    server, client = ends
    client.open()
    client.send(b"one")
    client.send(b"two")
    (key, first), (same, second) = frames_of(server, 2)
    assert (first, second, key) == (b"one", b"two", same)
    assert server.send(key, b"answer")
    assert client.receive(SOON) == b"answer"
    assert client.receive(0) is None
    assert server.receive(0) == []


def test_every_refit_has_a_connection_of_its_own(ends):
    server, client = ends
    keys = []
    for _ in range(2):
        client.open()
        client.send(b"hello")
        keys.append(frames_of(server, 1)[0][0])
    assert keys[0] != keys[1]
    server.send(keys[1], b"new")
    until(lambda: not server.send(keys[0], b"old"), lambda: server.receive(0.01))
    assert client.receive(SOON) == b"new"


def test_last_words_come_before_the_departure(ends):
    server, client = ends
    client.open()
    client.send(b"hello")
    ((key, _),) = frames_of(server, 1)
    client.send(b"last words")
    client.disconnect()
    client.disconnect()
    frames = []
    while not (gone := server.departed()):
        frames += server.receive(SOON)
    assert frames == [(key, b"last words")]
    assert gone == [key]
    assert not server.send(key, b"x")
    assert server.departed() == []


def test_only_the_connection_that_was_lost_is_named(ends):
    server, client = ends
    other = ControlClient(server.endpoint)
    for end in (client, other):
        end.open()
    client.send(b"a")
    other.send(b"b")
    keys = {frame: key for key, frame in frames_of(server, 2)}
    other.close()
    assert departures(server) == [keys[b"b"]]
    assert server.send(keys[b"a"], b"still here?")
    answers: list[bytes] = []  # a frame that only asked wakes it too
    until(lambda: bool(answers), lambda: answers.extend(filter(None, [client.receive(0.1)])))
    assert answers == [b"still here?"]


def test_a_server_that_closes_is_lost_once_its_last_words_were_read(ends):
    server, client = ends
    client.open()
    assert not client.lost()
    client.send(b"hello")
    ((key, _),) = frames_of(server, 1)
    server.send(key, b"last words")
    server.close()
    time.sleep(0.1)
    assert not client.lost()
    assert client.receive(SOON) == b"last words"
    until(client.lost, lambda: client.receive(0.1))
    client.send(b"into the void")


def test_a_server_that_is_not_there_is_lost(ends):
    server, client = ends
    server.close()
    client.open()
    until(client.lost, lambda: client.receive(0.1))


def test_a_frame_that_is_too_large_ends_its_connection_only(ends):
    server, client = ends
    bad = ControlClient(server.endpoint)
    bad.open()
    bad.send(b"hello")
    ((key, _),) = frames_of(server, 1)
    bad.send(bytes(MAX_FRAME_BYTES + 1))
    assert departures(server) == [key]
    client.open()
    client.send(bytes(MAX_FRAME_BYTES))
    assert len(frames_of(server, 1)[0][1]) == MAX_FRAME_BYTES
    bad.close()


def test_messages_of_another_shape_than_ours_are_passed_over(ends):
    server, client = ends
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 0
        stranger.connect(server.endpoint)
        stranger.send_multipart([b"two", b"parts"])
        client.open()
        client.send(b"ours")
        frames = frames_of(server, 1)
        while extra := server.receive(0.2):
            frames += extra
    assert [frame for _, frame in frames] == [b"ours"]


def test_a_server_closes_while_clients_are_lost_that_did_not_read_all(temporary):
    # Each round is a race that hung the server's context once in twenty rounds.
    for round_ in range(60):
        server = ControlServer(f"ipc://{temporary}/s{round_}")
        with zmq.Context() as context:
            context.setsockopt(zmq.RCVHWM, 1)
            clients = [context.socket(zmq.DEALER) for _ in range(30)]
            for client in clients:
                client.connect(server.endpoint)
                client.send(b"hello")
            connected: set[str] = set()
            while len(connected) < len(clients):
                connected.update(connection for connection, _ in server.receive(SOON))
            for connection in connected:
                for _ in range(10):
                    server.send(connection, bytes(200_000))
            closing = threading.Thread(target=server.close, daemon=True)
            closing.start()
            for client in clients:
                client.close(0)
            closing.join(SOON)
            assert not closing.is_alive(), f"the server closes in round {round_}"


def test_many_departures_while_nobody_reads_do_not_stop_the_server(temporary):
    """As between two refits; 2000 messages of ZeroMQ's monitor would fill a queue with a bound."""
    server = ControlServer(f"ipc://{temporary}/s")
    for _ in range(3000):
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(SOON)
            stranger.connect(f"{temporary}/s")
            stranger.sendall(SHAKES_HANDS)
            received = b""
            while b"READY" not in received:
                received += stranger.recv(200)
    client = ControlClient(server.endpoint)
    client.open()
    client.send(b"hello")
    assert [frame for _, frame in frames_of(server, 1)] == [b"hello"]
    client.close()
    server.close()


def test_an_address_that_cannot_be_bound_is_named(temporary):
    with pytest.raises(RefitError, match="x" * 200):
        ControlServer(f"ipc://{temporary}/{'x' * 200}")
    with pytest.raises(RefitError, match=r"192\.0\.2\.1"):
        ControlServer("tcp://192.0.2.1:*")


def test_a_forked_child_leaves_the_channel_to_its_parent(ends):
    server, client = ends
    client.open()
    client.send(b"hello")
    ((key, _),) = frames_of(server, 1)
    child = os.fork()
    if child == 0:
        server.close()
        client.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert server.send(key, b"answer")
    assert client.receive(SOON) == b"answer"


# -- within a host ---------------------------------------------------------------------------------


def test_the_socket_is_private_and_goes_with_its_owner(temporary):
    sender = IPC.sender()
    (directory,) = temporary.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    sender.close()
    sender.close()
    assert not directory.exists()


def test_the_end_of_another_rank_makes_lanes_and_has_no_socket(temporary):
    with closing(IPC.rank({})) as end, closing(end.lane(8, CPU, [])) as lane:
        assert not list(temporary.iterdir())
        assert not isinstance(end, SenderEnd)
        assert lane.data.numel() == 8


def test_a_sender_that_is_dropped_leaves_no_directory(temporary):
    sender = IPC.sender()
    del sender
    gc.collect()
    assert not list(temporary.iterdir())


def test_a_forked_child_does_not_remove_its_parents_directory(temporary):
    sender = IPC.sender()
    child = os.fork()
    if child == 0:
        sender.close()
        os._exit(0)
    os.waitpid(child, 0)
    assert list(temporary.iterdir())
    sender.close()


def test_a_receiver_killed_is_named_at_once_and_one_that_hangs_after_its_silence():
    sender = IPC.sender()
    for fate in ("kill", "stop"):
        with Remote(ReceivingProcess, "ipc", sender.address, "a") as remote:
            remote.start("greet", b"hello")
            ((key, _),) = frames_of(sender, 1)
            sender.send(key, b"welcome")
            assert remote.result() == b"welcome"
            getattr(remote, fate)()
            assert departures(sender) == [key]
    sender.close()


@pytest.mark.parametrize("fate", ["kill", "stop"])
def test_a_lost_sender_is_noticed_and_a_dead_ones_directory_removed(temporary, fate):
    with Remote(SendingProcess, "ipc", {}) as remote:
        address = remote.address()
        receiver = IPC.receiver(address)
        receiver.connect(address)
        receiver.send(b"hello")
        remote.answer(b"welcome")
        assert receiver.receive(SOON) == b"welcome"
        getattr(remote, fate)()
        until(receiver.lost, lambda: receiver.receive(0.1))
        receiver.disconnect()
        assert bool(list(temporary.iterdir())) == (fate == "stop")  # which may live on
        if fate == "stop":
            receiver.connect(address)
            until(receiver.lost, lambda: receiver.receive(0.1))
        else:
            with pytest.raises(RefitPeerError, match="has ended"):
                receiver.connect(address)
        remote.kill()
        receiver.close()
    assert not list(temporary.iterdir())


def test_a_receiver_removes_nothing_that_is_not_a_senders(temporary):
    other = temporary / "other"
    other.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(other / "socket"))
    IPC.receiver({"endpoint": f"ipc://{other}/socket"}).close()
    assert (other / "socket").exists()


def test_an_option_is_refused_by_name():
    with pytest.raises(ConfigError, match="speed"):
        IPC.sender(speed=1)
    with pytest.raises(ConfigError, match="speed"):
        IPC.receiver({"endpoint": "ipc:///x"}, speed=1)


# -- shared memory ---------------------------------------------------------------------------------


@pytest.fixture
def region() -> Any:
    return SharedRegion.create(5000)


def test_what_one_side_writes_the_other_reads_until_both_let_go(region):
    other = SharedRegion.attach(region.ref)
    assert other.data.shape == region.data.shape == (5000,)
    region.data.fill_(3)
    assert other.data.eq(3).all()
    region.close()
    region.close()
    assert other.data.eq(3).all()
    other.close()
    with pytest.raises(RefitProtocolError):
        SharedRegion.attach(region.ref)


def test_memory_that_is_dropped_is_given_back():
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("rl-refit")

    gc.collect()
    before, held = len(os.listdir("/proc/self/fd")), mapped()
    region = SharedRegion.create(5000)
    attached = SharedRegion.attach(region.ref)
    assert mapped() > held
    del region, attached
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before  # other tests' threads may close some
    assert mapped() <= held


@pytest.mark.parametrize(
    "change",
    [
        {"nbytes": 4999},
        {"nbytes": 0},
        {"inode": 1},
        {"path": "/no/such/file"},
        {"path": "a\0b"},
        {"path": 3},
        {"kind": "group"},
        {"more": 1},
    ],
)
def test_what_is_not_the_senders_memory_is_refused(region, change):
    with pytest.raises(RefitProtocolError):
        SharedRegion.attach(region.ref | change)
    region.close()


def test_more_memory_than_the_host_has_is_an_error_and_leaves_nothing():
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RefitError, match=r"shared memory[^\0]*bucket_bytes"):
        SharedRegion.create(1 << 50)
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("end", ["server", "client"])
def test_an_end_that_is_dropped_in_a_cycle_does_not_hang_the_collector(end, temporary):
    server = ControlServer(f"ipc://{temporary}/s")
    client = ControlClient(server.endpoint)
    client.open()
    cycle: list[Any] = [server if end == "server" else client]
    cycle.append(cycle)
    kept = client if end == "server" else server
    del server, client, cycle
    collecting = threading.Thread(target=gc.collect, daemon=True)
    collecting.start()
    collecting.join(SOON)
    assert not collecting.is_alive()
    kept.close()


@pytest.mark.parametrize("sender", [0, 1])
def test_one_wait_is_for_two_servers(temporary: Path, sender: int) -> None:
    """It ends with the frame, and not with the seconds that it may take."""
    servers = [ControlServer(f"ipc://{temporary}/{number}") for number in range(2)]
    client = ControlClient(servers[sender].endpoint)
    client.open()
    timer = threading.Timer(0.05, client.send, [b"here"])
    began = time.monotonic()
    timer.start()
    try:
        while not (found := servers[sender].receive(0.0)):
            servers[0].wait(servers[1], 10 * SOON)
            assert time.monotonic() < began + SOON
        assert [frame for _, frame in found] == [b"here"]
    finally:
        timer.join()
        client.close()
        for server in servers:
            server.close()
