"""One policy over two ranks that Ray launches: what the processes of this host do, too."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import sharded
from cluster_doubles import pids
from module_weights import weights
from sharded import batch, engine_of, sources
from simple_pair import same, until

from rl_core.errors import RLError
from rl_core.weights import refit
from rl_losses import NLLLossFn

RayVirtualCluster: Any = pytest.importorskip("rl_ray").RayVirtualCluster
pytestmark = pytest.mark.ray


@pytest.mark.full
def test_two_ranks_on_ray_do_what_one_process_does_until_one_dies(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manifest: Any = sharded.manifest_in(tmp_path_factory.mktemp("site"))
    alone, data, engine = sharded.alone(model), batch(), engine_of(model)
    with (
        RayVirtualCluster([2], use_gpus=False, ray_options={"num_cpus": 2}) as cluster,
        sharded.sharded_policy(cluster, manifest, model, shard_ranks=2) as policy,
    ):
        given, expected = (p.train(data, NLLLossFn(), gbs=4) for p in (policy, alone))
        assert given["loss"] == expected["loss"]
        assert given["grad_norm"] == expected["grad_norm"]
        for options in ({}, {"transport": "collective", "address": "127.0.0.1"}):
            refit(policy, engine, deadline_s=60, **options)
            assert same(weights(engine.model), weights(alone.model))
        [keys] = policy.prepare_weights_for_ipc()
        engine.update_weights(policy.get_weights_ipc_handles(keys))
        assert same(weights(engine.model), weights(alone.model))
        policy.prepare_refit_info()
        # Two were for the names. The last refit has no driver that waits for the other ranks.
        until(lambda: sources(policy)[1]["closed"] == 5, "the close of all sources of rank 1")
        made = sources(policy)
        assert made[1]["made"] == 5
        assert made[0]["made"] == made[0]["closed"] + 1  # the description has no refit yet

        os.kill(pids(policy)[1], signal.SIGKILL)
        with pytest.raises(RLError) as error:
            refit(policy, engine, deadline_s=30)
        assert "rank 1" in str(error.value) or "worker" in str(error.value)
