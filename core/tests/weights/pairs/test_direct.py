"""Refits in which engines read the trainer's own tensors."""

from __future__ import annotations

import errno
import gc
import io
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from simple_pair import (
    BUCKET,
    Engine,
    InPlaceSink,
    Tensors,
    Trainer,
    blank,
    go,
    make_persistent,
    same,
)

from rl_backends.tensors import whole_pieces
from rl_core.errors import ConfigError, ManifestMismatchError, RefitError

pytestmark = pytest.mark.usefixtures("either_device")


@pytest.fixture
def pair(keep: Callable[[Any], Any]) -> tuple[Trainer, Engine]:
    """A trainer whose tensors may be moved, and an engine with zeros."""
    tensors = make_persistent()
    return keep(Trainer(tensors, at_home=True)), keep(Engine(blank(tensors)))


# -- exact, and one copy --------------------------------------------------------------------------


def test_the_device_may_be_called_by_a_name_that_tensors_do_not_give_it(pair):
    trainer, engine = pair
    trainer.source.device = "cpu:0"
    assert go(trainer, engine, mode="direct").mode == "direct"


# -- what the trainer notices of the move ---------------------------------------------------------


def test_each_tensor_has_storage_of_its_own_so_that_saving_one_saves_little(pair):
    trainer, engine = pair
    go(trainer, engine)
    scalar, big = trainer.source.tensor["scalar"], trainer.source.tensor["big"]
    assert scalar.untyped_storage().nbytes() == 4
    assert big.untyped_storage().nbytes() == big.numel() * 4
    saved = io.BytesIO()
    torch.save(scalar, saved)
    assert saved.tell() < 2000
    assert torch.equal(torch.load(io.BytesIO(saved.getvalue())), scalar)
    everything = safetensors.torch.save(trainer.source.tensor)
    assert same(safetensors.torch.load(everything), trainer.source.tensor)
    assert len(safetensors.torch.save({"scalar": scalar})) < 200


def test_tensors_outlive_the_sender(pair):
    trainer, engine = pair
    go(trainer, engine)
    trainer.close()
    engine.close()
    gc.collect()
    trainer.source.tensor["big"].add_(1)
    assert torch.equal(trainer.source.tensor["big"], make_persistent()["big"] + 1)


# -- memory that is lacking -----------------------------------------------------------------------


def lacking(monkeypatch: pytest.MonkeyPatch, allocations: int) -> list[int]:
    """Memory of the host is at its end after so many tensors; the sizes that were asked for."""
    asked: list[int] = []
    allocate = os.posix_fallocate

    def until(fd: int, start: int, nbytes: int) -> None:
        asked.append(nbytes)
        if start and len(asked) > allocations:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", until)
    return asked


@pytest.mark.parametrize("either_device", ["cpu"], indirect=True)
def test_the_first_refit_needs_memory_for_one_more_tensor_and_not_for_all(keep, monkeypatch):
    asked = lacking(monkeypatch, 1 << 20)
    tensors = {f"w{i}": torch.full((1000 + i,), float(i)) for i in range(5)}
    trainer, engine = keep(Trainer(tensors, at_home=True)), keep(Engine(blank(tensors)))
    left: list[int] = []
    for tensor in tensors.values():
        weakref.finalize(tensor.untyped_storage(), lambda: left.append(len(asked)))
    assert go(trainer, engine).mode == "direct"
    assert asked == [4 * (1000 + i) for i in range(5)]
    assert left == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("either_device", ["cpu"], indirect=True)
def test_without_memory_for_all_tensors_auto_packs_and_says_why(pair, monkeypatch):
    trainer, engine = pair
    asked = lacking(monkeypatch, 3)
    report = go(trainer, engine)
    assert report.mode == "packed"
    assert "No space left" in str(report.fallback)
    assert str(report.fallback) in str(report)
    assert same(make_persistent(), trainer.source.tensor)
    assert same(make_persistent(), engine.sink.tensor)
    trainer.source.tensor["big"].add_(1)
    tried = len(asked)
    assert go(trainer, engine).mode == "packed"
    assert torch.equal(engine.sink.tensor["big"], make_persistent()["big"] + 1)
    assert len(asked) == tried  # nothing is moved in vain at every refit
    monkeypatch.undo()
    assert go(trainer, engine, mode="direct").fallback is None
    trainer.source.tensor["big"].add_(1)
    assert go(trainer, engine).mode == "direct"
    assert same(trainer.source.tensor, engine.sink.tensor)


@pytest.mark.parametrize("either_device", ["cpu"], indirect=True)
def test_without_memory_direct_says_what_to_do_and_the_next_refit_works(pair, monkeypatch):
    trainer, engine = pair
    lacking(monkeypatch, 3)
    with pytest.raises(RefitError, match="No space left") as caught:
        go(trainer, engine, mode="direct")
    assert 'mode="auto"' in str(caught.value.fix)
    assert "bucket_bytes" not in str(caught.value)
    assert same(make_persistent(), trainer.source.tensor)
    engine.idle().receiver.check()
    assert go(trainer, engine).mode == "packed"
    assert same(make_persistent(), engine.sink.tensor)


