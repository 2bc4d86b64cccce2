"""TRL with engines that have environments of their own, chosen by name.

The interpreters are in the variable RL_ENGINES, such as ``vllm=/a/bin/python sglang=/b/python``;
``nox -s rest`` sets it.
"""

from __future__ import annotations

import os

import pytest

import rl_trl

PYTHONS = dict(one.split("=", 1) for one in os.environ.get("RL_ENGINES", "").split())


@pytest.mark.engine
@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(name not in PYTHONS, reason=f"RL_ENGINES has no {name}")
        )
        for name in ("vllm", "sglang")
    ],
)
def test_a_run_learns_with_another_engine_by_name(engine, trainer, name):
    own = {f"{name}_cfg": {"python": PYTHONS[name]}}
    generation = engine(backend=name, torch_dtype="float32", **own)
    run = trainer(
        rl_trl.rollout(generation),
        max_steps=10,
        per_device_train_batch_size=32,
        num_generations=8,
    )
    run.train()
    logged = [entry for entry in run.state.log_history if "reward" in entry]
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in logged) < 1e-3
    assert sum(e["reward"] for e in logged[-3:]) > sum(e["reward"] for e in logged[:3]) + 0.2
    assert generation.weights_version == 10
