"""A policy backend whose data-parallel workers run as Ray actors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.backends.admission import Admission
from rl_core.backends.inputs import as_batch
from rl_core.cluster.remote import RemoteBackend
from rl_core.cluster.sharding import collect, padded_shards, training_shards
from rl_core.interfaces import ColocatablePolicyInterface

if TYPE_CHECKING:
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import (
        Future,
        GenerationDatumSpec,
        GenerationOutputSpec,
        LogprobOutputSpec,
        LossFunction,
        ReferenceLogprobOutputSpec,
        ScoreOutputSpec,
        TopkLogitsOutputSpec,
    )

__all__ = ["RemotePolicy"]


class RemotePolicy(RemoteBackend, ColocatablePolicyInterface):
    """Data-parallel workers of one trainer; behaves as the embedded backend does.

    What each worker is given is said in :class:`~rl_core.interfaces.WorkerContext`. The weights
    are the same everywhere, so rank 0 hands them over.
    """

    _kind = "policy"

    def _connect(self) -> None:
        self.admission = Admission(lambda: self.config, lambda: self.weights_version)

    @property
    def weights_version(self) -> int:
        """The version of the last refit that was committed; 0 before the first."""
        version: int = self._group.attribute(0, "weights_version")
        return version

    # -- scoring --------------------------------------------------------------------------------

    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """See :meth:`PolicyInterface.get_logprobs`."""
        return self._score("get_logprobs", data, micro_batch_size)

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """See :meth:`PolicyInterface.get_reference_policy_logprobs`."""
        return self._score("get_reference_policy_logprobs", data, micro_batch_size)

    def get_topk_logits(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        k: int,
        micro_batch_size: int | None = None,
    ) -> BatchedDataDict[TopkLogitsOutputSpec]:
        """See :meth:`PolicyInterface.get_topk_logits`."""
        return self._score("get_topk_logits", data, k, micro_batch_size)

    def score(
        self, data: BatchedDataDict[GenerationDatumSpec], micro_batch_size: int | None = None
    ) -> BatchedDataDict[ScoreOutputSpec]:
        """See :meth:`PolicyInterface.score`."""
        return self._score("score", data, micro_batch_size)

    def _score(self, method: str, data: BatchedDataDict[Any], *args: Any) -> BatchedDataDict[Any]:
        data = as_batch(data, needed_by=method)
        if self._group.size == 1:
            only: BatchedDataDict[Any] = self._group.call(0, method, data, *args)
            return only
        shards, indices = padded_shards(data, self._group.size)
        calls = [self._group.submit(rank, method, s, *args) for rank, s in enumerate(shards)]
        return collect(self._group.wait(calls), indices, data.size)

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """On rank 0 with all rows; see :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        scales: dict[str, Any] = self._group.call(
            0, "calibrate_qkv_fp8_scales", data, micro_batch_size, percentile, margin, include_q
        )
        return scales

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """On rank 0 with all rows; see :meth:`PolicyInterface.generate`."""
        output: BatchedDataDict[GenerationOutputSpec] = self._group.call(
            0, "generate", data, greedy
        )
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
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.train`."""
        data = self.admission.admit(data, loss_fn, eval_mode=eval_mode)
        shards = [data]
        if self._group.size > 1:
            if gbs is None and not eval_mode:
                gbs = self.config.get("train_global_batch_size")
            gbs = data.size if gbs is None else gbs
            shards, gbs = training_shards(
                data, self._group.size, gbs, getattr(loss_fn, "group_size", 1)
            )
        calls = [
            self._group.submit(rank, "train", shard, loss_fn, eval_mode, gbs=gbs, mbs=mbs)
            for rank, shard in enumerate(shards)
        ]
        result: dict[str, Any] = self._group.wait(calls)[0]
        return result

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`PolicyInterface.prepare_for_training`."""
        self._group.call_all("prepare_for_training", *args, **kwargs)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`PolicyInterface.finish_training`."""
        self._group.call_all("finish_training", *args, **kwargs)

    def prepare_for_lp_inference(self) -> None:
        """See :meth:`ColocatablePolicyInterface.prepare_for_lp_inference`."""
        self._group.call_all("prepare_for_lp_inference")

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`PolicyInterface.save_checkpoint`."""
        self._group.call_all("save_checkpoint", *args, **kwargs)

    # -- refit ----------------------------------------------------------------------------------

    def offload_before_refit(self) -> None:
        """See :meth:`ColocatablePolicyInterface.offload_before_refit`."""
        self._group.call_all("offload_before_refit")

    def offload_after_refit(self) -> None:
        """See :meth:`ColocatablePolicyInterface.offload_after_refit`."""
        self._group.call_all("offload_after_refit")

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """See :meth:`ColocatablePolicyInterface.prepare_refit_info`."""
        info: dict[str, Any] | None = self._group.call(0, "prepare_refit_info")
        return info

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """One Ray reference, of rank 0; see the interface."""
        return [self._group.submit_refit(0, "stream_weights_via_ipc_zmq", *args, **kwargs)]

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """One Ray reference, of rank 0; see the interface."""
        self._group.require("collective")
        return [
            self._group.submit_refit(
                0, "init_collective", ip, port, world_size, train_world_size=train_world_size
            )
        ]

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> list[Future]:
        """One Ray reference, of rank 0; see the interface."""
        self._group.require("collective")
        method = "broadcast_weights_for_collective"
        return [self._group.submit_refit(0, method, kv_scales, **options)]

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """See :meth:`ColocatablePolicyInterface.prepare_weights_for_ipc`."""
        groups: list[list[str]] = self._group.call(0, "prepare_weights_for_ipc", *args, **kwargs)
        return groups

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """See :meth:`ColocatablePolicyInterface.get_weights_ipc_handles`."""
        handles: dict[str, Any] = self._group.call(0, "get_weights_ipc_handles", keys)
        return handles
