"""What a stranger on the network can do to a refit, and how the two sides find each other there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from simple_pair import SOON, Engine, InPlaceSink, Trainer, blank, make_persistent, same

from rl_core.errors import LifecycleError, RefitAborted
from rl_core.futures import wait
from rl_core.weights.protocol.frames import MAX_FRAME_BYTES
from rl_core.weights.transports.control import ControlClient, ControlServer


@pytest.fixture
def both(keep) -> tuple[Trainer, Engine]:
    trainer = keep(Trainer(make_persistent()))
    return trainer, keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))


def test_who_does_not_know_the_key_fills_no_memory_and_is_not_heard():
    server = ControlServer("tcp://127.0.0.1:*", encrypted=True)
    with closing(server), closing(ControlClient(server.endpoint)) as stranger:
        stranger.open()
        for _ in range(50):
            stranger.send(b"x" * (1 << 20))
        assert server.receive(0.3) == []
        friend = ControlClient(server.endpoint, server.key)
        with closing(friend):
            friend.open()
            friend.send(b"hello")
            frames: list[Any] = []
            end = time.monotonic() + SOON
            while not frames and time.monotonic() < end:
                frames = server.receive(0.1)
            assert [frame for _, frame in frames] == [b"hello"]


def test_a_frame_of_the_largest_size_passes_encrypted():
    server = ControlServer("tcp://127.0.0.1:*", encrypted=True)
    with closing(server), closing(ControlClient(server.endpoint, server.key)) as client:
        client.open()
        client.send(b"x" * MAX_FRAME_BYTES)
        frames: list[Any] = []
        end = time.monotonic() + SOON
        while not frames and time.monotonic() < end:
            frames = server.receive(0.1)
        assert [len(frame) for _, frame in frames] == [MAX_FRAME_BYTES]


def test_who_waits_long_for_a_trainer_that_does_not_read_is_not_cut_off():
    server = ControlServer("tcp://127.0.0.1:*")
    with closing(server), closing(ControlClient(server.endpoint)) as client:
        client.open()
        for _ in range(5000):  # as many as there may be Hellos
            client.send(b"hello")
        end = time.monotonic() + 4.0  # longer than the silence after which a peer is gone
        while time.monotonic() < end:
            assert client.receive(0.2) is None
            assert not client.lost()
        received = [len(server.receive(1.0)) for _ in range(5)]
        assert sum(received) > 1000


def collective(trainer: Trainer, engine: Engine) -> Callable[[], Any]:
    """Opens a network on both sides; a refit over it."""
    opened = trainer.sender.open("collective", SOON, ip="127.0.0.1", port=0, receivers=1)
    address = trainer.sender.kept.connections["collective"].end.address
    given = {"ip": address["ip"], "port": address["port"]}
    wait([opened, engine.receiver.open("collective", SOON, given)], SOON)
    engine.prepare_refit_info(trainer.prepare_refit_info())
    options: dict[str, Any] = {"transport": "collective", "deadline_s": SOON}
    return lambda: wait([trainer.sender.send(**options), engine.receiver.receive(**options)], SOON)


def test_where_the_sender_listens_is_not_read_from_the_store(both):
    trainer, engine = both
    again = collective(trainer, engine)
    store = trainer.sender.kept.connections["collective"].end._meeting.store
    for key in store.list_keys():
        if "joined" not in key:
            store.set(key, "tcp://127.0.0.1:1")
    assert again()[0]["version"] == 1
    for key in store.list_keys():
        assert trainer.sender.kept.connections["collective"].end.key.encode() not in store.get(key)


def test_a_trainer_that_was_started_again_at_the_same_address_is_found(both, keep):
    trainer, engine = both
    collective(trainer, engine)()
    address = trainer.sender.kept.connections["collective"].end.address
    trainer.close()
    other = keep(Trainer(make_persistent(5)))
    opened = other.sender.open(
        "collective", SOON, ip=address["ip"], port=address["port"], receivers=1
    )
    engine.prepare_refit_info(other.prepare_refit_info())
    options: dict[str, Any] = {"transport": "collective", "deadline_s": SOON}
    wait([other.sender.send(**options), engine.receiver.receive(**options)], SOON)
    opened.result(SOON)
    assert same(other.source.tensor, engine.sink.tensor)


def test_an_engine_that_cannot_come_says_so_to_a_trainer_that_waits(both):
    """Prepared before the network was opened: it does not know where the trainer listens."""
    trainer, engine = both
    engine.prepare_refit_info(trainer.prepare_refit_info())
    opened = trainer.sender.open("collective", SOON, ip="127.0.0.1", port=0, receivers=1)
    address = trainer.sender.kept.connections["collective"].end.address
    given = {"ip": address["ip"], "port": address["port"]}
    wait([opened, engine.receiver.open("collective", SOON, given)], SOON)
    waiting = trainer.sender.send(transport="collective", deadline_s=600)
    with pytest.raises(LifecycleError, match="collective: it was not opened"):
        engine.receiver.receive(transport="collective")
    error = waiting.exception(SOON)
    assert isinstance(error, RefitAborted)
    assert "a receiver gave up" in str(error)
    engine.prepare_refit_info(trainer.prepare_refit_info())
    options: dict[str, Any] = {"transport": "collective", "deadline_s": SOON}
    time.sleep(0.5)
    receiving = engine.receiver.receive(**options)
    wait([trainer.sender.send(**options), receiving], SOON)
