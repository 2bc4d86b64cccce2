"""A policy backend whose workers run on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_core.backends.admission import Admission
from rl_core.backends.inputs import as_batch
from rl_core.cluster.remote import RemoteBackend
from rl_core.cluster.sharding import RowRanks, collect, padded_shards, training_shards
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
    """Workers of one trainer; behaves as the embedded backend does.

    What each worker is given is said in :class:`~rl_core.interfaces.WorkerContext`. Every method
    is called on every worker; in a refit the first one speaks and the others follow.

    Raises:
        PluginError: What the workers report as ``data_parallel`` does not fit together.
    """

    _kind = "policy"

    def _connect(self) -> None:
        self.admission = Admission(lambda: self.config, lambda: self.weights_version)
        self._rows = RowRanks(self._group.attributes("data_parallel"), self._group.name)

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
        if self._rows.size == 1:
            only: BatchedDataDict[Any] = self._call_all(method, data, *args)
            return only
        shards, indices = padded_shards(data, self._rows.size)
        calls = [
            self._group.submit(rank, method, shards[part], *args)
            for rank, part in enumerate(self._rows.parts)
        ]
        return collect(self._rows.spoken(self._group.wait(calls)), indices, data.size)

    def _call_all(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of every worker with the same arguments; the first one's result counts."""
        results = self._group.call_together(method, *args, **kwargs)
        return results[min(self._rows.first, len(results) - 1)]

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[GenerationDatumSpec],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """On every worker with all rows; see the interface."""
        scales: dict[str, Any] = self._call_all(
            "calibrate_qkv_fp8_scales", data, micro_batch_size, percentile, margin, include_q
        )
        return scales

    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """On every worker with all rows; see :meth:`PolicyInterface.generate`."""
        output: BatchedDataDict[GenerationOutputSpec] = self._call_all("generate", data, greedy)
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
        if self._rows.size > 1:
            if gbs is None and not eval_mode:
                gbs = self.config.get("train_global_batch_size")
            gbs = data.size if gbs is None else gbs
            shards, gbs = training_shards(
                data, self._rows.size, gbs, getattr(loss_fn, "group_size", 1)
            )
        calls = [
            self._group.submit(rank, "train", shards[part], loss_fn, eval_mode, gbs=gbs, mbs=mbs)
            for rank, part in enumerate(self._rows.parts)
        ]
        result: dict[str, Any] = self._rows.spoken(self._group.wait(calls))[0]
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
        info: dict[str, Any] | None = self._group.call_together("prepare_refit_info")[0]
        return info

    def stream_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """One future for each worker, the first of which has the report; see the interface."""
        return self._refit("stream_weights_via_ipc_zmq", *args, **kwargs)

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """One future for each worker; see the interface.

        Once it returns, the first worker listens, and ``prepare_refit_info`` says where.
        """
        self._group.require("collective")
        return self._group.begin_refit(
            "init_collective", ip, port, world_size, train_world_size=train_world_size
        )

    def broadcast_weights_for_collective(
        self, kv_scales: dict[str, float] | None = None, **options: Any
    ) -> list[Future]:
        """One future for each worker, the first of which has the report; see the interface."""
        self._group.require("collective")
        return self._refit("broadcast_weights_for_collective", kv_scales, **options)

    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """See :meth:`ColocatablePolicyInterface.prepare_weights_for_ipc`."""
        answers = self._group.call_together("prepare_weights_for_ipc", *args, **kwargs)
        groups: list[list[str]] = answers[0]
        return groups

    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """See :meth:`ColocatablePolicyInterface.get_weights_ipc_handles`."""
        handles: dict[str, Any] = self._group.call_together("get_weights_ipc_handles", keys)[0]
        return handles
