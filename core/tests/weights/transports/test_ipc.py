"""Refits over shared memory: exact, for several engines, refused before anything is touched."""

from __future__ import annotations

import gc
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from simple_pair import (
    SOON,
    DictSink,
    Engine,
    InPlaceSink,
    Replicas,
    Trainer,
    begin,
    blank,
    fails,
    go,
    make_tensors,
    same,
)

from rl_core.errors import (
    LifecycleError,
    ManifestMismatchError,
    RefitAborted,
    RefitError,
    RefitProtocolError,
)
from rl_core.weights.transports import find_transport, ipc
from rl_core.weights.transports.memory import SharedRegion

# -- exact --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("kind", [DictSink, InPlaceSink])
@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
def test_every_kind_of_tensor_arrives_bit_for_bit(keep, verify, kind):
    tensors = make_tensors()
    trainer = keep(Trainer(tensors))
    engine = keep(Engine(blank(tensors), kind=kind))
    report = go(trainer, engine, verify=verify)
    assert same(tensors, engine.sink.tensor)
    assert engine.sink.calls[0] == "begin"
    assert engine.sink.calls[-2:] == ["finish", "commit"]
    assert ("write" in engine.sink.calls) == (kind is DictSink)
    assert report.version == engine.receiver.version == trainer.sender.version == 1


@pytest.mark.parametrize("kind", [DictSink, InPlaceSink])
@pytest.mark.parametrize(
    "options", [{"verify": "none"}, {"delta": True}, {"mode": "packed"}, {"isolation": "staged"}]
)
def test_tensors_whose_strides_mean_nothing_arrive(keep, options, kind):
    """Torch calls them contiguous, whatever the stride of a dimension of size 1."""
    shapes = {"one": ((1,), (2,)), "row": ((1, 3), (9, 1)), "ones": ((1, 1), (5, 7))}

    def tensors(value: float) -> dict[str, torch.Tensor]:
        base = torch.full((9,), value)
        return {n: base.clone().as_strided(*given) for n, given in shapes.items()}

    trainer = keep(Trainer(tensors(1.0), at_home=True))
    engine = keep(Engine(tensors(0.0), kind=kind))
    for value in (2.0, 3.0):
        trainer.source.tensor = tensors(value)
        go(trainer, engine, **{"verify": "installed"} | options)
        assert same(trainer.source.tensor, tensors(value))
        assert all(tensor.eq(value).all() for tensor in engine.sink.tensor.values())


@pytest.mark.usefixtures("either_device")
def test_floats_are_rounded_to_an_engine_that_casts_before_they_travel(keep):
    tensors = {"w": torch.randn(100, 7), "b": torch.randn(7), "n": torch.arange(3)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine(blank(tensors)))
    engine.sink.tensor |= {"w": torch.zeros(100, 7, dtype=torch.bfloat16)}
    engine.sink.casts = True
    report = go(trainer, engine, verify="installed")
    assert torch.equal(engine.sink.tensor["w"], tensors["w"].bfloat16())
    assert torch.equal(engine.sink.tensor["b"], tensors["b"])
    assert report.cast == 1
    assert report.bytes == 100 * 7 * 2 + 7 * 4 + 3 * 8


@pytest.mark.usefixtures("either_device")
@pytest.mark.parametrize("at_home", [False, True])
@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
def test_a_tied_tensor_is_sent_once_and_written_to_every_storage_of_the_engine(
    keep, at_home, isolation
):
    weight = torch.randn(30, 20)
    ties = {"head": "embed"}
    trainer = keep(Trainer({"embed": weight, "head": weight}, ties, at_home=at_home))
    engine = keep(Engine({"embed": torch.zeros(30, 20), "head": torch.zeros(30, 20)}))
    report = go(trainer, engine, verify="installed", isolation=isolation)
    assert report.tensors == 1
    assert torch.equal(engine.sink.tensor["embed"], weight)
    assert torch.equal(engine.sink.tensor["head"], weight)


