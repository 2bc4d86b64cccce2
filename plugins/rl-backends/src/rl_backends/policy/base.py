"""The base class of policy backends: everything about a policy that is not its model's."""

from __future__ import annotations

import math
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_backends.description import described, not_copied
from rl_backends.policy.checkpoints import PolicyCheckpoints
from rl_backends.policy.loop import timed
from rl_backends.policy.loop_checks import reward_spread
from rl_backends.policy.losses import call_loss, input_type_of
from rl_backends.policy.model import MODEL, OPTIMIZER, PolicyModel
from rl_backends.policy.randomness import RandomStream
from rl_backends.policy.ranks import RankGroup
from rl_backends.policy.refits import PolicyRefits
from rl_backends.policy.rows import (
    Microbatching,
    RowLimits,
    check_k,
    counting_rows,
    cut,
    rows_per_step,
    scoring_rows,
    training_rows,
)
from rl_backends.policy.steps import (
    LossSum,
    StepResult,
    check_schedule,
    learning_rate,
    not_finite,
    summary,
)
from rl_core.batch import BatchedDataDict
from rl_core.errors import DataError
from rl_core.interfaces import LossInputType

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping

    from rl_core.interfaces import DataParallelRank, LossFunction, Timer, WorkerContext

__all__ = ["PolicyBackend", "check_policy_config"]


def check_policy_config(config: Mapping[str, Any]) -> None:
    """Checks what the TypedDict cannot express, before a model is loaded.

    Args:
        config: A checked :class:`~rl_core.interfaces.PolicyConfig`.

    Raises:
        ConfigError: Dynamic batching and packing are both enabled, or a schedule has no end.
    """
    Microbatching(config)
    check_schedule(config.get("scheduler", {}))


