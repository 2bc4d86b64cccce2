"""The policy backend: a transformers model that is trained and scores sequences."""

from __future__ import annotations

from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_core.backends import PolicyBackend
from rl_core.batch import BatchedDataDict
from rl_core.errors import CapabilityError, DataError, LifecycleError
from rl_core.plugins.config import check_config
from rl_hf import saving
from rl_hf.config import HuggingFaceGenerationConfig, HuggingFacePolicyConfig
from rl_hf.forward import Forward, base_model, check_packing
from rl_hf.lora import MergedWeightSource, add_adapters
from rl_hf.modeling import load_model, load_tokenizer, model_device
from rl_hf.modes import RandomStream
from rl_hf.optimizer import Optimizer, check_schedule, learning_rate
from rl_hf.parallel import DataParallel
from rl_hf.placement import Placement
from rl_hf.policy_generation import PolicyGeneration
from rl_hf.reference import make_reference
from rl_hf.rows import Limits, Microbatching, rows_per_step, training_rows
from rl_hf.scoring import Scorer
from rl_hf.training import Trainer, summary
from rl_hf.weights import ModelWeightSource, SteadyWeightSource

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from pathlib import Path

    from torch import nn

    from rl_core.interfaces import LossFunction, WeightSource, WorkerContext

__all__ = ["HuggingFacePolicy"]