@pytest.mark.parametrize("either_device", ["cpu"], indirect=True)
def test_a_gpu_without_memory_for_a_second_copy_packs_and_says_why(gpu, pair):
    trainer, engine = pair
    gpu.limit = 3 * BUCKET
    report = go(trainer, engine)
    assert (report.mode, gpu.emptied) == ("packed", 0)
    assert "CUDA out of memory" in str(report.fallback)
    assert same(make_persistent(), engine.sink.tensor)
    with pytest.raises(RefitError, match="CUDA out of memory") as caught:
        go(trainer, engine, mode="direct")
    assert "as all tensors need on a GPU" in str(caught.value.fix)
    gpu.limit = None
    assert go(trainer, engine, mode="direct").mode == "direct"
    assert gpu.emptied == 1  # what the tensors left is there for others
    assert go(trainer, engine).mode == "direct"
    assert gpu.emptied == 1


@pytest.mark.parametrize("either_device", ["cpu"], indirect=True)
def test_memory_of_a_gpu_that_cannot_be_shared_goes_through_that_of_the_cpu(gpu, pair):
    trainer, engine = pair
    gpu.expandable = True
    report = go(trainer, engine)
    assert report.mode == "packed"
    assert "is in an expandable segment" in str(report.fallback)
    assert go(trainer, engine, mode="packed").fallback is None
    assert same(make_persistent(), engine.sink.tensor)
    with pytest.raises(ConfigError, match="is in an expandable segment"):
        go(trainer, engine, mode="direct")
    gpu.expandable = False
    assert go(trainer, engine).mode == "direct"


# -- tensors that cannot be moved -----------------------------------------------------------------


def seen_twice(memory: bytearray) -> list[torch.Tensor]:
    return [torch.frombuffer(memory, dtype=torch.float32) for _ in range(2)]


def obstacles() -> dict[str, tuple[Callable[[Tensors], object], str]]:
    return {
        "negated when it is read": (
            lambda t: t.update(w=torch._neg_view(t["w"])),
            "w is computed from what is in memory",
        ),
        "another storage of the same memory": (
            lambda t: t.update(zip("ow", seen_twice(bytearray(120)), strict=True)),
            "(o and w|w and o) are two storages of one memory",
        ),
        "other processes": (
            lambda t: t.update(w=t["w"].share_memory_()),
            "w is in memory that other processes may use",
        ),
        "inference": (
            lambda t: t.update(w=torch.inference_mode()(torch.Tensor.clone)(t["w"])),
            "w was made in inference mode",
        ),
        "another dtype": (lambda t: t.update(w=t["w"].double()), "w has another dtype"),
        "another device": (lambda t: t.update(w=t["w"].to("meta")), "w is on meta"),
    }


class ElsewhereTrainer(Trainer):
    """Keeps other tensors than those it sends."""

    def __init__(self, change: Callable[[Tensors], object]) -> None:
        v = torch.randn(7)
        tensors = {
            "o": torch.randn(30),
            "w": torch.randn(30),
            "m": torch.randn(6, 5),
            "v": v,
            "tied": v,
        }
        super().__init__(tensors, {"tied": "v"}, at_home=True)
        kept = dict(tensors)
        change(kept)
        self.source.pieces = lambda: whole_pieces(kept)


@pytest.mark.parametrize("obstacle", obstacles())
def test_what_cannot_be_moved_is_packed_and_direct_says_why(keep, obstacle):
    change, why = obstacles()[obstacle]
    trainer = keep(ElsewhereTrainer(change))
    engine = keep(Engine(blank(trainer.source.tensor), {"tied": "v"}))
    engine.sink.tensor["tied"] = engine.sink.tensor["v"]
    with pytest.raises(ConfigError, match=why) as caught:
        go(trainer, engine, mode="direct")
    assert caught.value.details["key"] == "mode"
    engine.idle().receiver.check()
    assert engine.sink.calls == []
    assert go(trainer, engine, verify="installed").mode == "packed"
    assert same(trainer.source.tensor, engine.sink.tensor)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda t: t.update(w=torch.randn(31)), "w: a piece has the box"),
        (lambda t: t.pop("v"), "the trainer has no v, which engine keeps"),
    ],
)
def test_pieces_that_are_not_the_tensors_are_a_mismatch(keep, change, why):
    trainer = keep(ElsewhereTrainer(change))
    engine = keep(Engine(blank(trainer.source.tensor), {"tied": "v"}))
    with pytest.raises(ManifestMismatchError, match=why):
        go(trainer, engine)
    assert engine.sink.calls == []