def test_the_engine_may_own_a_tied_tensor_under_its_other_name(keep):
    weight, mine = torch.randn(30, 20), torch.zeros(30, 20)
    trainer = keep(Trainer({"embed": weight, "head": weight}, {"head": "embed"}))
    engine = keep(Engine({"embed": mine, "head": mine}, {"embed": "head"}))
    go(trainer, engine, verify="installed")
    assert torch.equal(mine, weight)


@pytest.fixture
def own_temporary_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tests that run beside this one leave things of their own in the common place."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


# -- several receivers ----------------------------------------------------------------------------


def test_engines_of_two_dtypes_cannot_share_a_refit(keep):
    trainer = keep(Trainer({"w": torch.randn(30)}))
    wide, narrow = (keep(Engine({"w": torch.zeros(30)})) for _ in range(2))
    narrow.sink.tensor = {"w": torch.zeros(30, dtype=torch.bfloat16)}
    narrow.sink.casts = True
    with pytest.raises(RefitError, match="dtype"):
        go(trainer, Replicas(wide, narrow))
    assert wide.idle().sink.calls == narrow.idle().sink.calls == []


# -- refused before anything is touched -----------------------------------------------------------


def test_a_trainer_that_changed_after_the_check_is_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    trainer.source.tensor["late"] = torch.ones(1)
    trainer.sender.send(deadline_s=SOON)
    with pytest.raises(RefitAborted, match="prepare_refit_info"):
        engine.receiver.receive(deadline_s=SOON).result(SOON)
    assert engine.sink.calls == []


def test_an_engine_that_changed_after_the_check_is_refused(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    engine.sink.tensor["flags"] = torch.zeros(14, dtype=torch.bool)
    sending = trainer.sender.send(deadline_s=SOON)
    receiving = engine.receiver.receive(deadline_s=SOON)
    assert isinstance(receiving.exception(SOON), ManifestMismatchError)
    assert isinstance(sending.exception(SOON), ManifestMismatchError)
    assert engine.sink.calls == []


def test_receiving_before_prepare_is_a_lifecycle_error(pair):
    with pytest.raises(LifecycleError, match="prepare_refit_info"):
        pair[1].receiver.receive()


def test_a_transport_that_the_trainer_did_not_open_is_a_lifecycle_error(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info())
    with pytest.raises(LifecycleError, match="collective"):
        engine.receiver.receive(transport="collective")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("protocol", 1),
        ("digest", "0"),
        ("tensors", [{"name": 1}]),
        ("token", None),
        ("addresses", {"ipc": "here"}),
    ],
)
def test_a_damaged_description_is_refused(pair, field, value):
    trainer, engine = pair
    with pytest.raises(RefitProtocolError):
        engine.prepare_refit_info(trainer.prepare_refit_info() | {field: value})


# -- strangers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("under_way", [False, True])
def test_any_number_of_frames_of_a_connection_that_is_closed_do_no_harm(pair, under_way):
    """Each is answered, and no answer reaches anybody."""
    trainer, engine = pair
    go(trainer, engine)

    def babble(_: str = "") -> None:
        trainer.source.before = lambda _: None
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.connect(trainer.prepare_refit_info()["addresses"]["ipc"]["endpoint"])
            for _ in range(2000):
                stranger.send(b"RL\x05H" + b"x" * 40)
            stranger.close(linger=1000)
        time.sleep(0.3)  # so that the connection is known to be closed

    if under_way:
        trainer.source.before = babble
    else:
        babble()
    assert go(trainer, engine, mode="packed").version == 2
    assert same(trainer.source.tensor, engine.sink.tensor)


def test_a_receiver_with_the_wrong_token_gets_a_typed_error_at_once(pair):
    trainer, engine = pair
    engine.prepare_refit_info(trainer.prepare_refit_info() | {"token": "guess"})
    trainer.sender.send(deadline_s=SOON)
    error = engine.receiver.receive(deadline_s=600).exception(SOON)
    assert isinstance(error, RefitProtocolError)
    assert "token" in str(error)


