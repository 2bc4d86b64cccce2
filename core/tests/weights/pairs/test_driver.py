"""``refit(policy, generation)``: retries, events, and the transports that it finds."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from installed import Install
from patience import enough_for
from simple_pair import BUCKET, SOON, Engine, go, same

from rl_core.errors import (
    AmbiguousBackendError,
    BackendNotFoundError,
    BrokenPluginError,
    CapabilityError,
    ConfigError,
    DeadlineError,
    LifecycleError,
    ManifestMismatchError,
    RefitCorrupted,
    RefitError,
    RefitProtocolError,
)
from rl_core.plugins import hookspecs
from rl_core.plugins.discovery import TRANSPORTS
from rl_core.weights.transports import find_transport

Events = list[tuple[str, dict[str, Any]]]


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    heard: Events = []
    monkeypatch.setattr(hookspecs, "emit", lambda name, **facts: heard.append((name, facts)))
    return heard


def names(events: Events) -> list[str]:
    return [name for name, _ in events]


def fail_once(engine: Engine, call: str, error: BaseException | None = None) -> None:
    """The next call raises, and none after it."""

    def fail() -> None:
        engine.sink.on.clear()
        raise error or OSError(f"{call} failed")

    engine.sink.on[call] = fail


# -- retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("call", ["begin", "write", "finish", "commit"])
def test_a_refit_that_failed_is_tried_again(pair, call, isolation):
    trainer, engine = pair
    fail_once(engine, call)
    report = go(trainer, engine, retries=1, isolation=isolation)
    assert report.attempts == 2
    assert report.version == engine.receiver.version == trainer.sender.version
    engine.receiver.check()
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_the_last_attempt_raises_its_error(pair):
    trainer, engine = pair
    engine.sink.on["finish"] = lambda: 1 / 0
    with pytest.raises(RefitError, match="division by zero"):
        go(trainer, engine, retries=2)
    assert engine.idle().sink.calls.count("finish") == 3


def test_all_attempts_share_one_deadline(pair, monkeypatch):
    trainer, engine = pair
    given: list[float] = []
    send = trainer.sender.send

    def remember(**options: Any) -> Any:
        given.append(options["deadline_s"])
        return send(**options)

    def late() -> None:
        time.sleep(0.5)
        raise ZeroDivisionError

    monkeypatch.setattr(trainer.sender, "send", remember)
    engine.sink.on["finish"] = late
    with pytest.raises(RefitError):
        go(trainer, engine, retries=1, deadline_s=30.0)
    first, second = given
    assert first == 30.0
    assert 0 < second <= 29.5


def test_the_two_sides_have_what_meeting_left_of_the_deadline(pair):
    trainer, engine = pair
    given: list[float] = []
    trainer.init_collective = lambda *where: time.sleep(0.2) or []
    engine.init_collective = lambda *where: []
    trainer.send_weights = lambda **options: given.append(options["deadline_s"]) or []
    engine.receive_weights = lambda **options: given.append(options["deadline_s"])
    with pytest.raises(TypeError):  # these are no futures
        go(trainer, engine, transport="collective", deadline_s=30.0)
    assert given[0] == given[1]
    assert 0 < given[0] <= 29.8


def test_a_policy_that_does_not_say_where_to_meet_is_refused(pair):
    trainer, engine = pair
    described = trainer.prepare_refit_info()
    foreign = {key: value for key, value in described.items() if key not in ("host", "addresses")}
    trainer.prepare_refit_info = lambda: foreign
    with pytest.raises(RefitProtocolError, match="no host and port"):
        go(trainer, engine, transport="collective")


def test_an_error_of_the_deadline_is_not_followed_by_an_attempt_without_time(pair):
    trainer, engine = pair
    seconds = enough_for(lambda: go(trainer, engine), least=2.0)
    with (
        engine.lock,
        pytest.raises(RefitError, match=r"generation did not end within [\d.]+ s"),
    ):
        go(trainer, engine, retries=1, deadline_s=seconds)


# -- what no retry helps against ------------------------------------------------------------------


@pytest.mark.parametrize("error", [ManifestMismatchError, CapabilityError])
def test_what_no_retry_changes_is_not_tried_again(pair, events, error):
    trainer, engine = pair
    if error is ManifestMismatchError:
        engine.sink.tensor["more"] = engine.sink.tensor["big"]
    with pytest.raises(error):
        go(trainer, engine, retries=3, kv_scales={"k": 1.0})
    assert names(events) == ["refit_started", "refit_failed"]


def test_an_error_of_the_trainer_is_not_tried_again(pair, events):
    trainer, engine = pair
    trainer.source.before = lambda name: 1 / 0
    with pytest.raises(RefitError, match="ZeroDivisionError"):
        go(trainer, engine)
    trainer.source.before = lambda name: None
    go(trainer, engine, verify="none")
    with pytest.raises(LifecycleError, match="without hashes"):
        go(trainer, engine, retries=3, version=1)
    assert names(events)[-2:] == ["refit_started", "refit_failed"]


def test_a_bad_option_is_refused_before_anything_is_told(pair, events):
    with pytest.raises(ConfigError):
        go(*pair, version=0)
    assert events == []


# -- which error is raised ------------------------------------------------------------------------


def test_the_engines_error_is_raised_with_its_details_not_the_trainers_echo(pair):
    trainer, engine = pair
    engine.sink.on["finish"] = engine.sink.tensor["big"].zero_
    for _ in range(5):
        with pytest.raises(RefitCorrupted) as caught:
            go(trainer, engine, verify="installed")
        assert caught.value.details["tensors"] == ["big"]


def test_an_engine_that_gives_no_sign_is_a_deadline_error_or_is_named(pair):
    trainer, engine = pair
    engine.receive_weights = lambda **options: []
    with pytest.raises((DeadlineError, RefitError), match="1 of 1 receivers"):
        go(trainer, engine, deadline_s=0.2)


def test_an_engine_that_gave_up_on_its_own_is_named(pair):
    trainer, engine = pair
    update = engine.receive_weights
    engine.receive_weights = lambda **options: update(**options | {"deadline_s": 0.3})
    with engine.lock, pytest.raises(RefitError, match=r"0\.3 s"):
        go(trainer, engine)


def test_only_a_rank_that_sends_has_an_engine(pair):
    trainer, engine = pair
    with pytest.raises(ConfigError, match="has no engine"):
        go(trainer, None)
    trainer.prepare_refit_info = lambda: None
    with pytest.raises(ConfigError, match="does not send from here"):
        go(trainer, engine)


def test_a_policy_that_gives_no_report_is_refused(pair):
    trainer, engine = pair
    stream = trainer.send_weights
    trainer.send_weights = lambda **options: stream(**options) and []
    with pytest.raises(RefitProtocolError, match="no report"):
        go(trainer, engine)


# -- events ---------------------------------------------------------------------------------------


def test_plugins_hear_of_start_and_commit_with_the_report(pair, events):
    report = go(*pair, verify="installed")
    assert events == [
        ("refit_started", {"verify": "installed", "isolation": "quiesced"}),
        ("refit_committed", report.as_dict()),
    ]


def test_plugins_hear_of_a_failure_and_its_class(pair, events):
    trainer, engine = pair
    engine.sink.on["finish"] = engine.sink.tensor["big"].zero_
    with pytest.raises(RefitCorrupted):
        go(trainer, engine, verify="installed")
    assert names(events) == ["refit_started", "refit_failed"]
    assert events[1][1]["error"] == "RefitCorrupted"


def test_plugins_hear_of_the_progress_of_long_refits(pair, events):
    trainer, engine = pair
    trainer.clock.each_look_s = 2.0  # every bucket takes long
    report = go(trainer, engine, version=3, deadline_s=86_400)
    progress = [facts for name, facts in events if name == "refit_progress"]
    assert [facts["sent"] for facts in progress] == list(range(report.buckets))
    assert {facts["version"] for facts in progress} == {3}
    assert {facts["bytes"] for facts in progress} == {report.bytes}


def test_a_module_without_a_plugin_for_modules_names_what_to_install(pair, monkeypatch):
    monkeypatch.setattr(hookspecs, "only_answer", lambda hook, **_: None)
    trainer, engine = pair
    for sides in ((torch.nn.Linear(1, 1), engine), (trainer, torch.nn.Linear(1, 1))):
        with pytest.raises(ConfigError, match="got a") as refused:
            go(*sides)
        assert "rl-backends" in str(refused.value.fix)


# -- transports -----------------------------------------------------------------------------------


def test_an_unknown_transport_is_answered_with_those_that_are_installed(pair):
    with pytest.raises(BackendNotFoundError, match="refit transport 'pigeon'") as caught:
        pair[0].sender.send(transport="pigeon")
    assert "collective, ipc" in str(caught.value)
    assert caught.value.fix == "install the plugin that provides it"


def test_a_transport_of_another_distribution_is_used(install: Install, pair):
    source = "from rl_core.weights.transports.ipc import IPC as PIGEON\n"
    install("rl-pigeon", {TRANSPORTS: {"pigeon": "pigeon:PIGEON"}}, {"pigeon": source})
    trainer, engine = pair
    trainer.sender.connection("pigeon")
    engine.prepare_refit_info(trainer.prepare_refit_info())
    sending = trainer.sender.send(transport="pigeon", bucket_bytes=BUCKET, deadline_s=SOON)
    engine.receiver.receive(transport="pigeon", deadline_s=SOON).result(SOON)
    assert sending.result(SOON)["transport"] == "pigeon"
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_two_providers_of_one_transport_are_both_named(install: Install):
    install("rl-owl", {TRANSPORTS: {"ipc": "owl:IPC"}})
    with pytest.raises(AmbiguousBackendError) as caught:
        find_transport("ipc")
    assert "rl-owl" in str(caught.value)
    assert "rl-core" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("", "AttributeError"),
        ("PIGEON = 'coo'", "a str, not a Transport"),
    ],
)
def test_a_broken_transport_is_its_distributions_fault(install: Install, source, cause):
    install("rl-pigeon", {TRANSPORTS: {"pigeon": "pigeon:PIGEON"}}, {"pigeon": source})
    with pytest.raises(BrokenPluginError, match=cause) as caught:
        find_transport("pigeon")
    assert "rl-pigeon" in str(caught.value)


def test_an_option_that_a_transport_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="color"):
        find_transport("ipc").sender(color="red")
