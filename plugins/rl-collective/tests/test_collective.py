"""The transport between hosts: what is broadcast arrives, and no peer can hang the others."""

from __future__ import annotations

import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from remote import Remote
from simple_pair import SOON
from transport_processes import ReceivingProcess, SendingProcess, await_arrival, held

from rl_collective.collective import COLLECTIVE
from rl_core.errors import (
    ConfigError,
    DeadlineError,
    LifecycleError,
    RefitPeerError,
    RefitProtocolError,
)

CPU = torch.device("cpu")
LOCAL = "127.0.0.1"
MIB = 1 << 20
#: More than the sockets between two processes hold, so that a broadcast waits for its reader.
MUCH = 64 * MIB


def new_sender(receivers: int = 1) -> Any:
    return COLLECTIVE.sender(ip=LOCAL, port=0, receivers=receivers)


@contextmanager
def pair() -> Iterator[tuple[Any, Any]]:
    """A sender and its receiver, both in this process."""
    sender = new_sender()
    receiver = COLLECTIVE.receiver(sender.address)
    receiver.rendezvous(SOON)
    sender.rendezvous(SOON)
    yield sender, receiver
    receiver.close()
    sender.close()


def passes(sender: Any, receiver: Any, nbytes: int) -> None:
    """So many bytes go from one to the other, in lanes of their own."""
    mine = sender.lane(nbytes, CPU, ["a"])
    its = receiver.attach(mine.ref, "a")
    its.expect(0, nbytes)
    fill(mine, 0, nbytes, 9)
    await_arrival(its)
    assert its.data.eq(9).all()
    its.close()
    mine.close()


@contextmanager
def members(count: int) -> Iterator[tuple[Any, list[Remote]]]:
    """A sender here, and receivers ``r0``, ``r1``, ... in processes of their own."""
    with ExitStack() as stack:
        sender = new_sender(count)
        stack.callback(sender.close)
        remotes = [
            stack.enter_context(Remote(ReceivingProcess, "collective", sender.address, f"r{i}"))
            for i in range(count)
        ]
        sender.rendezvous(60)
        yield sender, remotes


def lane_for(sender: Any, remotes: dict[str, Remote], nbytes: int, within_s: float = SOON) -> Any:
    lane = sender.lane(nbytes, CPU, list(remotes))
    lane.ends = time.monotonic() + within_s
    for remote in remotes.values():
        remote.attach(lane.ref, within_s)
    return lane


def fill(lane: Any, start: int, stop: int, value: int, runs: Any = {}) -> None:  # noqa: B006
    lane.data[start:stop] = value
    lane.publish(start, stop, runs)


def until_no_more_than(before: Any, held_now: Callable[[], Any]) -> None:
    """Threads that were told to end do so a moment later."""
    ends = time.monotonic() + SOON
    while not torch.all(torch.tensor(now := held_now()) <= torch.tensor(before)):
        assert time.monotonic() < ends, f"{now} descriptors and threads, {before} before"
        time.sleep(0.05)


# -- bytes arrive ----------------------------------------------------------------------------------


