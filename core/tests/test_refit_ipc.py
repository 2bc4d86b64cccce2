"""Refits over shared memory, within a process and between processes, and every way to fail."""

from __future__ import annotations

import gc
import glob
import multiprocessing
import os
import signal
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest
import torch
import zmq
from refit_doubles import (
    Engine,
    Tensors,
    Trainer,
    blank,
    engine_process,
    make_tensors,
    same,
    trainer_process,
)

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitCorrupted,
    RefitError,
    RefitPeerError,
    RefitProtocolError,
    WeightsTornError,
)
from rl_core.futures import wait
from rl_core.plugins import hookspecs
from rl_core.refit import refit
from rl_core.refit.transports.memory import SharedRegion
from rl_core.refit.transports.process import is_alive, this_process

if TYPE_CHECKING:
    from collections.abc import Iterator

BUCKET = 1024
SOON = 20.0


@pytest.fixture(autouse=True)
def own_temporary_directory(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests that run beside this one leave things of their own in the common place."""
    tmp_path_factory.getbasetemp()  # pytest's own directory stays where it is
    with tempfile.TemporaryDirectory(prefix="t", dir=tempfile.gettempdir()) as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture
def pair() -> Iterator[tuple[Trainer, Engine]]:
    tensors = make_tensors()
    trainer, engine = Trainer(tensors), Engine(blank(tensors))
    yield trainer, engine
    trainer.sender.close()
    engine.receiver.close()


def go(trainer: Trainer, engine: Engine, **options: Any) -> Any:
    return refit(trainer, engine, **{"bucket_bytes": BUCKET, "deadline_s": SOON} | options)


def left_behind() -> set[str]:
    """What a refit could leave in the file system."""
    places = ["/dev/shm", tempfile.gettempdir()]
    return {path for place in places for path in glob.glob(f"{place}/rl-refit-*")}


@contextmanager
def raises_within(engine: Engine, trainer: Trainer, **options: Any) -> Iterator[dict[str, Any]]:
    """Runs a refit that must fail on both sides; yields each side's error."""
    trainer_info = trainer.prepare_refit_info()
    engine.prepare_refit_info(trainer_info)
    options = {"bucket_bytes": BUCKET, "deadline_s": SOON} | options
    sending = trainer.sender.stream_ipc(**options)
    receiving = engine.receiver.receive_ipc(deadline_s=SOON)
    yield {"sender": sending.exception(SOON), "receiver": receiving.exception(SOON)}


# -- exact --------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
def test_every_kind_of_tensor_arrives_bit_for_bit(pair, verify):
    trainer, engine = pair
    report = go(trainer, engine, verify=verify)
    assert same(trainer.source.tensor, engine.sink.tensor)
    assert engine.sink.calls[0] == "begin"
    assert engine.sink.calls[-2:] == ["finish", "commit"]
    assert report.version == engine.receiver.version == trainer.sender.version == 1


def test_the_report_counts_what_was_sent(pair):
    trainer, engine = pair
    report = go(trainer, engine)
    sent = [t for t in trainer.source.tensor.values() if t.numel()]
    assert report.tensors == len(sent)
    assert report.bytes == sum(t.numel() * t.element_size() for t in sent)
    assert report.extra_memory_bytes <= 2 * BUCKET
    assert report.buckets > report.bytes // BUCKET
    assert set(report.phases) == {"DISCOVER", "PREPARE", "TRANSFER", "SEAL", "COMMIT"}
    assert report.seconds == pytest.approx(sum(report.phases.values()))
    assert report.as_dict()["verify"] == "wire"
    assert "version 1" in str(report)


def test_unchanged_tensors_are_reported(pair):
    trainer, engine = pair
    assert go(trainer, engine).unchanged == 0
    trainer.source.tensor["scalar"].add_(1)
    report = go(trainer, engine)
    assert report.unchanged == report.tensors - 1
    assert go(trainer, engine, verify="none").unchanged is None


def test_floats_are_rounded_to_an_engine_that_casts_before_they_travel():
    tensors = {"w": torch.randn(100, 7), "b": torch.randn(7), "n": torch.arange(3)}
    trainer, engine = Trainer(tensors), Engine(blank(tensors))
    engine.sink.tensor |= {"w": torch.zeros(100, 7, dtype=torch.bfloat16)}
    engine.sink.casts = True
    report = go(trainer, engine, verify="installed")
    assert torch.equal(engine.sink.tensor["w"], tensors["w"].bfloat16())
    assert torch.equal(engine.sink.tensor["b"], tensors["b"])
    assert report.cast == 1
    assert report.bytes == 100 * 7 * 2 + 7 * 4 + 3 * 8
    trainer.sender.close()


def test_a_tied_tensor_is_sent_once_and_written_to_every_storage_of_the_engine():
    weight = torch.randn(30, 20)
    trainer = Trainer({"embed": weight, "head": weight}, ties={"head": "embed"})
    engine = Engine({"embed": torch.zeros(30, 20), "head": torch.zeros(30, 20)})
    report = go(trainer, engine, verify="installed")
    assert report.tensors == 1
    assert torch.equal(engine.sink.tensor["embed"], weight)
    assert torch.equal(engine.sink.tensor["head"], weight)
    trainer.sender.close()


def test_the_engine_may_own_a_tied_tensor_under_its_other_name():
    weight, mine = torch.randn(30, 20), torch.zeros(30, 20)
    trainer = Trainer({"embed": weight, "head": weight}, ties={"head": "embed"})
    engine = Engine({"embed": mine, "head": mine}, ties={"embed": "head"})
    go(trainer, engine, verify="installed")
    assert torch.equal(mine, weight)
    trainer.sender.close()


def test_weights_that_require_grad_are_sent_without_a_graph(pair):
    trainer, engine = pair
    trainer.source.tensor["big"].requires_grad_()
    go(trainer, engine)
    assert torch.equal(engine.sink.tensor["big"], trainer.source.tensor["big"])
    assert not engine.sink.tensor["big"].requires_grad


def test_a_model_without_elements_commits():
    trainer, engine = Trainer({"e": torch.empty(0)}), Engine({"e": torch.empty(0)})
    assert go(trainer, engine).bytes == 0
    assert engine.receiver.version == 1
    trainer.sender.close()


def test_a_version_may_be_chosen(pair):
    trainer, engine = pair
    go(trainer, engine, version=41)
    assert go(trainer, engine).version == engine.receiver.version == 42


def test_plugins_hear_of_start_commit_and_failure(pair, monkeypatch):
    events = []
    monkeypatch.setattr(
        hookspecs, "emit", lambda name, **facts: events.append((name, facts.get("version")))
    )
    go(*pair)
    with pytest.raises(ConfigError):
        go(*pair, version=0)
    started = ("refit_started", None)
    assert events == [started, ("refit_committed", 1), started, ("refit_failed", None)]


def test_a_file_in_a_chosen_directory_serves_where_processes_cannot_see_each_other(
    pair, tmp_path, monkeypatch
):
    monkeypatch.setenv("RL_CORE_SHM_DIR", str(tmp_path))
    trainer, engine = pair
    seen: list[list[Path]] = []
    engine.sink.on["begin"] = lambda: seen.append(list(tmp_path.iterdir()))
    engine.sink.on["finish"] = lambda: seen.append(list(tmp_path.iterdir()))
    for _ in range(2):
        go(trainer, engine)
        assert same(trainer.source.tensor, engine.sink.tensor)
        (attaching,), sealing = seen[-2:]
        assert attaching.name.startswith("rl-refit-")
        assert not sealing


# -- several receivers -----------------------------------------------------------------------------


class Replicas:
    """Engines that take one refit together."""

    def __init__(self, *engines: Engine) -> None:
        self.engines = engines
        self.receiver_count = len(engines)

    def prepare_refit_info(self, info: dict[str, Any]) -> None:
        for engine in self.engines:
            engine.prepare_refit_info(info)

    def update_weights_via_ipc_zmq(self, **options: Any) -> list[Any]:
        return [f for e in self.engines for f in e.update_weights_via_ipc_zmq(**options)]


def test_three_receivers_take_one_pack(pair):
    trainer, first = pair
    others = [Engine(blank(trainer.source.tensor)) for _ in range(2)]
    asked: list[str] = []
    trainer.source.before = asked.append
    report = go(trainer, Replicas(first, *others))
    assert report.receivers == 3
    assert len(asked) == report.tensors
    for engine in (first, *others):
        assert same(trainer.source.tensor, engine.sink.tensor)
        assert engine.receiver.version == 1


def test_one_failing_receiver_keeps_all_others_from_the_new_version(pair):
    trainer, good = pair
    bad = Engine(blank(trainer.source.tensor))
    bad.sink.on["finish"] = lambda: 1 / 0
    replicas = Replicas(good, bad)
    with pytest.raises(RefitError, match="division by zero"):
        go(trainer, replicas)
    with pytest.raises(WeightsTornError):
        wait_until_torn(good)
    assert (good.receiver.version, bad.receiver.version, trainer.sender.version) == (0, 0, 0)
    bad.sink.on.clear()
    go(trainer, replicas)
    assert same(bad.sink.tensor, good.sink.tensor)
    assert good.receiver.version == bad.receiver.version == 1


def wait_until_torn(engine: Engine) -> None:
    with engine.receiver.turn:  # its refit is over
        engine.receiver.check()


# -- refused before anything is touched ------------------------------------------------------------


def test_a_manifest_mismatch_names_everything_and_touches_nothing(pair):
    trainer, engine = pair
    go(trainer, engine)
    before = {name: t.clone() for name, t in engine.sink.tensor.items()}
    engine.sink.calls.clear()
    trainer.source.tensor = make_tensors(1) | {"scalar": torch.randn(2), "extra": torch.ones(1)}
    trainer.source.tensor["half"] = trainer.source.tensor["half"].float()
    del trainer.source.tensor["flags"]
    with pytest.raises(ManifestMismatchError) as caught:
        go(trainer, engine)
    details = caught.value.details
    assert details["missing"] == ["flags"]
    assert details["unexpected"] == ["extra"]
    assert details["misshaped"] == ["scalar"]
    assert details["mistyped"] == ["half"]
    assert same(before, engine.sink.tensor)
    assert engine.sink.calls == []
    engine.receiver.check()
    assert engine.receiver.version == 1


def test_a_trainer_that_changed_after_the_check_is_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    trainer.source.tensor["late"] = torch.ones(1)
    trainer.sender.stream_ipc(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="prepare_refit_info"):
        engine.receiver.receive_ipc(deadline_s=SOON).result(SOON)
    assert engine.sink.calls == []


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"verfy": "wire"}, ConfigError),
        ({"verify": "maybe"}, ConfigError),
        ({"receivers": 0}, ConfigError),
        ({"version": 0}, ConfigError),
        ({"deadline_s": 0}, ConfigError),
        ({"isolation": "loose"}, ConfigError),
        ({"isolation": "staged"}, CapabilityError),
    ],
)
def test_a_bad_option_is_refused_by_name(pair, option, error):
    with pytest.raises(error, match=next(iter(option))):
        pair[0].sender.stream_ipc(**option)


