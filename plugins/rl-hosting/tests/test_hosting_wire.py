"""What an engine may say, and what becomes of one that says something else."""

from __future__ import annotations

import builtins
import socket
import struct
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import msgspec
import psutil
import pytest
from fake_backend import SOON, prompts, until
from fake_engine import ENDLESS

from rl_backends import Completion
from rl_core.errors import (
    DeadlineError,
    IncompatiblePluginError,
    ManifestMismatchError,
    PluginError,
    RLError,
    WorkerError,
)
from rl_hosting import _messages
from rl_hosting._messages import PROTOCOL, Channel, Hello, Progress, Reply, Request, encode
from rl_hosting.cluster.remote_error import decode_error, encode_error

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAD = struct.Struct("!BQ")


def framed(message: Any, version: int = PROTOCOL) -> bytes:
    data = message if isinstance(message, bytes) else msgspec.msgpack.encode(message)
    return HEAD.pack(version, len(data)) + data


#: What an engine writes to its socket, and a word of the error.
NONSENSE = {
    "garbage": (b"\xff" * 64, "protocol 255"),
    "printed": (b"INFO: hello\n", "protocol 73"),
    "version": (framed(Progress(), version=PROTOCOL + 1), f"protocol {PROTOCOL + 1}"),
    "endless": (HEAD.pack(PROTOCOL, 1 << 60), "a frame of"),
    "no message": (framed(b"\xc1"), "malformed message"),
    "no map": (framed({"hello": 1}), "malformed message"),
    "tag": (framed(["goodbye"]), "malformed message"),
    "types": (framed(["reply", "one", 2, 3]), "malformed message"),
    "rows": (framed(["progress", [["x"]]]), "malformed message"),
    "row without tokens": (framed(["progress", [{"row": 0}]]), "malformed message"),
    "error": (framed(["progress", [], {0: "torn"}]), "malformed message"),
    "second hello": (framed(Hello({}, "?")), "malformed message"),
    "request": (framed(Request("start")), "malformed message"),
    "unknown row": (framed(Progress([Completion(1 << 40, [], [], True)])), "was never given"),
}
#: What does no harm: what is about nothing that anybody waits for.
HARMLESS = {
    "old reply": framed(Reply(1, "again")),
    "reply to nobody": framed(Reply(1 << 30, 5)),
    "row that was taken back": framed(Progress([Completion(0, [], [], True)])),
    "sign of life": framed(Progress()),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_fails_the_calls_in_flight_by_name(start, what):
    said, words = NONSENSE[what]
    engine = start(fake={"acts": {"reset_caches": said}})

    def wait_for(engine: Any, call: Any) -> None:
        if what == "unknown row":  # it is in a message that only who waits for rows reads
            engine._process.tell("reset_caches")
            call.result(SOON)
        engine.invalidate_kv_cache()

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(engine.generate, prompts(ENDLESS))
        until(lambda: engine._rows.busy)
        with pytest.raises(RLError, match=f"(?s)the fake engine.*{words}") as caught:
            wait_for(engine, call)
        assert "the fake engine starts" in caught.value.details["log"]
        with pytest.raises(RLError, match=words):
            call.result(SOON)
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize("what", HARMLESS)
def test_what_nobody_waits_for_is_passed_over(start, what):
    engine = start(fake={"acts": {"reset_caches": HARMLESS[what]}})
    engine.generate(prompts(5))
    assert engine.invalidate_kv_cache()
    assert engine.generate(prompts(5))["output_ids"].tolist() == [[5, 6, 7, 8, 9]]


def test_a_frame_that_does_not_go_on_fails_the_calls(start, monkeypatch):
    monkeypatch.setattr(_messages, "FRAME_STALL_S", 0.5)
    engine = start(fake={"acts": {"submit": HEAD.pack(PROTOCOL, 1000) + b"abc", "step": "hang"}})
    with pytest.raises(RLError, match=r"the fake engine.*sent 3 of 1000 bytes of a message"):
        engine.generate(prompts(5))
    assert not psutil.pid_exists(engine.pid)


#: What ``step`` returns, and the error that follows, or none.
WRONG = {
    "twice": None,
    "gone": None,
    "unknown": "no row that it was given",
    "negative": "no row that it was given",
    "text": "no row that it was given",
    "none": "NoneType",
    "object": "type object",
    "words": "the fake engine",
    "short": "4 tokens and 0 log-probs",
    "long": "36 tokens of 4",
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_step_may_not_return_fails_its_calls_alone(start, wrong):
    engine = start(fake={"wrong": wrong}, call_deadline_s=SOON)
    if WRONG[wrong] is None:
        for _ in range(3):
            assert engine.generate(prompts(5))["output_ids"].tolist() == [[5, 6, 7, 8, 9]]
        return
    with pytest.raises(RLError, match=WRONG[wrong]) as caught:
        engine.generate(prompts(5))
    assert not isinstance(caught.value, DeadlineError)
    assert "the fake engine starts" in caught.value.details["log"]


@pytest.mark.parametrize(
    "facts",
    [{"vocab_size": "many"}, {"eos_token_ids": 1}, {"workers": 0}, {"max_model_len": None}],
    ids=str,
)
def test_facts_of_wrong_types_are_refused(start, facts):
    with pytest.raises(PluginError, match=f"the fake engine.*{next(iter(facts))}") as caught:
        start(fake={"facts": facts})
    assert "the fake engine starts" in caught.value.details["log"]


def test_facts_that_cannot_be_sent_are_refused(start):
    with pytest.raises(WorkerError, match="FakeEngine"):
        start(fake={"unspeakable": True})


# -- the channel alone -----------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    ours, theirs = map(Channel, socket.socketpair())
    yield ours, theirs
    ours.close()
    theirs.close()


def test_a_side_that_takes_nothing_is_given_up(ends):
    ours, _ = ends
    begun = time.monotonic()
    with pytest.raises(DeadlineError, match="did not read a message"):
        ours.send(encode(Reply(1, "x" * 10_000_000)), 0.2)
    assert time.monotonic() - begun < SOON
    with pytest.raises(BrokenPipeError, match="a part of an earlier frame"):
        ours.send(encode(Reply(2)), 0.2)


def test_a_frame_that_was_not_begun_may_be_sent_again(ends):
    ours, theirs = ends
    ours._end.setblocking(False)
    sent = 0
    while True:
        try:
            sent += ours._end.send(framed(Progress()))
        except BlockingIOError:
            break
    ours._end.setblocking(True)
    if sent % len(framed(Progress())):
        pytest.skip("the kernel took a part")
    with pytest.raises(DeadlineError):
        ours.send(encode(Reply(1)), 0.1)
    for _ in range(sent // len(framed(Progress()))):
        theirs.receive()
    ours.send(encode(Reply(2)), SOON)
    assert theirs.receive() == Reply(2)


def test_another_version_is_refused_by_both(ends):
    ours, theirs = ends
    ours._end.sendall(framed(Progress(), version=PROTOCOL + 1))
    with pytest.raises(
        IncompatiblePluginError, match=f"protocol {PROTOCOL + 1} .* this side {PROTOCOL}"
    ):
        theirs.receive()


def test_a_frame_takes_the_memory_of_what_came_and_not_of_what_was_announced(ends):
    ours, theirs = ends
    ours._end.sendall(HEAD.pack(PROTOCOL, 1 << 33) + b"x" * 100)
    ours.close()
    tracemalloc.start()
    try:
        with pytest.raises(EOFError):
            theirs.receive()
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["SystemExit", "KeyboardInterrupt", "BaseException"])
def test_no_error_of_an_engine_ends_the_driver(name):
    error = decode_error([name, "come with me", None, {}])
    assert type(error) is WorkerError
    assert type(decode_error(encode_error(getattr(builtins, name)("so"), "w"))) is WorkerError


@pytest.mark.parametrize("plain", [[], "torn", 3, ["ValueError", "no", None, 7]])
def test_an_error_that_cannot_be_read_is_an_error_that_says_so(plain):
    assert "an error that cannot be decoded" in decode_error(plain).message


def test_errors_cross_processes_as_text():
    error = ManifestMismatchError("two differ", fix="load the same", missing=["a"], extra=object())
    plain = encode_error(error, "worker 1")
    again = decode_error(plain)
    assert isinstance(again, ManifestMismatchError)
    assert again.details["missing"] == ["a"]
    assert again.fix == "load the same"
    assert "worker 1" in str(again)
    assert encode_error(again, "driver") == plain
    assert isinstance(decode_error(encode_error(ZeroDivisionError("x"), "w")), ZeroDivisionError)
