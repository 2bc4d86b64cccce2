"""What belongs together finds each other; what happened is neither taken back nor done again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from simple_pair import (
    SOON,
    Engine,
    Gate,
    InPlaceSink,
    Trainer,
    begin,
    blank,
    go,
    make_persistent,
    until,
)

from rl_core.errors import (
    ConfigError,
    LifecycleError,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
)
from rl_core.weights.protocol.messages import PROTOCOL
from rl_core.weights.sending import send_job as _send_job


def step(trainer: Trainer, seed: int) -> None:
    """Other weights, in the same memory."""
    for name, tensor in make_persistent(seed).items():
        trainer.source.tensor[name].copy_(tensor)


@pytest.fixture
def both(keep) -> tuple[Trainer, Engine]:
    trainer = keep(Trainer(make_persistent()))
    return trainer, keep(Engine(blank(trainer.source.tensor), kind=InPlaceSink))


# -- what happens to an engine's weights in the midst of a refit -----------------------------------


# -- a version is of one state of the weights ------------------------------------------------------


def test_a_version_names_one_refit_also_while_the_report_is_written(both, monkeypatch):
    trainer, engine = both
    gate, report = Gate(), _send_job.RefitReport
    slow = lambda **figures: gate() or report(**figures)  # noqa: E731
    monkeypatch.setattr(_send_job, "RefitReport", slow)
    sending_, receiving = begin(trainer, engine)
    assert receiving.result(SOON)["version"] == 1
    assert gate.reached.wait(SOON)
    assert trainer.sender.version == 1
    second = trainer.sender.send(deadline_s=SOON)
    assert trainer.sender.jobs[-1].version == 2
    gate.opened.set()
    engine.receiver.receive(deadline_s=SOON).result(SOON)
    assert (sending_.result(SOON)["version"], second.result(SOON)["version"]) == (1, 2)


def test_what_a_transport_raises_ends_the_refit_on_both_sides(both):
    trainer, engine = both
    engine.prepare_refit_info(trainer.prepare_refit_info())
    end = trainer.sender.connection("ipc").end
    receive = end.receive

    def broken(timeout_s: float) -> Any:
        if trainer.sender.jobs[0].session.phase == "PREPARE":
            raise OSError("the cable is cut")
        return receive(timeout_s)

    end.receive = broken
    sending_, receiving = begin(trainer, engine)
    assert "the cable is cut" in str(sending_.exception(SOON))
    assert isinstance(sending_.exception(SOON), RefitError)
    assert isinstance(receiving.exception(SOON), RefitError)
    end.receive = receive
    go(trainer, engine)


# -- calls that belong together --------------------------------------------------------------------


def test_an_engine_does_not_wait_for_a_refit_that_the_trainer_could_not_begin(both, monkeypatch):
    trainer, engine = both

    def refuse(number: int, deadline_s: float) -> None:
        raise LifecycleError("the ranks are out of step")

    monkeypatch.setattr(trainer.source, "open", refuse)
    with pytest.raises(LifecycleError, match="out of step"):
        go(trainer, engine, deadline_s=600)
    until(lambda: not engine.receiver.jobs, "the end of the engine's call")
    monkeypatch.undo()
    assert go(trainer, engine).version == 1


def test_a_trainer_does_not_wait_for_an_engine_that_could_not_be_asked(both, monkeypatch):
    trainer, engine = both
    monkeypatch.setattr(engine, "receive_weights", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        go(trainer, engine, deadline_s=600)
    until(lambda: not trainer.sender.jobs, "the end of the trainer's call")


# -- a refit that fails on one side ----------------------------------------------------------------


def test_a_trainer_that_has_no_room_for_a_refit_says_so_in_the_engines_place(both, monkeypatch):
    trainer, engine = both

    def scarce(**_: Any) -> None:
        raise RefitError("no room for a refit", fix="make some")

    monkeypatch.setattr("rl_core.weights.transports.control.require_room", scarce)
    with pytest.raises(RefitError, match="no room for a refit"):
        go(trainer, engine)


def test_a_refit_that_runs_keeps_its_end_where_the_next_one_has_no_room(both, monkeypatch):
    trainer, engine = both
    failures: list[Any] = []

    def scarce() -> None:
        raise RefitError("no room for a refit")

    def ask_for_another(_: str) -> None:
        trainer.source.before = lambda _: None
        with monkeypatch.context() as patch:
            patch.setattr("rl_core.weights.transports.control.require_room", scarce)
            failures.append(trainer.sender.send().exception(SOON))

    trainer.source.before = ask_for_another
    assert go(trainer, engine, mode="packed").version == 1
    assert "no room" in str(failures[0])


# -- what is refused by name -----------------------------------------------------------------------


@pytest.mark.parametrize("theirs", [PROTOCOL - 1, PROTOCOL + 1, 99, "x"])
def test_another_version_of_rl_core_is_refused_by_name(both, theirs):
    trainer, engine = both
    info = trainer.prepare_refit_info() | {"protocol": theirs, "rl_core": "9.9.9"}
    with pytest.raises(RefitProtocolError, match=r"9\.9\.9.*protocol") as error:
        engine.prepare_refit_info(info)
    assert f"protocol {PROTOCOL}" in str(error.value)
    assert "same rl-core" in str(error.value.fix)


@pytest.mark.parametrize("value", [0, -1, 1e10, True, "1"])
def test_a_receiver_refuses_a_deadline_that_is_none(both, value):
    trainer, engine = both
    engine.prepare_refit_info(trainer.prepare_refit_info())
    with pytest.raises(ConfigError, match="deadline_s"):
        engine.receiver.receive(deadline_s=value)


def test_a_trainer_that_is_not_to_be_seen_from_here_is_told_from_a_dead_one(both, tmp_path):
    trainer, engine = both
    info = trainer.prepare_refit_info()
    elsewhere = {"ipc": {"endpoint": f"ipc://{tmp_path}/rl-refit-x/socket"}}
    engine.prepare_refit_info(info | {"addresses": elsewhere})
    with pytest.raises(RefitPeerError, match="another host or container") as error:
        engine.receiver.receive(deadline_s=SOON).result(SOON)
    assert "collective" in str(error.value.fix)


@pytest.mark.parametrize(
    ("found", "given", "where"),
    [
        ("8.8.8.8", None, None),
        ("8.8.8.8", "10.0.0.1", "10.0.0.1"),
        ("192.168.0.1", None, "192.168.0.1"),
    ],
)
def test_a_public_address_is_taken_only_if_it_is_given(pair, found, given, where):
    trainer, engine = pair
    described = trainer.prepare_refit_info()
    trainer.prepare_refit_info = lambda: {**described, "host": found}
    asked: list[str] = []
    trainer.init_collective = lambda ip, port, size: asked.append(ip) or 1 / 0
    expected = ZeroDivisionError if where else ConfigError
    with pytest.raises(expected) as error:
        go(trainer, engine, transport="collective", address=given)
    assert asked == ([where] if where else [])
    assert where or "address=" in str(error.value.fix)


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_that_holds_no_socket_hinders_no_other_transport(
    both, monkeypatch, tmp_path, there
):
    trainer, engine = both
    deep = tmp_path / ("x" * 120)
    if there:
        deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    info = trainer.prepare_refit_info()
    assert info["addresses"] == {}
    with pytest.raises(RefitError, match="TMPDIR"):
        trainer.sender.send().result(SOON)
    engine.prepare_refit_info(info)
    with pytest.raises(LifecycleError, match=r"cannot (create|be bound)[^\0]*TMPDIR"):
        engine.receiver.receive()


# -- what is kept, and for how long ----------------------------------------------------------------


def test_an_error_that_is_kept_keeps_no_buffers(both):
    trainer, engine = both
    lanes: list[weakref.ref[Any]] = []
    lane_of = trainer.sender.kept.lane

    def remember(*arguments: Any) -> Any:
        lane = lane_of(*arguments)
        lanes.append(weakref.ref(lane.data))
        return lane

    trainer.sender.kept.lane = remember
    trainer.source.on["confirm"] = lambda: 1 / 0
    with pytest.raises(RefitError) as kept:
        go(trainer, engine, mode="packed")
    engine.idle()
    gc.collect()
    assert lanes
    assert [lane() for lane in lanes] == [None] * len(lanes), kept.value


@pytest.mark.parametrize("how", ["prepared for another", "asked to generate"])
def test_the_memory_of_a_trainer_that_is_gone_is_let_go(keep, how):
    first = Trainer(make_persistent(), at_home=True)
    engine = keep(Engine(blank(first.source.tensor), kind=InPlaceSink))
    assert go(first, engine).mode == "direct"
    [lane] = engine.receiver.connections["ipc"].lanes.values()
    mapped = weakref.ref(lane.data)
    del lane
    first.close()
    if how == "asked to generate":
        engine.clock.ahead_s = 60.0
        engine.receiver.check()
    else:
        other = keep(Trainer(make_persistent(), at_home=True))
        engine.prepare_refit_info(other.prepare_refit_info())
    gc.collect()
    assert mapped() is None
    assert not any(kept.lanes for kept in engine.receiver.connections.values())