def test_receiving_before_prepare_is_a_lifecycle_error(pair):
    with pytest.raises(LifecycleError, match="prepare_refit_info"):
        pair[1].receiver.receive_ipc()


@pytest.mark.parametrize("damage", ["protocol", "digest", "tensors", "channel"])
def test_a_damaged_description_is_refused(pair, damage):
    info = pair[0].prepare_refit_info()
    info[damage] = {"protocol": 2, "digest": "0", "tensors": [{"name": 1}], "channel": {}}[damage]
    with pytest.raises(RefitProtocolError):
        pair[1].prepare_refit_info(info)


# -- failures within a process ---------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin", "write", "finish", "commit"])
def test_a_sink_that_raises_fails_both_sides_and_the_next_refit_recovers(pair, call):
    trainer, engine = pair
    go(trainer, engine)
    trainer.source.tensor["big"].mul_(2)
    engine.sink.on[call] = lambda: 1 / 0
    with raises_within(engine, trainer) as errors:
        assert isinstance(errors["receiver"], RefitError)
        assert isinstance(errors["sender"], RefitPeerError)
        assert "ZeroDivisionError" in str(errors["sender"])
        assert "receiver 0" in errors["sender"].peer
    assert engine.receiver.version == 1
    assert engine.receiver.torn == (call != "begin")
    assert ("fail" in engine.sink.calls) == (call != "begin")
    engine.sink.on.clear()
    go(trainer, engine)
    engine.receiver.check()
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_source_that_raises_fails_both_sides_and_the_next_refit_recovers(pair):
    trainer, engine = pair
    trainer.source.before = lambda name: 1 / 0 if name == "flags" else None
    with raises_within(engine, trainer) as errors:
        assert isinstance(errors["sender"].__cause__, ZeroDivisionError)
        assert isinstance(errors["receiver"], WeightsTornError)
    with pytest.raises(WeightsTornError, match="refit again"):
        engine.receiver.check()
    trainer.source.before = lambda name: None
    go(trainer, engine)
    engine.receiver.check()


