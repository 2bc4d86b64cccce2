"""Noise on the socket of a refit: who has no business there hinders nobody for long."""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING

import pytest
from killable import LATER, EngineParty, TrainerParty
from simple_pair import until

from rl_core.errors import RefitPeerError
from rl_core.weights.protocol.frames import MAX_FRAME_BYTES, write_hello
from rl_core.weights.protocol.messages import Hello
from rl_core.weights.transports.control import ControlClient

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.usefixtures("nothing_is_left")

#: What a ZMTP 3.1 client begins with: signature, version, mechanism, padding; then its READY.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
#: The head of a frame of 1000 bytes, of which there are 3.
TRUNCATED = b"\x02" + (1000).to_bytes(8, "big") + b"abc"
#: The head of a frame that no memory holds.
ENDLESS = b"\x02" + b"\x7f" * 8 + b"abc"


@pytest.fixture
def pair() -> Iterator[tuple[TrainerParty, EngineParty]]:
    trainer, engine = TrainerParty(), EngineParty()
    engine.meet(trainer.info())
    with closing(trainer), closing(engine):
        yield trainer, engine


def endpoint(trainer: TrainerParty) -> str:
    address: str = trainer.info()["addresses"]["ipc"]["endpoint"]
    return address


def assert_refit(trainer: TrainerParty, engine: EngineParty) -> None:
    trainer.begin()
    engine.begin()
    assert trainer.outcome()["version"] == engine.outcome()["version"]
    assert engine.holds(0)


class Stranger:
    """A client of ZeroMQ that knows where the trainer listens."""

    def __init__(self, trainer: TrainerParty) -> None:
        self.client = ControlClient(endpoint(trainer))
        self.client.open()

    def say(self, *frames: bytes) -> None:
        for frame in frames:
            self.client.send(frame)

    def close(self) -> None:
        self.client.close()


def hello(trainer: TrainerParty, name: str, pid: int) -> bytes:
    """What a receiver says first that knows the token."""
    return write_hello(Hello(name, name, pid, name.encode().ljust(16), 1), trainer.info()["token"])


@pytest.mark.parametrize(
    "noise",
    [
        b"",
        b"\0" * 64,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x01\0" + b"\x06\0noise" * 100,
        GREETING[:11],
        GREETING + b"\x04\xff" + bytes(255),
        GREETING + READY + TRUNCATED,
        GREETING + READY + ENDLESS,
    ],
    ids=[
        "nothing",
        "zeros",
        "http",
        "version 1",
        "half a greeting",
        "bad command",
        "truncated",
        "endless",
    ],
)
def test_bytes_that_are_no_protocol_do_no_harm(pair, noise):
    trainer, engine = pair
    with ExitStack() as stack:
        for _ in range(5):
            raw = stack.enter_context(socket.socket(socket.AF_UNIX))
            raw.connect(endpoint(trainer).removeprefix("ipc://"))
            raw.sendall(noise)
        assert_refit(trainer, engine)
    assert_refit(trainer, engine)


@pytest.mark.parametrize(
    "frames",
    [
        [b"noise"],
        [b"\xff" * 100] * 1000,
        [bytes(MAX_FRAME_BYTES)],
        [bytes(MAX_FRAME_BYTES + 1)],
        [write_hello(Hello("id", "stranger", 1, b"n" * 16, 1), "guess")],
    ],
    ids=["noise", "a thousand", "large", "too large", "another token"],
)
def test_frames_of_a_client_without_the_token_do_no_harm(pair, frames):
    trainer, engine = pair
    with closing(Stranger(trainer)) as stranger:
        trainer.begin()
        stranger.say(*frames)
        engine.begin()
        stranger.say(*frames)
        assert engine.outcome()["version"] == trainer.outcome()["version"] == 1
    assert engine.holds(0)


def test_a_message_in_several_parts_is_passed_over(pair):
    trainer, engine = pair
    with closing(Stranger(trainer)) as stranger:
        assert stranger.client._monitored is not None
        stranger.client._monitored.socket.send_multipart([b"three", b"parts", b"here"])
        assert_refit(trainer, engine)


def test_a_receiver_that_says_hello_and_no_more_is_named_at_the_deadline(pair):
    trainer, engine = pair
    with closing(Stranger(trainer)) as mute:
        trainer.begin()
        mute.say(hello(trainer, "mute", 7))
        until(lambda: trainer.endpoint.jobs[-1].session.connections)
        trainer.trainer.clock.ahead_s = LATER
        error = trainer.failure()
    assert isinstance(error, RefitPeerError)
    assert "mute, pid 7" in error.peer
    engine.meet(trainer.info())  # it made no call for the refit that failed
    assert_refit(trainer, engine)


def test_an_endpoint_behind_which_something_else_listens_is_given_up_at_the_deadline(pair):
    trainer, engine = pair
    path = endpoint(trainer).removeprefix("ipc://") + "-else"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(path)
        other.listen()
        info = trainer.info()
        engine.meet(info | {"addresses": {"ipc": {"endpoint": f"ipc://{path}"}}})
        engine.begin(deadline_s=1.0)
        error = engine.failure()
    assert isinstance(error, RefitPeerError)
    assert error.phase == "DISCOVER"
    engine.meet(trainer.info())
    assert_refit(trainer, engine)
