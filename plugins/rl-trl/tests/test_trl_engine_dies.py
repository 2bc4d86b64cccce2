"""An engine in a process of its own: it serves a run, and its death ends one step alone."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from cluster_doubles import pids
from transformers import TrainerCallback

import rl_trl
from rl_core.errors import WorkerDiedError
from rl_hosting import LocalCluster

pytestmark = pytest.mark.slow

APART = "sampling/sampling_logp_difference/max"
LONG = 120  # tokens, so that an engine is killed in their midst


class Keep(TrainerCallback):
    """Copies what a step leaves behind."""

    def on_step_end(self, args, state, control, model, optimizer, **_):
        self.step = state.global_step
        self.weights = {name: value.clone() for name, value in model.state_dict().items()}
        self.moments = [each["exp_avg"].clone() for each in optimizer.state.values()]


@pytest.mark.full
def test_a_killed_engine_ends_the_step_and_another_one_goes_on(engine, trainer):
    keep = Keep()
    with LocalCluster(1, threads=1) as cluster:
        generation = engine(cluster, max_new_tokens=LONG)
        run = trainer(
            rl_trl.rollout(generation),
            callbacks=[keep],
            max_steps=4,
            max_completion_length=LONG,
            save_strategy="steps",
            save_steps=1,
        )
        calls, generate = [], generation.generate

        def generate_and_die(batch):
            calls.append(time.monotonic())
            if len(calls) == 3:
                threading.Timer(0.1, os.kill, (pids(generation)[0], signal.SIGKILL)).start()
            return generate(batch)

        generation.generate = generate_and_die
        with pytest.raises(WorkerDiedError, match=r"process \d+ ended, exit status -9") as caught:
            run.train()
        assert caught.value.__notes__ == ["rl_trl: in the rollout at step 2"]
        assert time.monotonic() - calls[-1] < 20 * (calls[1] - calls[0])

        assert run.state.global_step == keep.step == 2
        weights = run.model.state_dict()
        assert all(value.equal(weights[name]) for name, value in keep.weights.items())
        moments = [each["exp_avg"] for each in run.optimizer.state.values()]
        assert all(a.equal(b) for a, b in zip(moments, keep.moments, strict=True))

        run.rollout_func = rl_trl.rollout(engine(cluster, max_new_tokens=LONG))
        run.train(resume_from_checkpoint=True)
    logged = [entry for entry in run.state.log_history if APART in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4]
    assert max(entry[APART] for entry in logged) < 1e-4