def test_a_source_that_yields_another_shape_than_declared_is_named(pair):
    trainer, engine = pair
    declared = trainer.source.specs()
    trainer.source.specs = lambda: declared
    trainer.source.tensor["counts"] = torch.zeros(8, dtype=torch.int64)
    with raises_within(engine, trainer) as errors:
        assert isinstance(errors["sender"], ManifestMismatchError)
        assert "counts" in str(errors["sender"])


@pytest.mark.parametrize("fault", ["drop", "misplace", "convert"])
def test_installed_catches_a_loader_that_is_wrong(pair, fault):
    trainer, engine = pair
    write = engine.sink.write

    def wrong(name: str, offset: int, data: torch.Tensor, **kwargs: Any) -> None:
        if name != "big" or offset == 0:
            write(name, offset, data, **kwargs)
        elif fault == "misplace":
            write(name, offset - 1, data, **kwargs)
        elif fault == "convert":
            write(name, offset, data.bfloat16().float(), **kwargs)

    engine.sink.write = wrong
    with raises_within(engine, trainer, verify="installed") as errors:
        assert isinstance(errors["receiver"], RefitCorrupted)
        assert errors["receiver"].details["tensors"] == ["big"]
        assert isinstance(errors["sender"], RefitCorrupted)
    assert engine.receiver.torn