class PolicyBackend(PolicyCheckpoints, PolicyRefits):
    """Turns a trainer into a :class:`~rl_core.interfaces.ColocatablePolicyInterface`.

    A subclass loads its model, sets :attr:`model`, calls ``super().__init__`` and implements the
    methods of :class:`~rl_backends.policy.model.PolicyModel`. Checks of rows, microbatches,
    counts, sums over microbatches and ranks, random numbers, the schedule, checkpoints that are
    whole or not there, the lifecycle and every refit method are here. Optional capabilities refuse
    until overridden.

    Args:
        config: A checked :class:`~rl_core.interfaces.PolicyConfig` with the backend's own keys.
        limits: What the model can read.
        worker: Given when this is one of several workers; see :class:`PolicyRefits` for what a
            refit needs of those that do not have all weights.
        device: Where the model computes, and dropout draws its numbers. Default: the CPU.
        ranks: All workers of the policy. By default they meet at ``worker``'s address.
        data_parallel: Which rows this worker gets; None if each worker has other rows.

    Attributes:
        config: The configuration, as a dict.
        limits: See above.
        ranks: See above.
        microbatching: Which rows go through the model together.
        random: The numbers that training draws from.
        steps: Optimizer steps taken.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        limits: RowLimits,
        *,
        worker: WorkerContext | None = None,
        device: torch.device | None = None,
        ranks: RankGroup | None = None,
        data_parallel: DataParallelRank | None = None,
    ) -> None:
        super().__init__(worker)
        self.config = dict(config)
        self.limits = limits
        self.microbatching = Microbatching(config)
        self.data_parallel = data_parallel
        self.steps = 0
        self._computes_on = device = device or torch.device("cpu")
        self.ranks = RankGroup(worker, device) if ranks is None else ranks
        self.rows_rank = self.ranks.rank if data_parallel is None else data_parallel.rank
        self.random = RandomStream(config.get("seed", 0) + self.rows_rank, device)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """Builds the backend from its checked configuration.

        Args:
            config: Of the form of its TypedDict, ``backend`` included.
            worker: Given when it is one of several workers.
        """
        return cls(worker=worker, **{k: v for k, v in config.items() if k != "backend"})

    def __repr__(self) -> str:
        facts = ["shut down"]
        if not self._closed:
            dtypes = {str(p.dtype).removeprefix("torch.") for p in self.model.parameters()}
            facts = [" and ".join(sorted(dtypes)), str(self._computes_on), f"step {self.steps}"]
        return described(self, self.config, *facts)

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_copied(self, "create_policy")

    def ready(self, method: str) -> None:
        """Called as a method begins: checks that it can run, and brings the model to its device.

        Raises:
            LifecycleError: The policy was shut down, or its weights are torn.
        """
        self._check_open(method)
        self.changes.check_whole()
        self.on_wake(MODEL)

    # -- scoring --------------------------------------------------------------------------------

    def get_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_logprobs`.

        Args:
            data: ``input_ids`` with ``input_lengths``, or what a generation returned.
            micro_batch_size: Rows per forward pass; None as configured.
            timer: Measures the call.

        Raises:
            DataError: Names the row and what is wrong with it.
        """
        with timed(timer, "get_logprobs"):
            self.ready("get_logprobs")
            rows = self.rows_to_score(data)
            scores = BatchedDataDict[Any]({"logprobs": self._logprobs(rows, micro_batch_size)})
            self.loop_checks.compare(data, scores["logprobs"])
            return scores

    def get_reference_policy_logprobs(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_reference_policy_logprobs` and :meth:`get_logprobs`.

        Raises:
            CapabilityError: The weights of the start are not kept.
        """
        with timed(timer, "get_reference_policy_logprobs"):
            self.ready("get_reference_policy_logprobs")
            rows = self.rows_to_score(data)
            with self.reference():
                found = self._logprobs(rows, micro_batch_size)
            return BatchedDataDict({"reference_logprobs": found})

    def get_topk_logits(
        self,
        data: BatchedDataDict[Any],
        k: int,
        micro_batch_size: int | None = None,
        timer: Timer | None = None,
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_topk_logits`; both are 0 where nothing is predicted.

        Raises:
            CapabilityError: The policy does not offer it.
            DataError: ``k`` is not within the vocabulary, or a row is wrong.
        """
        if type(self).topk is PolicyModel.topk:
            raise self._refuse("top-k logits", "use a backend that declares topk_logits")
        self.ready("get_topk_logits")
        check_k(k, self.limits)
        rows = self.rows_to_score(data)
        shape = (*rows["input_ids"][:, 1:].shape, k)
        values, indices = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        index, parts = self._plan(rows, micro_batch_size)
        with timed(timer, "get_topk_logits"), self.running(training=False):
            for where, (top, chosen) in zip(index, self.topk_all(parts, k), strict=True):
                values[where, : top.shape[1]] = top.cpu()
                indices[where, : top.shape[1]] = chosen.cpu()
        return BatchedDataDict({"topk_logits": values, "topk_indices": indices})

    def rows_to_score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Checks them; ranks that compute together with different rows agree on it here."""
        return scoring_rows(data, self.limits)

    def microbatches(
        self, rows: BatchedDataDict[Any], size: int | None
    ) -> Iterator[tuple[torch.Tensor, BatchedDataDict[Any]]]:
        """Rows to score, one microbatch after the other, while the model is in evaluation mode.

        Yields:
            ``[b]`` int64 indices, and those rows as :meth:`forward` takes them.
        """
        with self.running(training=False):
            yield from zip(*self._plan(rows, size), strict=True)

    def _plan(
        self, rows: BatchedDataDict[Any], size: int | None
    ) -> tuple[list[torch.Tensor], list[BatchedDataDict[Any]]]:
        lengths, width = rows["input_lengths"], rows["input_ids"].shape[1]
        index = self.microbatching.plan(lengths, "logprob", width=width, size=size)
        return index, [cut(rows, part) for part in index]

    @contextmanager
    def running(self, *, training: bool) -> Generator[None]:
        """Training or evaluation mode, with or without gradients; then it is as it was."""
        before = {module: module.training for module in self.model.modules()}
        self.model.train(training)
        try:
            with torch.set_grad_enabled(training):
                yield
        finally:
            for module, flag in before.items():
                module.training = flag

    def _logprobs(self, rows: BatchedDataDict[Any], size: int | None) -> torch.Tensor:
        result = torch.zeros(rows["input_ids"].shape)
        index, parts = self._plan(rows, size)
        with self.running(training=False):
            found = self.forward_all(parts, LossInputType.LOGPROB)
            for where, scores in zip(index, found, strict=True):
                result[where, : scores.shape[1]] = scores.cpu()
        return result

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
        """See :meth:`PolicyInterface.train`.

        A missing ``sample_mask`` is all ones; so is ``token_mask``, unless the batch is a rollout.
        A global batch in which nothing counts takes no step. ``skipped_steps`` is in the result.

        Args:
            data: This worker's rows; see :class:`TrainingDatumSpec`.
            loss_fn: The loss.
            eval_mode: Compute the loss and change nothing. Without ``gbs`` all rows are then one
                global batch.
            gbs: Rows per optimizer step over all workers. The rows must be a multiple of it.
            mbs: Rows per forward and backward pass; overrides dynamic batching and packing's own
                choice of rows.
            timer: Measures the steps.

        Raises:
            ConfigError: The loss is a class, or is not called as losses are.
            DataError: A row is wrong, the batch is generation output, a rollout has no
                ``token_mask``, or the rows are no multiple of the global batch.
            LifecycleError: A rank's weights are torn, or of another state than rank 0's.
            TrainingError: A loss or gradient is not finite; the step was not taken. Earlier steps
                of the call were.
        """
        self._check_open("train")
        self.ranks.check_weights(self.changes)
        with self.ranks.all_or_none("checking the batch"):
            self.ready("train")
            data = self.loop_checks.check_training_call(data, loss_fn, eval_mode=eval_mode)
            rows = training_rows(data, self.limits)
            if gbs is None and not eval_mode:
                gbs = self.config.get("train_global_batch_size")
            local = rows_per_step(rows.size, gbs, self.data_parallel_size)
            if not eval_mode:
                self.prepare_for_training()
                self.keep_reference()
        everybody = self.ranks.gather([rows.size, local])
        if any(theirs != everybody[0] for theirs in everybody):
            raise DataError(
                f"data-parallel workers got different numbers: [rows, global batch] is {everybody}",
                fix="give every worker the same number of rows; fill up with rows of sample_mask 0",
            )
        batches = [rows.slice(at, at + local) for at in range(0, rows.size, local)]
        if eval_mode:
            with timed(timer, "train"):
                result = summary(self._evaluate(batch, loss_fn, mbs) for batch in batches)
        else:
            with timed(timer, "train"), self.changes.declared(lasts=False):
                result = summary(self._step(batch, loss_fn, mbs) for batch in batches)
        return result | reward_spread(data)

    @property
    def data_parallel_size(self) -> int:
        """See :attr:`PolicyInterface.data_parallel_size`."""
        return self.data_parallel.size if self.data_parallel else self.ranks.size

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return learning_rate(self.steps, self.config)

    def _step(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, size: int | None
    ) -> StepResult:
        """One step over this worker's rows of a global batch."""
        lr, largest = self.lr, self.config.get("max_grad_norm", 1.0) or math.inf
        try:
            total = self._loss(rows, loss_fn, size, learn=True)
            if not (total.valid_seqs and total.valid_toks):
                return total.result(0.0, lr, skipped=True)
            with self.ranks.all_or_none("the gradients"):
                norm = self.gradient_norm()
                finite = math.isfinite(total.loss) and math.isfinite(norm)
                if not finite and self.config.get("non_finite") != "skip":
                    raise not_finite(total, norm)
            if finite:
                with self.changes.declared(), self.ranks.all_or_none("an optimizer step"):
                    self.take_step(lr, largest / norm if norm > largest else 1.0)
                self.steps += 1
            return total.result(norm, lr, skipped=not finite)
        finally:
            self.clear_gradients()

    def _evaluate(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, size: int | None
    ) -> StepResult:
        total = self._loss(rows, loss_fn, size, learn=False)
        if not math.isfinite(total.loss) and self.config.get("non_finite") != "skip":
            raise not_finite(total, 0.0)
        return total.result(0.0, self.lr, skipped=False)

    def _loss(
        self, rows: BatchedDataDict[Any], loss_fn: LossFunction, size: int | None, *, learn: bool
    ) -> LossSum:
        """The loss of a global batch over all workers, and this one's gradients of it."""
        samples = rows["sample_mask"].double()
        tokens = (rows["token_mask"].double() * samples[:, None]).sum()
        counts = self.reported_values([float(samples.sum()), float(tokens)])
        local = LossSum(sum(seqs for seqs, _ in counts), sum(toks for _, toks in counts))
        drawing = self.random.drawn() if learn else self.random.kept()
        with self.ranks.all_or_none("the loss"), self.running(training=learn), drawing:
            group_size = getattr(loss_fn, "group_size", 1)
            index = counting_rows(rows["sample_mask"], group_size)
            plan = self.microbatching.plan(
                rows["input_lengths"][index],
                "train",
                width=rows["input_ids"].shape[1],
                size=size,
                group_size=group_size,
            )
            parts = [cut(rows, index[part]) for part in plan]

            def share(number: int, inputs: torch.Tensor) -> torch.Tensor:
                device = inputs.device
                loss, metrics = call_loss(
                    loss_fn,
                    inputs,
                    parts[number].to(device),
                    global_valid_seqs=torch.tensor(local.valid_seqs, device=device),
                    global_valid_toks=torch.tensor(local.valid_toks, device=device),
                )
                local.add(float(loss.detach()), metrics, index[plan[number]].tolist())
                return loss

            self.accumulate(parts, share, input_type_of(loss_fn), learn=learn)
        total = LossSum(local.valid_seqs, local.valid_toks)
        for loss, metrics, bad in self.reported_values([local.loss, local.metrics, local.bad_rows]):
            total.add(loss, metrics, bad)
        return total

    def reported_values(self, value: Any) -> list[Any]:
        """The values of the workers that report results, by rank."""
        reports = self.data_parallel is None or self.data_parallel.reports
        return [theirs for theirs, taken in self.ranks.gather([value, reports]) if taken]

    # -- lifecycle ------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Brings model and optimizer to the device. Idempotent."""
        self._check_open("prepare_for_training")
        self.on_wake(MODEL | OPTIMIZER)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Frees the device memory of gradients and optimizer. Idempotent."""
        self._check_open("finish_training")
        self.on_sleep(OPTIMIZER)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Brings the model to the device, without the optimizer. Idempotent."""
        self._check_open("prepare_for_lp_inference")
        if not keep_train_buffers:
            self.on_sleep(OPTIMIZER)
        self.on_wake(MODEL)

    def offload_before_refit(self) -> None:
        """Frees the device memory of gradients and optimizer; the weights stay to be sent."""
        self._check_open("offload_before_refit")
        self.on_sleep(OPTIMIZER)

    def offload_after_refit(self) -> None:
        """Frees the device memory of everything. Idempotent."""
        self._check_open("offload_after_refit")
        self.on_sleep(OPTIMIZER | MODEL)

    def get_free_memory_bytes(self) -> int:
        """Bytes that are free where buffers of a refit would be; some loops size them by it."""
        device = self._computes_on
        if device.type == "cuda":
            return int(torch.cuda.mem_get_info(device)[0])
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def shutdown(self) -> bool:
        """See :meth:`PolicyInterface.shutdown`."""
        if not self._closed:
            self._closed = True
            self.close_refits()
            self.on_shutdown()
            self.ranks.close()
        return True