def test_two_outstanding_broadcasts_arrive_in_the_order_in_which_they_were_published():
    with members(1) as (sender, (remote,)):
        lane = lane_for(sender, {"r0": remote}, 2 * MIB)
        for start in (MIB, 0):
            remote.expect(start, start + MIB)
            fill(lane, start, start + MIB, 1 + start // MIB)
        assert remote.take(MIB, 2 * MIB) == [2]
        assert remote.take(0, MIB) == [1]


def test_a_broadcast_moves_nothing_but_its_own_bytes():
    with members(1) as (sender, (remote,)):
        lane = lane_for(sender, {"r0": remote}, 3 * MIB)
        remote.expect(MIB, 2 * MIB)
        lane.data.fill_(5)
        lane.publish(MIB, 2 * MIB)
        assert remote.take(0, 3 * MIB) == [0, 5]


def test_each_receiver_gets_its_runs_and_no_other_byte():
    with members(3) as (sender, remotes):
        lane = lane_for(sender, {f"r{i}": r for i, r in enumerate(remotes)}, 5 * MIB)
        runs = {
            "r0": [(0, MIB), (2 * MIB, 3 * MIB)],
            "r1": [(MIB, 2 * MIB), (4 * MIB, 5 * MIB)],
            "r2": [],
        }
        for remote, its in zip(remotes, runs.values(), strict=True):
            remote.expect(0, 5 * MIB, its)
            remote.expect(0, MIB)
        for n in range(5):
            lane.data[n * MIB : (n + 1) * MIB] = n + 1
        lane.publish(0, 5 * MIB, dict(reversed(runs.items())))
        for remote, wanted in zip(remotes, ([0, 1, 3], [0, 2, 5], [0]), strict=True):
            assert remote.take(0, 5 * MIB) == wanted
        fill(lane, 0, MIB, 9)  # and a broadcast after it
        assert [remote.take(0, MIB) for remote in remotes] == [[9]] * 3


def test_what_is_published_before_the_receivers_attach_waits_for_them():
    with members(1) as (sender, (remote,)):
        lane = sender.lane(MIB, CPU, ["r0"])
        fill(lane, 0, MIB, 3)
        remote.attach(lane.ref)
        remote.expect(0, MIB)
        assert remote.take(0, MIB) == [3]


def test_the_group_is_independent_of_a_default_group(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with members(1) as (sender, (remote,)):
            lane = lane_for(sender, {"r0": remote}, MIB)
            dist.all_reduce(torch.ones(1))
            remote.expect(0, MIB)
            fill(lane, 0, MIB, 4)
            assert remote.take(0, MIB) == [4]
            assert dist.get_world_size() == 1
    finally:
        dist.destroy_process_group()


def test_a_lane_serves_its_own_receivers_in_any_order():
    sender = new_sender()
    lane = sender.lane(1, CPU, ["a", "b"])
    assert lane.serves(["a", "b"])
    assert lane.serves(["b", "a"])
    assert not lane.serves(["a"])
    assert not lane.serves(["a", "b", "c"])
    assert not lane.reusable_after_failure
    sender.close()


# -- peers that die or hang ------------------------------------------------------------------------


#: Bytes that each of two receivers gets for itself, or both in a broadcast.
SECOND_HALF = [(MUCH // 2, MUCH)]
WAYS = pytest.mark.parametrize("its", [None, SECOND_HALF], ids=["broadcast", "apart"])


@WAYS
@pytest.mark.parametrize("fate", ["kill", "stop"])
def test_a_lost_receiver_keeps_neither_the_sender_nor_the_others_from_a_new_group(fate, its):
    with members(2) as (sender, (bad, good)):
        lane = lane_for(sender, {"r0": bad, "r1": good}, MUCH)
        for remote in (bad, good):
            remote.expect(0, MUCH // 2)
        fill(lane, 0, MUCH // 2, 1)
        assert bad.take(0, MUCH // 2) == [1]  # the group is there
        getattr(bad, fate)()
        good.expect(MUCH // 2, MUCH, its)
        fill(lane, MUCH // 2, MUCH, 1, {"r0": its, "r1": its} if its else {})
        lane.close()
        good.close()
        lane = lane_for(sender, {"r1": good}, MIB)
        good.expect(0, MIB)
        fill(lane, 0, MIB, 6)
        assert good.take(0, MIB) == [6]


@WAYS
def test_a_member_that_hangs_costs_no_thread_descriptor_or_buffer_after_the_deadline(its):
    with members(2) as (sender, (bad, good)):

        def half() -> Any:
            lane = lane_for(sender, {"r0": bad, "r1": good}, MUCH, within_s=3)
            for remote in (bad, good):
                remote.expect(0, MUCH // 2)
            fill(lane, 0, MUCH // 2, 1)
            assert [remote.take(0, MUCH // 2) for remote in (bad, good)] == [[1], [1]]
            return lane

        half().close()  # starts the threads that torch keeps
        good.close()
        bad.close()
        before = held(), good.held()
        lane = half()
        buffer = weakref.ref(lane.data)
        bad.stop()
        good.expect(MUCH // 2, MUCH, its)
        fill(lane, MUCH // 2, MUCH, 1, {"r0": its, "r1": its} if its else {})
        lane.close()
        good.close()
        until_no_more_than(before, lambda: (held(), good.held()))
        assert buffer() is None


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("fate", ["kill", "stop"])
@pytest.mark.parametrize("runs", [None, [(0, MUCH)]], ids=["broadcast", "apart"])
def test_a_receiver_outlives_its_sender_and_joins_the_next(fate, begun, runs):
    with Remote(SendingProcess, "collective", {"ip": LOCAL, "port": 0, "receivers": 1}) as first:
        receiver = COLLECTIVE.receiver(first.address())
        receiver.rendezvous(SOON)
        lane = receiver.attach(first.lane(MUCH, ["a"]), "a")
        if begun:
            exchange(first, lane)
        lane.expect(0, MUCH, runs)
        getattr(first, fate)()
        if fate == "kill":
            with pytest.raises(RefitPeerError, match="transfer from the sender"):
                await_arrival(lane)
        lane.close()
        receiver.close()
    with pair() as ends:
        passes(*ends, MIB)


def exchange(sender: Remote, lane: Any) -> None:
    """A broadcast, after which the group is there."""
    lane.expect(0, 1)
    sender.publish(0, 1, 1)
    await_arrival(lane)
    lane.release()


def test_closing_the_sender_unblocks_a_receiver_that_waits_for_bytes():
    with members(1) as (sender, (remote,)):
        lane = lane_for(sender, {"r0": remote}, MIB)
        remote.expect(0, MIB)
        fill(lane, 0, MIB, 1)
        assert remote.take(0, MIB) == [1]
        remote.start("try_to_take")
        lane.close()
        with pytest.raises(RefitPeerError):
            remote.result()


# -- meeting ---------------------------------------------------------------------------------------


def test_a_sender_says_how_many_receivers_are_missing():
    sender = new_sender(receivers=3)
    COLLECTIVE.receiver(sender.address).rendezvous(SOON)
    with pytest.raises(DeadlineError, match="2 of 3 receivers") as caught:
        sender.rendezvous(0.1)
    assert f"{LOCAL}:{sender.address['port']}" in str(caught.value)
    sender.close()


def test_a_receiver_says_which_sender_did_not_come():
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    receiver = COLLECTIVE.receiver({"ip": LOCAL, "port": port})
    with pytest.raises(DeadlineError, match=f"{LOCAL}:{port}"):
        receiver.rendezvous(0.1)
    receiver.close()


def test_a_receiver_that_comes_first_waits_for_its_sender():
    with socket.create_server((LOCAL, 0)) as free:
        port = free.getsockname()[1]
    receiver = COLLECTIVE.receiver({"ip": LOCAL, "port": port})
    waiting = threading.Thread(target=receiver.rendezvous, args=(SOON,))
    waiting.start()
    sender = COLLECTIVE.sender(ip=LOCAL, port=port, receivers=1)
    sender.rendezvous(SOON)
    waiting.join(SOON)
    receiver.connect(sender.address)
    receiver.send(b"hello")
    assert [frame for _, frame in sender.receive(SOON)] == [b"hello"]
    receiver.close()
    sender.close()


def test_closing_ends_a_rendezvous():
    receiver = COLLECTIVE.receiver({"ip": LOCAL, "port": 1})
    threading.Timer(0.1, receiver.close).start()
    with pytest.raises(LifecycleError, match="closed"):
        receiver.rendezvous(600)


def test_a_port_in_use_and_a_strange_address_are_refused_by_name():
    with (
        socket.create_server((LOCAL, 0)) as taken,
        pytest.raises(ConfigError, match="in use") as caught,
    ):
        COLLECTIVE.sender(ip=LOCAL, port=taken.getsockname()[1], receivers=1)
    assert caught.value.details["key"] == "port"
    for ip in ("192.0.2.1", "0.0.0.0", "no.such.host.invalid"):
        with pytest.raises(ConfigError, match=ip) as caught:
            COLLECTIVE.sender(ip=ip, port=0, receivers=1)
        assert caught.value.details["key"] == "ip"


def test_a_port_is_free_again_after_close():
    first = new_sender()
    port = first.address["port"]
    receiver = COLLECTIVE.receiver(first.address)
    receiver.rendezvous(SOON)
    first.close()
    second = COLLECTIVE.sender(ip=LOCAL, port=port, receivers=1)
    receiver.rendezvous(SOON)
    receiver.connect(second.address)
    receiver.send(b"again")
    assert [frame for _, frame in second.receive(SOON)] == [b"again"]
    receiver.close()
    second.close()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"ip": LOCAL, "receivers": 1}, "port"),
        ({"ip": LOCAL, "port": -1, "receivers": 1}, "port"),
        ({"ip": LOCAL, "port": 0, "receivers": 0}, "receivers"),
        ({"ip": LOCAL, "port": 0, "receivers": 1, "backend": "mpi"}, "backend"),
        ({"ip": LOCAL, "port": 0, "receivers": 1, "prot": 1}, "prot"),
    ],
)
def test_an_option_that_is_not_legal_is_named(options, key):
    with pytest.raises(ConfigError, match=key) as caught:
        COLLECTIVE.sender(**options)
    assert caught.value.details["key"] == key


def test_a_receiver_must_meet_its_sender_before_it_connects():
    receiver = COLLECTIVE.receiver({"ip": LOCAL, "port": 1})
    with pytest.raises(LifecycleError, match="init_collective"):
        receiver.connect({"ip": LOCAL, "port": 1})
    receiver.close()


@pytest.mark.parametrize("address", [{}, {"ip": 1, "port": 1}, {"ip": LOCAL, "port": 70000}])
def test_a_malformed_address_is_refused(address):
    with pytest.raises(RefitProtocolError):
        COLLECTIVE.receiver(address)


def test_a_reference_that_is_malformed_or_for_others_is_refused():
    sender = new_sender()
    receiver = COLLECTIVE.receiver(sender.address)
    receiver.rendezvous(SOON)
    ref = dict(sender.lane(1, CPU, ["a"]).ref)
    for wrong in ({}, ref | {"nbytes": 0}, ref | {"kind": "memory"}, ref | {"extra": 1}):
        with pytest.raises(RefitProtocolError, match="malformed"):
            receiver.attach(wrong, "a")
    with pytest.raises(RefitProtocolError, match="not a member"):
        receiver.attach(ref, "b")
    with pytest.raises(RefitProtocolError, match="between GPUs"):
        receiver.attach(ref | {"backend": "nccl"}, "a")
    receiver.close()
    sender.close()


def test_bytes_of_strangers_on_the_control_port_never_count_as_a_receivers():
    sender = new_sender()
    receiver = COLLECTIVE.receiver(sender.address)
    receiver.rendezvous(SOON)
    receiver.connect(sender.address)
    receiver.send(b"mine")
    ((mine, _),) = sender.receive(SOON)
    host, port = sender.endpoint.removeprefix("tcp://").split(":")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 100):
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(noise)
    receiver.send(b"more")
    frames: list[tuple[str, bytes]] = []
    while (mine, b"more") not in frames:
        frames += sender.receive(SOON)
    assert [frame for key, frame in frames if key == mine] == [b"more"]
    assert mine not in sender.departed()
    assert sender.send(mine, b"answer")
    assert receiver.receive(SOON) == b"answer"
    receiver.close()
    sender.close()
