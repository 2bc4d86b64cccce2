"""Refits from and into modules that are nobody's backend."""

from __future__ import annotations

import gc
import os
import signal
import threading
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from own_modules import Model, OwnEngine
from remote import Remote
from torch import nn

from rl_backends.modules import ModuleReceiver, ModuleSender
from rl_backends.tensors import module_tensors
from rl_conformance.doubles import Engine
from rl_core import CapabilityError, ConfigError, LifecycleError, RefitCorrupted, RLError
from rl_core.futures import wait
from rl_core.weights import refit

if TYPE_CHECKING:
    from pathlib import Path


def same(trainer: nn.Module, engine: nn.Module) -> None:
    theirs = engine.state_dict()
    for name, tensor in trainer.state_dict().items():
        assert torch.equal(tensor.to(theirs[name].dtype), theirs[name]), name


@pytest.mark.parametrize("mode", ["direct", "packed"])
@pytest.mark.parametrize("isolation", ["quiesced", "staged"])
@pytest.mark.parametrize("verify", ["none", "wire", "installed"])
def test_a_module_is_refit_from_another(mode: str, isolation: str, verify: str) -> None:
    trainer, engine = Model(1), Model(2)
    if mode == "direct":  # memory that engines read has no strides
        trainer.odd = nn.Parameter(trainer.odd.detach().contiguous())
    cache = engine.cache.clone()
    optimizer = torch.optim.AdamW(trainer.parameters(), fused=True)
    for version in (1, 2, 3):
        report = refit(trainer, engine, mode=mode, isolation=isolation, verify=verify)
        assert report.version == version
        same(trainer, engine)
        trainer.embed(torch.tensor([3])).sum().backward()
        optimizer.step()
    assert engine.head.weight is engine.embed.weight
    assert torch.equal(engine.cache, cache), "what no checkpoint has is no weight"


def wrapped(kind: str, model: nn.Module) -> nn.Module:
    if kind == "parallel":
        return nn.DataParallel(model)
    if kind == "compiled":
        return torch.compile(model)
    if kind == "compiled within":
        model.head = torch.compile(model.head)
        return model
    return nn.parallel.DistributedDataParallel(model)


@pytest.fixture
def one_process(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["parallel", "compiled", "compiled within", "distributed"])
@pytest.mark.usefixtures("one_process")
def test_wrappers_have_the_names_of_what_they_wrap(kind: str) -> None:
    trainer, engine = Model(1), Model(2)
    outside = wrapped(kind, trainer)
    assert refit(outside, engine).version == 1
    assert refit(trainer, wrapped("parallel", engine)).version == 2, "it is one trainer"
    same(Model(1), engine)