def views() -> dict[str, tuple[Tensors, dict[str, str]]]:
    """Tensors that share storages, and their ties."""
    flat, square, padded = torch.randn(60), torch.randn(12, 12), torch.randn(8, 8)
    bits = torch.randn(16)
    v = torch.randn(7)
    return {
        "of a larger storage": ({"w": flat[:30], "v": flat[40:]}, {}),
        "that overlap": ({"w": flat[:30], "v": flat[20:]}, {}),
        "of one memory": ({"w": flat, "v": flat.view(6, 10)}, {}),
        "transposed": ({"w": square.t(), "v": torch.randn(3, 4, 5).permute(2, 0, 1)}, {}),
        "that interleave": ({"w": square[::2], "v": square[1::2, 3:]}, {}),
        "without a padding": ({"w": padded[:7]}, {}),
        "expanded": ({"w": torch.randn(4, 1).expand(4, 5)}, {}),
        "of other dtypes": ({"w": bits, "v": bits.view(torch.int16)[3:9]}, {}),
        "tied by another object": ({"v": v, "tied": v[:]}, {"tied": "v"}),
    }


@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
@pytest.mark.parametrize("kind", views())
def test_views_are_moved_with_all_that_they_share_their_memory_with(keep, kind, verify):
    tensors, ties = views()[kind]
    trainer = keep(Trainer(tensors, ties, at_home=True))
    engine = keep(Engine(blank(tensors), ties, kind=InPlaceSink))
    engine.sink.tensor.update({name: engine.sink.tensor[of] for name, of in ties.items()})
    report = go(trainer, engine, mode="direct", verify=verify, bucket_bytes=128)
    assert (report.extra_memory_bytes, same(tensors, engine.sink.tensor)) == (0, True)
    first = next(iter(tensors.values()))
    memory = first if first._base is None else first._base
    places = [tensor.data_ptr() for tensor in tensors.values()]
    with torch.no_grad():
        memory.add_(1)  # what they are views of was moved as well
    assert go(trainer, engine, mode="direct", verify=verify, bucket_bytes=128).mode == "direct"
    assert same(tensors, engine.sink.tensor)
    assert [tensor.data_ptr() for tensor in tensors.values()] == places


def test_users_of_memory_that_the_source_names_are_moved_with_its_pieces(keep):
    parameter = torch.nn.Parameter(torch.randn(5, 6))
    tensors = {"w": parameter.detach()[:3], "v": parameter.detach()[3:, 1:]}
    trainer = keep(Trainer(tensors, at_home=True))
    engine = keep(Engine(blank(tensors)))
    report = go(trainer, engine)
    assert "w shares memory with a tensor outside of the weight source" in str(report.fallback)
    trainer.source.memory_users = lambda: [parameter]
    for _ in range(2):
        assert go(trainer, engine, mode="direct").fallback is None
        assert same(tensors, engine.sink.tensor)
        with torch.no_grad():
            parameter.add_(1)
        assert torch.equal(tensors["w"], parameter[:3])
    assert parameter.untyped_storage().data_ptr() == tensors["v"].untyped_storage().data_ptr()


def test_tensors_that_exchanged_their_memory_are_moved_back(keep):
    tensors = {"a": torch.full((99,), 1.0), "b": torch.full((99,), 2.0)}
    trainer, engine = keep(Trainer(tensors, at_home=True)), keep(Engine(blank(tensors)))
    go(trainer, engine)
    tensors["a"].data, tensors["b"].data = tensors["b"].data, tensors["a"].data
    assert go(trainer, engine).mode == "direct"
    assert same(tensors, engine.sink.tensor)
    assert engine.sink.tensor["a"].eq(2).all()
    assert engine.sink.tensor["b"].eq(1).all()


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("mode", ["auto", "packed"])
@pytest.mark.parametrize("read", [torch.t, torch.conj])
def test_a_tensor_that_is_read_otherwise_is_sent_as_it_now_is(keep, side, mode, read):
    tensors = {"a": torch.randn(3, 3, dtype=torch.complex64)}
    trainer = keep(Trainer(tensors, at_home=True))
    engine = keep(Engine(blank(tensors), kind=InPlaceSink))
    assert go(trainer, engine, mode=mode).mode == ("direct" if mode == "auto" else mode)
    changed = tensors if side == "trainer" else engine.sink.tensor
    changed["a"].data = read(changed["a"].data)
    go(trainer, engine, mode=mode, verify="installed")
    assert torch.equal(tensors["a"], engine.sink.tensor["a"])


def test_what_left_the_weights_and_is_kept_is_not_written_over(keep):
    tensors = {"a": torch.full((99,), 1.0), "b": torch.full((99,), 2.0)}
    trainer, engine = keep(Trainer(tensors, at_home=True)), keep(Engine(blank(tensors)))
    go(trainer, engine)
    trained = {name: tensor.data for name, tensor in tensors.items()}
    for tensor in tensors.values():
        tensor.data = tensor * 10  # an average of earlier steps
    assert go(trainer, engine).mode == "direct"
    assert same(tensors, engine.sink.tensor)
    for name, tensor in tensors.items():
        tensor.data = trained.pop(name)
    assert [tensor.unique().item() for tensor in tensors.values()] == [1, 2]
    for _ in range(2):
        assert go(trainer, engine).mode == "direct"
        assert same(tensors, engine.sink.tensor)
        tensors["a"].add_(1)
