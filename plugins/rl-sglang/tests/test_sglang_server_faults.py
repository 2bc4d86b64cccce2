"""Many calls at a server, calls that are given up, and servers that fail."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from engines.calls import in_background, prompts, until
from patience import enough_for

from rl_core.errors import ConfigError, DeadlineError, PluginError, WorkerDiedError

if TYPE_CHECKING:
    from fake_sglang_server import FakeSglangServer


# -- many at once, and fewer ----------------------------------------------------------------------


def test_server_gets_no_more_rows_than_it_may(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.01
    generation = connect(max_new_tokens=3, max_requests=4)
    call = in_background(lambda: generation.generate(prompts(*([n] for n in range(5, 25)))))
    most = 0
    while len(fake.requests) < 20:
        most = max(most, len(fake.running))
    assert call()["generation_lengths"].tolist() == [3] * 20
    assert most <= 4


def test_names_of_rows_are_no_beginnings_of_others(connect: Any, fake: FakeSglangServer) -> None:
    connect(max_new_tokens=1).generate(prompts(*([n] for n in range(5, 25))))
    names = [one["rid"] for one in fake.requests]
    assert len(set(names)) == 20
    assert len({len(name) for name in names}) == 1


# -- faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "error", "said"),
    [
        ("500", PluginError, "500"),
        ("refuse", PluginError, "too long"),
        ("nonsense", PluginError, "as SGLang never does"),
        ("no event", PluginError, "malformed part of a row"),
        ("hang up", WorkerDiedError, "has ended or cannot be reached"),
        ("nan", PluginError, "row 0 a log-prob that is not finite, with weights of version 0"),
        ("short", PluginError, "1 tokens? and|tokens and"),
        ("abort", PluginError, "aborted a row"),
    ],
)
def test_fault_is_a_typed_error_and_the_next_call_works(
    connect: Any, fake: FakeSglangServer, fault: str, error: type[Exception], said: str
) -> None:
    generation = connect(max_new_tokens=6, stop_strings=["never"])
    fake.fault = fault
    with pytest.raises(error, match=said) as caught:
        generation.generate(prompts([5]))
    assert fake.url in str(caught.value) or fault == "nan"
    fake.fault = ""
    assert generation.generate(prompts([5]))["generation_lengths"].tolist() == [6]


def test_fault_of_a_row_fails_its_call_alone(connect: Any, fake: FakeSglangServer) -> None:
    fake.token_s = 0.05
    generation = connect(max_new_tokens=20)
    other = in_background(lambda: generation.generate(prompts([5])))
    until(lambda: len(fake.running) == 1)
    fake.fault = "500"
    with pytest.raises(PluginError):
        generation.generate(prompts([6]))
    fake.fault = ""
    assert other()["generation_lengths"].tolist() == [20]


def test_server_that_hangs_is_given_up_before_the_call_is(
    connect: Any, fake: FakeSglangServer
) -> None:
    generation = connect(request_timeout_s=1.0, call_deadline_s=60)
    fake.fault = "hang"
    with pytest.raises(DeadlineError, match="decoded no token for 1 s") as caught:
        generation.generate(prompts([5], [6]))
    assert fake.url in str(caught.value)
    until(lambda: not fake.running)


@pytest.mark.parametrize("sign", ["tokens", "paused"])
def test_rows_wait_while_others_get_tokens_or_somebody_paused_the_server(
    connect: Any, fake: FakeSglangServer, sign: str
) -> None:
    seconds = enough_for(lambda: connect(max_new_tokens=1).generate(prompts([5])), least=1.0)
    generation = connect(request_timeout_s=seconds, max_new_tokens=1)
    fake.fault = "hang"
    call = in_background(lambda: generation.generate(prompts([5])))
    end = time.monotonic() + 2.5 * seconds
    while time.monotonic() < end:
        fake.tokens, fake.paused = fake.tokens + (sign == "tokens"), sign == "paused"
        time.sleep(seconds / 20)
    fake.fault = ""
    assert call()["generation_lengths"].tolist() == [1]


def test_another_model_at_the_same_address_is_refused(connect: Any, fake: FakeSglangServer) -> None:
    generation = connect(max_new_tokens=2)
    generation.generate(prompts([5]))
    fake.stop()
    fake.server_info["model_path"] = "/another"
    fake.model_info = {"architectures": ["OtherForCausalLM"], "model_type": "other"}
    fake.start()
    with pytest.raises(ConfigError, match="OtherForCausalLM"):
        generation.generate(prompts([5]))