def test_bytes_damaged_in_shared_memory_are_noticed(pair):
    trainer, engine = pair
    go(trainer, engine)
    engine.sink.on["begin"] = lambda: damage_after_pack(trainer)
    with raises_within(engine, trainer) as errors:
        assert isinstance(errors["receiver"], RefitCorrupted)
        assert isinstance(errors["sender"], RefitCorrupted)
    assert engine.receiver.version == 1


def damage_after_pack(trainer: Trainer) -> None:
    """From the second tensor on, the first slot is overwritten behind the sender's back."""
    trainer.source.before = lambda name: trainer.sender._region.data[:8].fill_(7)


def test_a_refit_waits_for_generation_to_end_and_generation_for_the_refit(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    generating, may_end, free = threading.Event(), threading.Event(), []

    def generate() -> None:
        with engine.lock:
            generating.set()
            may_end.wait(SOON)
            assert "begin" not in engine.sink.calls

    thread = threading.Thread(target=generate)
    thread.start()
    generating.wait(SOON)
    engine.sink.on["finish"] = lambda: free.append(try_lock(engine))
    futures = [trainer.sender.stream_ipc(deadline_s=SOON), engine.receiver.receive_ipc()]
    with pytest.raises(TimeoutError):
        futures[0].result(0.3)
    may_end.set()
    wait(futures, SOON)
    thread.join(SOON)
    assert free == [False]
    assert try_lock(engine)


def try_lock(engine: Engine) -> bool:
    """Whether another thread could generate now."""
    result = []

    def attempt() -> None:
        result.append(engine.lock.acquire(blocking=False))
        if result[0]:
            engine.lock.release()

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join(SOON)
    return result[0]


def test_a_deadline_while_the_engine_generates_is_an_error_on_both_sides(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    with engine.lock:
        sending = trainer.sender.stream_ipc(deadline_s=0.5)
        receiving = engine.receiver.receive_ipc(deadline_s=SOON)
        assert isinstance(sending.exception(SOON), RefitPeerError)
        assert sending.exception().phase == "PREPARE"
        assert isinstance(receiving.exception(SOON), RefitError)
    engine.receiver.check()
    go(trainer, engine)


def test_without_a_receiver_the_sender_gives_up_at_its_deadline(pair):
    error = pair[0].sender.stream_ipc(deadline_s=0.2).exception(SOON)
    assert isinstance(error, RefitPeerError)
    assert "1 of 1 receivers" in str(error)


def test_without_a_sender_the_receiver_gives_up_at_its_deadline(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    error = engine.receiver.receive_ipc(deadline_s=0.2).exception(SOON)
    assert isinstance(error, RefitPeerError)
    assert error.phase == "DISCOVER"


def test_a_refit_that_waits_in_vain_gives_way_to_the_next(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    waiting = trainer.sender.stream_ipc(deadline_s=600)
    go(trainer, engine)
    assert isinstance(waiting.exception(SOON), RefitAborted)
    assert engine.receiver.version == 1


def test_a_receiver_that_waits_already_takes_the_refit_of_the_next_call_too(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    waiting = engine.receiver.receive_ipc(deadline_s=600)
    go(trainer, engine)
    assert waiting.result(SOON)["version"] == engine.receiver.version == 1


def test_a_receiver_that_waits_for_another_trainer_gives_way(pair):
    trainer, engine = pair
    other = Trainer(make_tensors())
    engine.prepare_refit_info(other.prepare_refit_info())
    waiting = engine.receiver.receive_ipc(deadline_s=600)
    go(trainer, engine)
    assert isinstance(waiting.exception(SOON), RefitAborted)
    other.sender.close()


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_closing_one_side_ends_a_running_refit_on_both(pair, side):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    entered = threading.Event()
    with engine.lock:
        engine.lock.acquire(blocking=False)
        engine.lock.release()
        sending = trainer.sender.stream_ipc(deadline_s=600)
        receiving = engine.receiver.receive_ipc(deadline_s=600)
        while sending_phase(trainer) != "PREPARE":
            entered.wait(0.01)
        (trainer.sender if side == "sender" else engine.receiver).close()
        assert isinstance(sending.exception(SOON), RefitError)
        assert isinstance(receiving.exception(SOON), RefitError)


def sending_phase(trainer: Trainer) -> str:
    return trainer.sender.jobs[0].session.phase.value


def test_a_closed_endpoint_refuses_and_closes_twice(pair):
    trainer, engine = pair
    go(trainer, engine)
    for endpoint in (trainer.sender, engine.receiver):
        endpoint.close()
        endpoint.close()
    with pytest.raises(LifecycleError):
        trainer.sender.prepare()
    with pytest.raises(LifecycleError):
        engine.receiver.receive_ipc()


# -- strangers -------------------------------------------------------------------------------------


def test_a_stranger_on_the_socket_is_refused_and_does_no_harm(pair):
    trainer, engine = pair
    info = trainer.prepare_refit_info()
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(info["channel"]["address"])
        for frame in (b"", b"noise", b"x" * 1000, b"x" * (9 << 20)):
            stranger.send(frame)
        stranger.send_multipart([b"three", b"parts", b"here"])
        go(trainer, engine)
        stranger.close(0)
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_receiver_with_the_wrong_token_gets_a_typed_error_at_once(pair):
    trainer, engine = pair
    info = trainer.prepare_refit_info()
    info["channel"] = info["channel"] | {"token": "guess"}
    engine.prepare_refit_info(info)
    trainer.sender.stream_ipc(deadline_s=SOON)
    error = engine.receiver.receive_ipc(deadline_s=600).exception(SOON)
    assert isinstance(error, RefitProtocolError)
    assert "token" in str(error)


def test_socket_and_memory_are_for_this_user_alone(pair, tmp_path):
    trainer, engine = pair
    go(trainer, engine)
    address = trainer.prepare_refit_info()["channel"]["address"]
    directory = Path(address.removeprefix("ipc://")).parent
    assert directory.stat().st_mode & 0o777 == 0o700
    region = SharedRegion.create(10, directory=str(tmp_path))
    assert Path(region.ref.path).stat().st_mode & 0o777 == 0o600
    region.close()
    assert not list(tmp_path.iterdir())
    trainer.sender.close()
    assert not directory.exists()


def test_memory_that_is_not_what_was_announced_is_refused():
    region = SharedRegion.create(100)
    for change in ({"nbytes": 99}, {"inode": region.ref.inode + 1}, {"path": "/nothing/here"}):
        fields = {name: getattr(region.ref, name) for name in ("path", "nbytes", "device", "inode")}
        with pytest.raises(RefitProtocolError):
            SharedRegion.attach(type(region.ref)(**fields | change))
    region.close()


def test_more_memory_than_there_is_is_a_typed_error():
    with pytest.raises(RefitError, match="shared memory"):
        SharedRegion.create(1 << 60)


# -- the older handles -----------------------------------------------------------------------------


def hand_over(trainer: Trainer, engine: Engine) -> None:
    engine.prepare_refit_info(trainer.prepare_refit_info())
    for keys in trainer.sender.groups(BUCKET):
        assert engine.receiver.load_handles(trainer.sender.handles(keys)) is True


def test_handles_bring_every_tensor_and_move_the_version_once(pair):
    trainer, engine = pair
    for version in (1, 2):
        hand_over(trainer, engine)
        assert same(trainer.source.tensor, engine.sink.tensor)
        assert engine.receiver.version == trainer.sender.version == version
    assert go(trainer, engine).version == 3


def test_handles_are_cast_for_an_engine_that_casts():
    trainer, engine = Trainer({"w": torch.randn(30)}), Engine({"w": torch.zeros(30).bfloat16()})
    engine.sink.casts = True
    hand_over(trainer, engine)
    assert torch.equal(engine.sink.tensor["w"], trainer.source.tensor["w"].bfloat16())
    trainer.sender.close()


def test_between_two_handles_the_engine_is_torn(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, *_ = trainer.sender.groups(BUCKET)
    engine.receiver.load_handles(trainer.sender.handles(first))
    with pytest.raises(WeightsTornError):
        engine.receiver.check()
    assert engine.receiver.version == 0
    hand_over(trainer, engine)
    engine.receiver.check()


def test_handles_that_were_overwritten_are_noticed(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    first, second, *_ = trainer.sender.groups(BUCKET)
    stale = trainer.sender.handles(first)
    trainer.sender.handles(second)
    with pytest.raises(RefitCorrupted):
        engine.receiver.load_handles(stale)


def test_handles_are_asked_for_by_group(pair):
    trainer, _ = pair
    with pytest.raises(LifecycleError, match="prepare_weights_for_ipc"):
        trainer.sender.handles(["big"])
    trainer.sender.groups(BUCKET)
    with pytest.raises(ConfigError, match="typo"):
        trainer.sender.handles(["typo"])


def test_forged_handles_are_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    handles = trainer.sender.handles(trainer.sender.groups(BUCKET)[0])
    handles["frame"] = handles["frame"][:-1] + bytes([handles["frame"][-1] ^ 1])
    with pytest.raises(RefitProtocolError):
        engine.receiver.load_handles(handles)
    with pytest.raises(RefitProtocolError):
        engine.receiver.load_handles({"w": b"not handles"})
    assert engine.sink.calls == []


# -- two processes ---------------------------------------------------------------------------------


class Child:
    """A process of its own and the pipe to it; killed at the end whatever happens."""

    def __init__(self, target: Any, *args: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def get(self) -> Any:
        assert self.pipe.poll(60), "the child says nothing"
        return self.pipe.recv()

    def start(self, *command: Any) -> None:
        self.pipe.send(command)

    def ask(self, *command: Any) -> Any:
        self.start(*command)
        ok, result = self.get()
        if not ok:
            raise result
        return result

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(SOON)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.join(SOON)
        self.pipe.close()


def engine_child(tensors: Tensors, stall: str | None = None) -> Child:
    return Child(engine_process, tensors, stall)


def test_two_processes_refit_exactly_by_stream_and_by_handles():
    tensors = make_tensors()
    trainer = Trainer(tensors)
    with engine_child(tensors) as engine:
        engine.ask("prepare", trainer.prepare_refit_info())
        for seed in (1, 2):
            trainer.source.tensor = make_tensors(seed)
            sending = trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=SOON)
            assert engine.ask("receive", SOON)["version"] == seed
            assert sending.result(SOON)["version"] == seed
            assert same(trainer.source.tensor, engine.ask("installed")[2])
        trainer.source.tensor = make_tensors(3)
        for keys in trainer.sender.groups(BUCKET):
            engine.ask("handles", trainer.sender.handles(keys))
        version, torn, installed = engine.ask("installed")
        assert (version, torn) == (3, False)
        assert same(trainer.source.tensor, installed)
    trainer.sender.close()


def test_a_receiver_killed_in_any_phase_is_named_and_the_next_refit_succeeds():
    tensors = make_tensors()
    before = left_behind()
    trainer = Trainer(tensors)
    phases = {"begin": "PREPARE", "write": "TRANSFER", "finish": "SEAL", "commit": "COMMIT"}
    children = {call: engine_child(tensors, call) for call in [*phases, None]}
    try:
        for call, phase in phases.items():
            with children[call] as engine:
                engine.ask("prepare", trainer.prepare_refit_info())
                sending = trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=600)
                engine.start("receive", SOON)
                assert engine.get() == "stalled"
                engine.kill()
                error = sending.exception(SOON)
                assert isinstance(error, RefitPeerError)
                assert error.phase == phase
                assert str(engine.process.pid) in error.peer
        with children[None] as engine:
            engine.ask("prepare", trainer.prepare_refit_info())
            sending = trainer.sender.stream_ipc(bucket_bytes=BUCKET, deadline_s=SOON)
            engine.ask("receive", SOON)
            sending.result(SOON)
            assert same(tensors, engine.ask("installed")[2])
    finally:
        for child in children.values():
            child.__exit__()
    trainer.sender.close()
    assert left_behind() == before


def test_a_sender_killed_in_transfer_tears_the_engine_which_recovers_and_cleans_up():
    tensors = make_tensors()
    before = left_behind()
    engine = Engine(blank(tensors))
    with Child(trainer_process, tensors, "flags") as trainer:
        info = trainer.get()
        engine.prepare_refit_info(info)
        receiving = engine.receiver.receive_ipc(deadline_s=600)
        assert trainer.get() == "stalled"
        trainer.kill()
        error = receiving.exception(SOON)
        assert isinstance(error, RefitPeerError)
        assert error.phase == "TRANSFER"
        with pytest.raises(WeightsTornError):
            engine.receiver.check()
        again = engine.receiver.receive_ipc(deadline_s=600).exception(SOON)
        assert isinstance(again, RefitPeerError)
    assert left_behind() == before
    successor = Trainer(tensors)
    go(successor, engine)
    engine.receiver.check()
    assert same(tensors, engine.sink.tensor)
    successor.sender.close()


def test_a_hundred_refits_leave_nothing_behind(pair):
    trainer, engine = pair

    def held() -> tuple[int, int, set[str]]:
        maps = Path("/proc/self/maps").read_text().count("rl-refit")
        return len(os.listdir("/proc/self/fd")), maps, left_behind()

    go(trainer, engine)
    gc.collect()
    before = held()
    for version in range(2, 102):
        trainer.source.tensor["scalar"].fill_(version)
        assert go(trainer, engine).version == version
        assert same(trainer.source.tensor, engine.sink.tensor)
    assert held() == before


def test_a_process_is_alive_until_it_is_gone_even_as_a_zombie():
    me = this_process()
    assert is_alive(me)
    assert not is_alive(type(me)(me.pid, "1", me.namespace))
    child = os.posix_spawn("/bin/sleep", ["sleep", "600"], {})
    process = type(me)(child, Path(f"/proc/{child}/stat").read_text().split()[21], me.namespace)
    assert is_alive(process)
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert not is_alive(process)
    os.waitpid(child, 0)
    assert not is_alive(process)
