"""A policy backend with workers on a cluster."""

from __future__ import annotations

import inspect
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from rl_backends.inputs import as_batch
from rl_backends.policy.loop import checkpoint_path, scalars, timed
from rl_backends.policy.loop_checks import LoopChecks, reward_spread
from rl_backends.refit_ranks import join_ranks
from rl_backends.spellings import LoopPolicy, SendsWeights
from rl_core.interfaces import ColocatablePolicyInterface as Colocatable
from rl_core.interfaces import PolicyInterface
from rl_hosting.cluster.remote import RemoteBackend, through
from rl_hosting.cluster.sharding import RowRanks, collect, padded_shards, training_shards

if TYPE_CHECKING:
    from pathlib import Path

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import Future, LossFunction, Timer

__all__ = ["RemotePolicy"]


class RemotePolicy(RemoteBackend, SendsWeights, LoopPolicy):
    """Workers of one trainer; behaves as the embedded backend does.

    Each worker gets a :class:`~rl_core.interfaces.WorkerContext`. Every method
    is called on every worker; in a refit the first one sends.

    Raises:
        PluginError: What the workers report as ``data_parallel`` does not fit together.
    """

    _kind = "policy"

    def _connect(self) -> None:
        self.loop_checks = LoopChecks(
            lambda: self.config, lambda: self.weights_version, lambda: self.weights_origin
        )
        self._rows = RowRanks(self._group.attributes("data_parallel"), self._group.name)

    @property
    def weights_version(self) -> int:
        """The version of the last refit that was committed; 0 before the first."""
        version: int = self._group.attribute(0, "weights_version")
        return version

    @cached_property
    def weights_origin(self) -> int:
        """Identifies this trainer."""
        origin: int = self._group.attribute(0, "weights_origin")
        return origin

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts rows are dealt; fewer than workers if some share a copy."""
        return self._rows.size

    # -- rows -----------------------------------------------------------------------------------

    def _score(
        self, method: str, data: BatchedDataDict[Any], *args: Any, **kwargs: Any
    ) -> BatchedDataDict[Any]:
        """Deals the rows to the workers, and collects what they return; a stopwatch stays here."""
        given = inspect.signature(getattr(PolicyInterface, method)).bind(
            self, data, *args, **kwargs
        )
        options = {k: v for k, v in given.arguments.items() if k not in ("self", "data", "timer")}
        data = as_batch(data, needed_by=method)
        with timed(given.arguments.get("timer"), method):
            if self._rows.size == 1:
                only: BatchedDataDict[Any] = self._spoken(method, data, **options)
                return only
            shards, indices = padded_shards(data, self._rows.size)
            dealt = [shards[part] for part in self._rows.parts]
            reported = self._rows.reported_values(self._group.call_each(method, dealt, **options))
            return collect(reported, indices, data.size)

    def get_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_logprobs`."""
        scores = self._score("get_logprobs", data, micro_batch_size, timer)
        self.loop_checks.compare(data, scores["logprobs"])
        return scores

    def _spoken(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls it on every worker with all rows; the result of the first one that reports."""
        results = self._group.call_all(method, *args, **kwargs)
        return results[min(self._rows.first, len(results) - 1)]

    get_reference_policy_logprobs = through(_score, PolicyInterface.get_reference_policy_logprobs)
    get_topk_logits = through(_score, PolicyInterface.get_topk_logits)
    score = through(_score, PolicyInterface.score)
    calibrate_qkv_fp8_scales = through(_spoken, PolicyInterface.calibrate_qkv_fp8_scales)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.generate`."""
        output: BatchedDataDict[Any] = self._spoken("generate", data, greedy)
        # Only the worker that sends weights counts versions; these rows may be another worker's.
        for key in ("weights_version", "weights_origin"):
            output[key] = torch.full_like(output["weights_version"], getattr(self, key))
        return output

    # -- training -------------------------------------------------------------------------------

    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
        timer: Timer | None = None,
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.train`."""
        data = self.loop_checks.check_training_call(data, loss_fn, eval_mode=eval_mode)
        shards = [data]
        if self._rows.size > 1:
            if gbs is None and not eval_mode:
                gbs = self.config.get("train_global_batch_size")
            gbs = data.size if gbs is None else gbs
            shards, gbs = training_shards(
                data, self._rows.size, gbs, getattr(loss_fn, "group_size", 1)
            )
        with timed(timer, "train"):
            dealt = [shards[part] for part in self._rows.parts]
            results = self._group.call_each("train", dealt, loss_fn, eval_mode, gbs=gbs, mbs=mbs)
            reported: list[dict[str, Any]] = self._rows.reported_values(results)
            return scalars(reported[0]) | reward_spread(data)

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`PolicyInterface.save_checkpoint`; workers get the path alone."""
        self._on_all("save_checkpoint", checkpoint_path(*args, **kwargs))

    def load_checkpoint(self, path: str | Path) -> None:
        """Continues on every worker where ``save_checkpoint`` was called."""
        self._on_all("load_checkpoint", path)

    def get_free_memory_bytes(self) -> int:
        """Of the workers, the least."""
        return min(int(free) for free in self._group.call_all("get_free_memory_bytes"))

    prepare_for_training = through(RemoteBackend._on_all, PolicyInterface.prepare_for_training)
    finish_training = through(RemoteBackend._on_all, PolicyInterface.finish_training)
    prepare_for_lp_inference = through(RemoteBackend._on_all, Colocatable.prepare_for_lp_inference)

    # -- refit ----------------------------------------------------------------------------------

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """One future for each worker; see the interface.

        Once it returns, the first worker listens, and ``prepare_refit_info`` returns where.
        """
        self._group.require("collective")
        return self._group.begin_refit(
            "init_collective", ip, port, world_size, train_world_size=train_world_size
        )

    def send_weights(self, **options: Any) -> list[Future]:
        """One future for all workers; see the interface."""
        return [join_ranks(self._group.submit_refit("send_weights", **options))]

    offload_before_refit = through(RemoteBackend._on_all, Colocatable.offload_before_refit)
    offload_after_refit = through(RemoteBackend._on_all, Colocatable.offload_after_refit)
    prepare_refit_info = through(RemoteBackend._on_all, Colocatable.prepare_refit_info)
    stream_weights_via_ipc_zmq = through(
        RemoteBackend._refit, Colocatable.stream_weights_via_ipc_zmq
    )
    broadcast_weights_for_collective = through(
        RemoteBackend._collective, Colocatable.broadcast_weights_for_collective
    )
    prepare_weights_for_ipc = through(RemoteBackend._on_all, Colocatable.prepare_weights_for_ipc)