class Headed(nn.Module):
    """A model inside another one, as trainers with a value head have it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = Model(seed)
        self.value = nn.Linear(8, 1)


def strip(name: str) -> str | None:
    return name.removeprefix("model.") if name.startswith("model.") else None


def test_names_are_changed_and_left_out() -> None:
    trainer, engine = Headed(1), Model(2)
    with pytest.raises(RLError, match=r"(?s)model\.odd.*rename"):
        refit(trainer, engine)
    assert refit(trainer, engine, rename=strip).version == 1
    same(trainer.model, engine)


def test_what_is_tied_to_a_tensor_that_is_left_out_is_sent() -> None:
    trainer, engine = Model(1), Model(2)
    engine.head = nn.Linear(8, 11, bias=False)  # not tied any more
    del engine.embed
    refit(trainer, engine, rename=lambda name: None if name.startswith("embed") else name)
    assert torch.equal(engine.head.weight, trainer.embed.weight)


def test_two_tensors_never_get_one_name() -> None:
    with pytest.raises(ConfigError, match=r"would both be called 'odd'.*\n?.*"):
        refit(Model(1), Model(2), rename=lambda name: "odd" if name == "scale" else name)


@pytest.mark.usefixtures("one_process")
def test_tensors_that_are_not_whole_are_refused() -> None:
    from torch.distributed.fsdp import fully_shard

    engine = Model(2)
    before = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    with torch.device("meta"):
        nowhere = Model(1)
    sharded = Model(1)
    del sharded.empty, sharded.scale, sharded.odd  # FSDP takes no such parameters
    fully_shard(sharded, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    zero3 = Model(1)
    zero3.odd.ds_id = 4
    cases = {"meta device": nowhere, "DTensor": sharded, r"odd is sharded \(Parameter\)": zero3}
    for text, module in cases.items():
        if module is not sharded:  # which has all ranks of its mesh here
            with pytest.raises(CapabilityError, match=text):
                refit(module, engine)
        with pytest.raises(CapabilityError, match=text):
            refit(engine, module)
    assert all(torch.equal(before[name], now) for name, now in engine.state_dict().items())


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.norm.running_mean.add_(1)


def fused(model: nn.Module) -> None:
    model.scale.grad = torch.ones_like(model.scale)
    torch.optim.AdamW([model.scale], fused=True).step()


def loaded(model: nn.Module) -> None:
    model.load_state_dict(Model(5).state_dict())


@pytest.mark.parametrize("change", [in_place, fused, loaded])
@pytest.mark.parametrize("mode", ["direct", "packed"])
def test_a_change_meanwhile_is_noticed(change: Any, mode: str) -> None:
    trainer, model = Model(1), Model(2)
    trainer.odd = nn.Parameter(trainer.odd.detach().contiguous())
    engine = Engine(module_tensors(model))
    engine.on |= dict.fromkeys(engine.tensors, lambda: change(trainer))
    # An engine that reads the trainer's own memory may see first that it is another.
    with pytest.raises((LifecycleError, RefitCorrupted), match=r"changed during a refit|not those"):
        refit(trainer, engine, mode=mode)
    assert engine.weights_version == 0
    engine.on.clear()
    refit(trainer, engine, mode=mode)
    same(trainer, model)
    engine.close()


def test_the_ends_close_when_their_modules_go() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    refit(Model(1), Model(2))  # what is made once for the process
    before, threads = descriptors(), threading.active_count()
    trainer, engine = Model(1), Model(2)
    refit(trainer, engine)
    gone = weakref.ref(trainer)
    del trainer, engine
    assert descriptors() == before
    assert gone() is None
    assert threading.active_count() <= threads


def test_an_end_without_its_module_says_so() -> None:
    sender, receiver = ModuleSender(Model(1)), ModuleReceiver(Model(2))
    with pytest.raises(LifecycleError):
        sender.prepare_refit_info()
    trainer = ModuleSender(kept := Model(1))
    with pytest.raises(LifecycleError):
        receiver.prepare_refit_info(trainer.prepare_refit_info())
    assert trainer.shutdown()
    assert trainer.shutdown(), f"again, with {kept}"


def test_a_module_in_the_wrong_place_is_named() -> None:
    trainer = Model(1)
    with pytest.raises(ConfigError, match="comes first"):
        refit(trainer, object())
    with pytest.raises(ConfigError, match="comes first"):
        refit(object(), trainer)
    with pytest.raises(ConfigError, match="rename is only for a torch module"):
        refit(ModuleSender(trainer), Model(2), rename=strip)


@pytest.mark.parametrize("killed", [False, True])
def test_the_ends_are_in_two_processes(killed: bool) -> None:
    engine, trainer = Remote(OwnEngine, 2), Model(1)
    sender = ModuleSender(trainer)
    try:
        for version in (1, 2):
            info = sender.prepare_refit_info()
            options = {"number": info["number"], "deadline_s": 5.0 if killed else 30.0}
            if killed:
                os.kill(engine.process.pid, signal.SIGKILL)
                with pytest.raises(RLError):
                    wait(sender.send_weights(**options), 20)
                break
            engine.start("refit", info, options)
            wait(sender.send_weights(**options), 60)
            state = {name: tensor.tolist() for name, tensor in trainer.state_dict().items()}
            assert engine.result() == (version, state)
            with torch.no_grad():
                trainer.odd.mul_(2)
    finally:
        sender.shutdown()
        engine.process.kill()
        engine.process.join()
