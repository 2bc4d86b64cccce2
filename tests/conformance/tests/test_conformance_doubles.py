"""The doubles that others test with: hooks run where they should, engines take a refit together."""

from __future__ import annotations

import pytest
import torch

from rl_conformance.doubles import Engine, Engines, Trainer
from rl_core.errors import RefitError, WeightsTornError
from rl_core.weights import refit


@pytest.mark.parametrize("moment", ["begin", "w", "finish", "commit"])
@pytest.mark.parametrize("mode", ["auto", "packed"])
def test_a_hook_runs_in_the_midst_of_a_refit_and_can_fail_it(keep, moment, mode):
    tensors = {"w": torch.ones(3)}
    trainer, engine = keep(Trainer(tensors)), keep(Engine({"w": torch.zeros(3)}))
    engine.on[moment] = lambda: 1 / 0
    with pytest.raises(RefitError, match="division"):
        refit(trainer, engine, mode=mode)
    if moment != "begin":
        with pytest.raises(WeightsTornError):
            engine.receiver.check()
    engine.on.clear()
    assert refit(trainer, engine, mode=mode).version == engine.weights_version
    assert torch.equal(engine.tensors["w"], tensors["w"])


@pytest.mark.parametrize("moment", ["w", "confirm"])
def test_a_hook_of_the_trainer_fails_both_engines(keep, moment):
    trainer = keep(Trainer({"w": torch.ones(3)}))
    engines = Engines(*(keep(Engine({"w": torch.zeros(3)}, f"engine {n}")) for n in range(2)))
    trainer.on[moment] = lambda: 1 / 0
    with pytest.raises(RefitError, match="division"):
        refit(trainer, engines)
    trainer.on.clear()
    assert refit(trainer, engines).mode == "direct"
    assert all(engine.weights_version == 1 for engine in engines.engines)