class HuggingFacePolicy(PolicyBackend):
    """Trains and scores with a transformers model in this process.

    Everything is computed where the model is; batches and results are on the CPU. Methods bring
    model and optimizer to the device themselves if they were offloaded.

    Args:
        model_name: Directory (or hub name) of a checkpoint: a causal language model, or a
            sequence classifier with one label, which only :meth:`score` takes.
        worker: Given when this is one of several data-parallel workers.
        **config: Keys of :class:`~rl_hf.config.HuggingFacePolicyConfig`; checked before anything
            is loaded.

    Raises:
        ConfigError: A key is unknown or wrong, or the checkpoint cannot be loaded.
        CapabilityError: ``sequence_packing`` with a model that cannot keep sequences apart.
    """

    def __init__(
        self, model_name: str, *, worker: WorkerContext | None = None, **config: Any
    ) -> None:
        super().__init__(worker)
        self.config = _checked({"backend": "hf", **config, "model_name": model_name})
        self._microbatching = Microbatching(self.config)
        self._closed = False
        self._changes = 0
        model = load_model(self.config, for_training=True)
        self.tokenizer = load_tokenizer(model_name, self.config.get("trust_remote_code", False))
        self._device = model_device(model)
        self._labels = _labels(model)
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self._limits = Limits(model.get_input_embeddings().weight.shape[0], context)
        if self.config.get("gradient_checkpointing"):
            model.gradient_checkpointing_enable({"use_reentrant": False})
        lora, seed = self.config.get("lora"), self.config.get("seed", 0)
        self._adapters = lora is not None
        self.model: nn.Module = model if lora is None else add_adapters(model, lora, seed=seed)
        self._forward = Forward(
            self.model,
            temperature=self.config.get("temperature", 1.0),
            packed=self._microbatching.packed,
        )
        if self._microbatching.packed and self._labels is None:
            check_packing(self.model, self._limits.vocab_size)
        kind = "adapter" if self._adapters else self.config.get("reference", "swap")
        self._reference = make_reference(kind, self.model)
        spread = bool(self.config.get("device_map"))
        self._placement = Placement(
            self.model, self._device, spread=spread, left=self._sender.release_weights
        )
        self._scorer = Scorer(self._forward, self._microbatching, self._limits, self._device)
        self._group = DataParallel(worker, self._device)
        self._random = RandomStream(seed + self._group.rank, self._device)
        self._trainer = Trainer(
            self._forward,
            self._microbatching,
            self._group,
            self._random,
            max_grad_norm=self.config.get("max_grad_norm", 1.0),
            skip_non_finite=self.config.get("non_finite") == "skip",
        )
        if self.config.get("resume_from"):
            self.load_checkpoint(self.config["resume_from"])

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`PolicyBackend.from_config`."""
        return cls(worker=worker, **{k: v for k, v in config.items() if k != "backend"})

    # -- scoring --------------------------------------------------------------------------------

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_logprobs`.

        Args:
            data: ``input_ids`` with ``input_lengths``, or what a generation returned.
            micro_batch_size: Rows per forward pass; None as configured.

        Raises:
            DataError: Names the row and what is wrong with it.
        """
        self._ready("get_logprobs")
        scores = self._scorer.logprobs(self.model, data, micro_batch_size)
        return BatchedDataDict({"logprobs": scores})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_reference_policy_logprobs`.

        Raises:
            CapabilityError: The policy was built with ``reference="none"``.
        """
        self._ready("get_reference_policy_logprobs")
        self._placement.reference_to_device(self._reference)
        moves = self._reference.moves_weights
        with self._changing(really=moves), self._reference.using(self.model) as model:
            scores = self._scorer.logprobs(model, data, micro_batch_size)
        return BatchedDataDict({"reference_logprobs": scores})

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_topk_logits`; both are 0 where nothing is predicted.

        Raises:
            DataError: ``k`` is not within the vocabulary, or a row is wrong.
        """
        self._ready("get_topk_logits")
        values, indices = self._scorer.topk(data, k, micro_batch_size)
        return BatchedDataDict({"topk_logits": values, "topk_indices": indices})

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales` and :mod:`rl_hf.calibration`.

        Raises:
            CapabilityError: The model's attention cannot be observed.
            DataError: There is no row, or ``percentile`` or ``margin`` is out of range.
        """
        self._ready("calibrate_qkv_fp8_scales")
        return self._scorer.calibrate(
            data, micro_batch_size, percentile=percentile, margin=margin, include_q=include_q
        )

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.generate`; samples as the key ``generation`` says.

        The temperature is the policy's unless that key has its own.

        Raises:
            ConfigError: The model has no pad token.
            DataError: A row is left-padded, empty, too long or inconsistent with its length.
        """
        self._ready("generate")
        return self._generation.generate(data, greedy)

    @cached_property
    def _generation(self) -> PolicyGeneration:
        config = _generation_config(self.config)
        model = base_model(self.model)
        return PolicyGeneration(model, self.tokenizer, config, lambda: self._sender.version)

    def score(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.score`.

        Raises:
            CapabilityError: The model is not a sequence classifier with one label.
        """
        self._check_open("score")
        if self._labels != 1:
            found = "no scoring head" if self._labels is None else f"{self._labels} labels"
            raise CapabilityError(
                f"{self.config['model_name']} has {found}, a reward model has one label",
                fix="load a sequence classification checkpoint with num_labels=1",
            )
        self._placement.model_to_device()
        return BatchedDataDict({"scores": self._scorer.rewards(data, micro_batch_size)})

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

        Raises:
            ConfigError: The loss is a class, or is not called as losses are.
            DataError: A row is wrong, the batch is generation output, a rollout has no
                ``token_mask``, or the rows are no multiple of the global batch.
            TrainingError: A loss or gradient is not finite; the step was not taken. Earlier steps
                of the call were; ``details["steps_taken"]`` counts them.
        """
        self._ready("train")
        with self._group.together("checking the batch"):
            data = self.admission.admit(data, loss_fn, eval_mode=eval_mode)
            rows = training_rows(data, self._limits)
            if gbs is None and not eval_mode:
                gbs = self.config.get("train_global_batch_size")
            local = rows_per_step(rows.size, gbs, self._group.size)
        self._check_same_rows(rows.size, local)
        batches = [rows.slice(at, at + local) for at in range(0, rows.size, local)]
        options: dict[str, Any] = {"device": self._device, "size": mbs}
        if eval_mode:
            lr = learning_rate(self._steps, self.config)
            return summary(self._trainer.evaluate(b, loss_fn, lr=lr, **options) for b in batches)
        self.prepare_for_training()
        self._reference.keep(self.model)
        with self._changing():
            return summary(
                self._trainer.step(b, loss_fn, self._optimizer, **options) for b in batches
            )

    def _check_same_rows(self, rows: int, local: int) -> None:
        everybody = self._group.gather([rows, local])
        if any(theirs != everybody[0] for theirs in everybody):
            raise DataError(
                f"data-parallel workers got different [rows, batch]: {everybody}",
                fix="give every worker the same number of rows, filled up with sample_mask 0",
            )

    @cached_property
    def _optimizer(self) -> Optimizer:
        """Made when training begins; a policy that only scores needs no masters."""
        return Optimizer(self.model, self.config)

    @property
    def _steps(self) -> int:
        return self._optimizer.steps if "_optimizer" in self.__dict__ else 0

    # -- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(self, path: str | Path) -> None:
        """Writes weights, optimizer, schedule, random state and step to a directory, atomically.

        The directory is also a Hugging Face checkpoint (adapters merged) with its tokenizer. A
        checkpoint that stands there is replaced; it stays whole until the new one is.

        Raises:
            CheckpointError: Something that is not a checkpoint stands at ``path``.
        """
        self._ready("save_checkpoint")
        saving.save(path, self.model, self.tokenizer, self._optimizer, self._group, self._random)

    def load_checkpoint(self, path: str | Path) -> None:
        """Continues where :meth:`save_checkpoint` was called; the reference stays as it was.

        Torch's global random state is restored too.

        Raises:
            CheckpointError: It is missing, incomplete, altered or of another model; names the
                file or the tensors. The policy is as it was.
        """
        self._ready("load_checkpoint")
        self._reference.keep(self.model)
        with self._changing():
            saving.load(path, self.model, self._optimizer, self._group.rank, self._random)

    def export_hf(self, path: str | Path) -> None:
        """Writes the model alone (adapters merged) in the format its architecture is published in.

        For architectures whose published tensors transformers rearranges on loading (experts,
        say), this is what other engines read; for all others it is the model part of a checkpoint.
        """
        self._check_open("export_hf")
        saving.export(path, self.model, self.tokenizer)

    # -- refit ----------------------------------------------------------------------------------

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyBackend.weight_source`; with adapters, the merged weights.

        Every data-parallel worker has all of them, so that a refit needs the first one alone.
        """
        self._check_open("weight_source")
        merged = self._adapters
        source = MergedWeightSource(self.model) if merged else ModelWeightSource(self.model)
        return SteadyWeightSource(source, lambda: self._changes)

    @contextmanager
    def _changing(self, *, really: bool = True) -> Generator[None]:
        """A refit that runs at the same time notices."""
        self._changes += really
        try:
            yield
        finally:
            self._changes += really

    # -- lifecycle ------------------------------------------------------------------------------

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Brings model and optimizer to the device. Idempotent."""
        self._check_open("prepare_for_training")
        self._placement.model_to_device()
        self._placement.optimizer_to_device(self._optimizer)

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Frees the device memory of gradients and optimizer. Idempotent."""
        self._check_open("finish_training")
        self._offload_optimizer()

    def prepare_for_lp_inference(self) -> None:
        """Brings the model to the device, without the optimizer. Idempotent."""
        self._check_open("prepare_for_lp_inference")
        self._offload_optimizer()
        self._placement.model_to_device()

    def offload_before_refit(self) -> None:
        """Frees the device memory of gradients and optimizer; the weights stay to be sent."""
        self._check_open("offload_before_refit")
        self._offload_optimizer()

    def offload_after_refit(self) -> None:
        """Frees the device memory of everything. Idempotent."""
        self._check_open("offload_after_refit")
        self._offload_optimizer()
        self._placement.model_to_host(self._reference)

    def _offload_optimizer(self) -> None:
        if "_optimizer" in self.__dict__:
            self._placement.optimizer_to_host(self._optimizer)

    def shutdown(self) -> bool:
        """See :meth:`PolicyInterface.shutdown`."""
        if not self._closed:
            self._closed = True
            self.close_refits()
            self._reference.close()
            self._group.close()
            for name in ("_optimizer", "_generation"):
                self.__dict__.pop(name, None)
            del self.model, self._forward, self._scorer, self._trainer, self._placement
            if self._device.type == "cuda":
                torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
                torch.cuda.empty_cache()
        return True

    def _ready(self, method: str) -> None:
        """Checks that a method of language models can run, and brings the model to the device."""
        self._check_open(method)
        if self._labels is not None:
            raise CapabilityError(
                f"{self.config['model_name']} is a sequence classifier: {method} needs a "
                "language model",
                fix="load a causal language model, or call score",
            )
        self._placement.model_to_device()

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise LifecycleError(
                f"{type(self).__name__}.{method} was called after shutdown",
                fix="build a new policy",
            )


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    checked = check_config(HuggingFacePolicyConfig, config, what="policy backend 'hf'")
    check_schedule(checked.get("scheduler", {}))
    _generation_config(checked)
    return checked


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    shared = ("model_name", "temperature")
    defaults = {"backend": "hf", **{key: config[key] for key in shared if key in config}}
    return check_config(
        HuggingFaceGenerationConfig,
        {**defaults, **config.get("generation", {})},
        what="policy backend 'hf', generation",
    )


def _labels(model: Any) -> int | None:
    """Number of labels of a sequence classifier; None for a language model."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return int(model.config.num_labels)
    return None