@pytest.mark.parametrize("address", [{}, {"endpoint": 1}, {"endpoint": "tcp://127.0.0.1:1"}])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(RefitProtocolError, match="ipc"):
        find_transport("ipc").receiver(address)


@pytest.mark.usefixtures("own_temporary_directory")
def test_what_senders_of_another_host_have_in_a_directory_of_both_stays(monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(ipc, "boot_id", lambda: "another1")
        theirs = find_transport("ipc").sender()
    endpoint = theirs.address["endpoint"]
    directory = Path(endpoint.removeprefix("ipc://")).parent
    # A socket that this host cannot connect to, though it is in use.
    with socket.socket(socket.AF_UNIX) as unreachable:
        os.unlink(directory / "socket")
        unreachable.bind(str(directory / "socket"))
    os.utime(directory, (0, 0))
    find_transport("ipc").sender().close()
    find_transport("ipc").receiver({"endpoint": endpoint}).close()
    assert (directory / "socket").exists()
    theirs.close()


def test_a_temporary_directory_that_cannot_be_used_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with pytest.raises(RefitError, match=str(tmp_path / "nowhere")):
        find_transport("ipc").sender()


# -- shared memory --------------------------------------------------------------------------------


def test_what_a_dying_trainer_left_is_cleared_once_it_no_longer_listens(monkeypatch):
    directory = Path(tempfile.mkdtemp(prefix=f"rl-refit-{ipc.boot_id()[:8]}-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / "socket"))
    listener.listen()
    address = {"endpoint": f"ipc://{directory}/socket"}
    receiver = find_transport("ipc").receiver(address)
    receiver.connect(address)
    monkeypatch.setattr(receiver, "lost", lambda: True)
    looks: list[bool] = []

    def clear(endpoint: str) -> bool:
        looks.append(cleared(endpoint))
        listener.close()  # after the first look
        return looks[-1]

    cleared = ipc._clear
    monkeypatch.setattr(ipc, "_clear", clear)
    receiver.disconnect()
    assert looks == [False, True]
    assert not directory.exists()
    receiver.close()


def test_only_the_sender_may_write_and_nobody_can_cut_memory_off():
    with closing(SharedRegion.create(1 << 16)) as region:
        with closing(SharedRegion.attach(region.ref)) as attached:
            region.data.fill_(7)
            assert attached.data.eq(7).all()
            lines = Path("/proc/self/maps").read_text().splitlines()
            rights = [line.split()[1] for line in lines if f" {region.ref['inode']} " in line]
            assert sorted(rights) == ["r--s", "rw-s"]
        fd = os.open(region.ref["path"], os.O_RDWR)
        try:
            for size in (0, 1 << 17):
                with pytest.raises(PermissionError):
                    os.ftruncate(fd, size)
            with pytest.raises(PermissionError):
                mmap.mmap(fd, 1 << 16)
        finally:
            os.close(fd)


def test_what_was_read_stays_readable_after_the_lane_is_closed():
    with closing(SharedRegion.create(100)) as region:
        region.data.fill_(3)
        attached = SharedRegion.attach(region.ref)
        part = attached.data[10:20]
        attached.close()
        del attached
        gc.collect()
        assert part.eq(3).all()


def test_an_engine_that_cannot_map_the_memory_says_so_on_both_sides(pair, monkeypatch):
    trainer, engine = pair
    honest = os.open

    def closed(path: str, *how: Any) -> int:
        if path.startswith("/proc/"):
            raise PermissionError(path)
        return honest(path, *how)

    sending, receiving = begin(trainer, engine)
    sending.result(SOON)
    receiving.result(SOON)
    trainer.sender.close()
    trainer = Trainer(trainer.source.tensor)
    monkeypatch.setattr("rl_core.weights.transports.memory.os.open", closed)
    sender, receiver = fails(trainer, engine)
    assert isinstance(sender, RefitProtocolError)
    assert isinstance(receiver, RefitProtocolError)
    assert "PID namespace" in str(receiver)
    engine.receiver.check()
    trainer.close()
