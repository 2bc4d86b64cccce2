"""The policy backend: a transformers model that is trained and scores sequences."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.distributed.fsdp import FSDPModule

from rl_backends import PolicyBackend, RowLimits
from rl_backends.base_weights import BASE, BaseDigests
from rl_backends.pieces import DTensorSource, local_part
from rl_backends.policy.base import check_policy_config
from rl_backends.policy.checkpoint_directory import write_directory
from rl_backends.policy.rows import scoring_rows
from rl_backends.refit_ranks import RefitRanks
from rl_backends.tensors import NamedTensorSource, module_tensors
from rl_backends.torch.calibration import Calibration, check_calibration
from rl_backends.torch.checkpoints import load_tokenizer
from rl_backends.torch.decoding import DEFAULT_MAX_BATCH_SIZE, evaluating
from rl_backends.torch.optimizer import Optimizer
from rl_backends.torch.policy_generation import PolicyGeneration
from rl_backends.torch.reference import Reference, make_reference
from rl_core.batch import BatchedDataDict
from rl_core.config import check_config
from rl_core.errors import CapabilityError, ConfigError
from rl_core.interfaces import LossInputType
from rl_hf import saving
from rl_hf.config import HuggingFaceGenerationConfig, HuggingFacePolicyConfig
from rl_hf.decoders import decoding_engine
from rl_hf.forward import Forward, Sequences, base_model, packed_row_cost, packing_fault
from rl_hf.hidden import find_body
from rl_hf.lora import AdapterWeightSource, BaseWeights, MergedWeightSource, add_adapters
from rl_hf.modeling import load_model, model_device, model_facts
from rl_hf.placement import Placement
from rl_hf.positions import sharing_limit
from rl_hf.reward import reward_scores
from rl_hf.sharding import KEY, Shards, check_sharding

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from rl_core.interfaces import WeightSource, WorkerContext
    from rl_hf.hidden import Body

_log = logging.getLogger(__name__)
T = TypeVar("T")

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
            is loaded. ``config`` has ``sequence_packing.enabled`` as it was settled.

    Attributes:
        chunked: Log-probs are made of hidden states, some tokens at a time; False for a model whose
            logits cannot be made so, which a warning says when the policy is built.

    Raises:
        ConfigError: A key is unknown or wrong, or the checkpoint cannot be loaded.
        CapabilityError: ``sequence_packing`` is enabled for a model that cannot keep sequences
            apart.
    """

    def __init__(
        self, model_name: str, *, worker: WorkerContext | None = None, **config: Any
    ) -> None:
        given = {"backend": "hf", **config, "model_name": model_name}
        checked = check_config(HuggingFacePolicyConfig, given, what="policy backend 'hf'")
        check_policy_config(checked)
        _generation_config(checked)
        sharded = check_sharding(checked, worker)
        model = load_model(checked, for_training=True)
        self.tokenizer = load_tokenizer(model_name, checked.get("trust_remote_code", False))
        self._device = model_device(model)
        self._labels = _labels(model)
        if sharded and self._labels is not None:
            raise ConfigError(
                f"{model_name} is a sequence classifier, which is not trained, and only trained "
                f"models are sharded",
                fix=f"set {KEY}.enabled to False",
                key=KEY,
            )
        context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limits = RowLimits(model.get_input_embeddings().weight.shape[0], context)
        if checked.get("gradient_checkpointing"):
            newer = getattr(model, "activation_checkpointing_enable", None)  # since 5.24
            (newer or model.gradient_checkpointing_enable)()
        lora = checked.get("lora")
        self._adapters = lora is not None
        self._base: BaseDigests | None = None  # where adapters are sent alone
        self.model: nn.Module = model
        if lora is not None:
            self.model = add_adapters(model, lora, seed=checked.get("seed", 0))
            if lora.get("refit") == "adapter":
                AdapterWeightSource(self.model)  # raises now if engines cannot serve them
                self._base = BaseDigests(self.model)
                if sharded and worker is not None and worker.rank == 0:
                    self._base.now()  # as long as it has them whole
        body: Body | None = None
        sharing = sharing_limit(model)
        asked = (checked.get("sequence_packing") or {}).get("enabled")
        if self._labels is None:
            with evaluating(self.model):
                packs = _packs(self.model, checked, limits.vocab_size)
                body = find_body(self.model, model, limits.vocab_size)
            packing = {**(checked.get("sequence_packing") or {}), "enabled": packs}
            checked = {**checked, "sequence_packing": packing}
        self._shards = Shards(worker, self._device) if sharded and worker is not None else None
        with ExitStack() as unless_built:
            if self._shards is not None:
                unless_built.callback(self._shards.leave)
            ranks = None if self._shards is None else self._shards.ranks
            super().__init__(checked, limits, worker=worker, device=self._device, ranks=ranks)
            self.chunked = body is not None
            self._forward = Forward(
                self.model,
                temperature=checked.get("temperature", 1.0),
                packed=self.microbatching.packed,
                row_cost=0.0 if asked else packed_row_cost(self.model),
                body=body,
                sharing=sharing,
            )
            reference = checked.get("reference", "swap")
            if self._shards is not None and worker is not None:
                adapters = {p for p in self.model.parameters() if p.requires_grad}
                kept = adapters if self._adapters else None
                self._shards.shard(self.model, model, self._probe, kept=kept)
                self.refit_ranks = RefitRanks(self._shards.messages, address=worker.master_addr)
                # A second model would have to be sharded, too; a second set of tensors is enough.
                reference = "memory" if reference == "copy" else reference
            self._reference: Reference = (
                BaseWeights() if self._adapters else make_reference(reference, self.model)
            )
            spread = bool(checked.get("device_map"))
            self._placement = Placement(
                self.model, self._device, spread=spread, left=self.weights_moved
            )
            self._optimizer: Optimizer | None = None
            if checked.get("resume_from"):
                self.load_checkpoint(checked["resume_from"])
            unless_built.pop_all()

    # -- the model ------------------------------------------------------------------------------

    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        """See :meth:`PolicyModel.forward`."""
        sequences = self._sequences(rows)
        if wanted is LossInputType.LOGIT:
            return self._forward.logits(sequences)
        return self._forward.logprobs(sequences, self._counts(rows))

    def topk(self, rows: BatchedDataDict[Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`PolicyModel.topk`."""
        return self._forward.topk(self._sequences(rows), k)

    def accumulate(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        share: Callable[[int, torch.Tensor], torch.Tensor],
        wanted: LossInputType,
        *,
        learn: bool,
    ) -> None:
        """See :meth:`PolicyModel.accumulate`; ranks of a sharded model keep in step."""
        if self._shards is None:
            super().accumulate(parts, share, wanted, learn=learn)
            return
        failed: list[Exception] = []
        missing = self._shards.missing(self._passes(parts, wanted))
        with self._shards.passing("the loss"):
            for number, lacking in enumerate(missing):
                losses = [self._probe().flatten()[:0].sum() for _ in range(lacking)]
                if number < len(parts):
                    found = self.forward(parts[number], wanted)
                    losses.append(found.flatten()[:0].sum())
                    try:
                        if not failed:
                            losses.append(share(number, found))
                    except Exception as error:  # the other ranks wait for this one, which goes on
                        failed.append(error)
                loss = torch.stack(losses).sum() if losses else torch.zeros(())
                if learn and loss.requires_grad:
                    # FSDP takes the mean over ranks of what are parts of a sum; not of adapters.
                    factor = 1 if self._adapters else self.ranks.size
                    (loss * factor).backward()  # type: ignore[no-untyped-call]
        if failed:
            raise failed[0]

    def forward_all(
        self, parts: Sequence[BatchedDataDict[Any]], wanted: LossInputType
    ) -> Iterable[torch.Tensor]:
        """See :meth:`PolicyModel.forward_all`."""
        return self._in_step(super().forward_all(parts, wanted), self._passes(parts, wanted))

    def topk_all(
        self, parts: Sequence[BatchedDataDict[Any]], k: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`PolicyModel.topk_all`."""
        passes = self._passes(parts, LossInputType.LOGIT)
        return self._in_step(super().topk_all(parts, k), passes)

    def _in_step(self, found: Iterable[T], passes: Sequence[int]) -> Iterable[T]:
        """Results of microbatches; of a sharded model while all ranks run it equally often."""
        if self._shards is None:
            yield from found
            return
        with self._shards.passing("scoring"):
            yield from self._shards.in_step(found, passes, self._probe)

    def _passes(self, parts: Sequence[BatchedDataDict[Any]], wanted: LossInputType) -> list[int]:
        """How often each microbatch takes the model."""
        if self._shards is None:
            return []
        if wanted is LossInputType.LOGIT:
            return [len(self._sequences(rows).apart(self._forward.sharing)) for rows in parts]
        return [self._forward.passes(self._sequences(rows), self._counts(rows)) for rows in parts]

    def _probe(self) -> torch.Tensor:
        """``[1, 2]`` log-probs of two tokens, one pass; what it drops is drawn for nobody else."""
        ids, lengths = torch.arange(2)[None], torch.tensor([2])
        with self.random.kept():
            return self._forward.logprobs(Sequences.of(ids, lengths, self._device))

    def rows_to_score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """See :meth:`PolicyBackend.rows_to_score`."""
        if self._shards is None:
            return super().rows_to_score(data)
        with self.ranks.all_or_none("checking the rows"):
            return super().rows_to_score(data)

    def _check_open(self, method: str) -> None:
        super()._check_open(method)
        if self._shards is not None:
            self._shards.check()

    @contextmanager
    def running(self, *, training: bool) -> Generator[None]:
        """See :meth:`PolicyBackend.running`; then a rank has its shards alone again."""
        try:
            with super().running(training=training):
                yield
        finally:
            if isinstance(self.model, FSDPModule):
                self.model.reshard()

    def _counts(self, rows: BatchedDataDict[Any]) -> torch.Tensor | None:
        """``[b, s]`` bool: which tokens of a microbatch count; None is all of them."""
        if "token_mask" not in rows:
            return None
        counts: torch.Tensor = (rows["token_mask"] != 0) & (rows["sample_mask"] != 0)[:, None]
        return counts.to(self._device)

    def _sequences(self, rows: BatchedDataDict[Any]) -> Sequences:
        return Sequences.of(rows["input_ids"], rows["input_lengths"], self._device)

    @contextmanager
    def reference(self) -> Generator[None]:
        """See :meth:`PolicyModel.reference`.

        Raises:
            CapabilityError: The policy was built with ``reference="none"``.
        """
        self._placement.reference_to_device(self._reference)
        moves = self._reference.moves_weights
        moved = self.changes.declared(lasts=False) if moves else nullcontext()
        own = self._forward
        with moved, self._reference.using(self.model) as model:
            self._forward = own.over(model)
            try:
                yield
            finally:
                self._forward = own

    def keep_reference(self) -> None:
        """See :meth:`PolicyModel.keep_reference`."""
        self._reference.keep(self.model)

    def gradient_norm(self) -> float:
        """See :meth:`PolicyModel.gradient_norm`."""
        optimizer = self._stepping
        if self._shards is not None and not self._adapters:
            shards = [local_part(gradient) for gradient in optimizer.gradients().values()]
            own = float(torch.stack([shard.double().square().sum() for shard in shards]).sum())
            return math.sqrt(sum(self.ranks.gather(own)))
        if self.ranks.size > 1:
            everybody = self.ranks.gather(list(optimizer.gradients()))
            optimizer.set_zero_gradients({name for names in everybody for name in names})
            (self._shards or self.ranks).sum_(optimizer.gradients().values())
        gradients = list(optimizer.gradients().values())
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def take_step(self, lr: float, scale: float) -> None:
        """See :meth:`PolicyModel.take_step`."""
        if scale != 1:
            for gradient in self._stepping.gradients().values():
                gradient.mul_(scale)
        self._stepping.step(lr)

    def clear_gradients(self) -> None:
        """See :meth:`PolicyModel.clear_gradients`."""
        if self._optimizer is not None:
            self._optimizer.clear()

    @property
    def _stepping(self) -> Optimizer:
        """Made when training begins; a policy that only scores needs no masters."""
        if self._optimizer is None:
            trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            self._optimizer = Optimizer(trained, self.config.get("optimizer", {}))
        return self._optimizer

    def ready(self, method: str) -> None:
        """See :meth:`PolicyBackend.ready`.

        Raises:
            CapabilityError: The model is a sequence classifier.
        """
        if self._labels is not None and not self._closed:
            raise CapabilityError(
                f"{self.config['model_name']} is a sequence classifier, but {method} needs a "
                "language model",
                fix="load a causal language model, or call score",
            )
        super().ready(method)

    # -- what not every policy offers -----------------------------------------------------------

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """As :mod:`rl_backends.torch.calibration`.

        Raises:
            CapabilityError: The model's attention cannot be observed.
            DataError: There is no row, or ``percentile`` or ``margin`` is out of range.
        """
        self.ready("calibrate_qkv_fp8_scales")
        rows = scoring_rows(data, self.limits)
        check_calibration(rows.size, percentile, margin)
        calibration = Calibration(include_q=include_q)
        with self.running(training=False):
            for _, part in self.microbatches(rows, micro_batch_size):
                self._forward.observed(self._sequences(part), calibration)
        return calibration.scales(percentile, margin)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.generate`; samples as the key ``generation`` says.

        The temperature is the policy's unless that key has its own.

        Raises:
            ConfigError: The model has no pad token.
            DataError: A row is left-padded, empty, too long or inconsistent with its length.
        """
        self.ready("generate")
        if not isinstance(self.model, FSDPModule):
            return self._generation.generate(data, greedy)
        data = self._generation.drawn_alike(data, self.ranks, greedy=greedy)
        try:
            self.model.unshard()  # all but the layers, also for a decoder of the model in it
            return self._generation.generate(data, greedy)
        finally:
            self.model.reshard()

    @cached_property
    def _generation(self) -> PolicyGeneration:
        config = _generation_config(self.config)
        model = base_model(self.model)
        facts = model_facts(model, self.tokenizer, config)
        most = config.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE)
        engine = decoding_engine(model, self.tokenizer, max_batch_size=most)
        return PolicyGeneration(engine, config, facts, self)

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
                f"{self.config['model_name']} has {found}, but a reward model has one label",
                fix="load a sequence classification checkpoint with num_labels=1",
            )
        self._placement.model_to_device()
        rows = scoring_rows(data, self.limits)
        scores = torch.zeros(rows.size)
        for index, part in self.microbatches(rows, micro_batch_size):
            for group, each in self._sequences(part).apart(self._forward.sharing):
                scores[index[group]] = reward_scores(self.model, each).cpu()
        return BatchedDataDict({"scores": scores})

    # -- what leaves it -------------------------------------------------------------------------

    def write_checkpoint(self, directory: Path) -> None:
        """See :meth:`PolicyModel.write_checkpoint`; adapters are merged, the tokenizer is there."""
        if self.ranks.rank == 0 or self._shards is not None:
            saving.save(directory, self.model, self.tokenizer, self._stepping, self._shards)

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        """See :meth:`PolicyModel.read_checkpoint`."""
        return saving.read(directory, self.model, self._stepping)

    def export_hf(self, path: str | Path) -> None:
        """Writes the model alone (adapters merged) in the format its architecture is published in.

        All ranks of a sharded model call it with one path.

        For architectures whose published tensors transformers rearranges on loading (experts,
        say), this is what other engines read; for all others it is the model part of a checkpoint.
        """
        self._check_open("export_hf")
        if self._shards is None:
            self.changes.check_whole()
            writing = write_directory(path)
        else:
            self.ranks.check_weights(self.changes)
            writing = self.written_by_all(path)
        with writing as directory:
            saving.write_model(
                directory, self.model, self.tokenizer, original_format=True, shards=self._shards
            )

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """See :meth:`PolicyRefits.prepare_refit_info`; with digests of what is not sent."""
        info = super().prepare_refit_info()
        if info is not None and self._base is not None:
            info[BASE] = self._base.now()
        return info

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyModel.weight_source`; with adapters, what ``lora.refit`` names.

        Every data-parallel worker has all of them, so that a refit needs the first one alone.
        """
        self._check_open("weight_source")
        if not self._adapters:
            tensors = module_tensors(self.model)
            if self._shards is None:
                return NamedTensorSource(tensors)
            return DTensorSource(tensors, self.model, first=self.ranks.rank == 0)
        if self.config["lora"].get("refit") == "adapter":
            return AdapterWeightSource(self.model)
        return MergedWeightSource(self.model, sharded=self._shards is not None)

    # -- memory ---------------------------------------------------------------------------------

    def on_wake(self, parts: frozenset[str]) -> None:
        """See :meth:`PolicyModel.on_wake`."""
        if "model" in parts:
            self._placement.model_to_device()
        if "optimizer" in parts:
            self._placement.optimizer_to_device(self._stepping)

    def on_sleep(self, parts: frozenset[str]) -> None:
        """See :meth:`PolicyModel.on_sleep`."""
        if "optimizer" in parts and self._optimizer is not None:
            self._placement.optimizer_to_host(self._optimizer)
        if "model" in parts:
            self._placement.model_to_host(self._reference)

    def on_shutdown(self) -> None:
        """See :meth:`PolicyModel.on_shutdown`."""
        self._reference.close()
        self.__dict__.pop("_generation", None)
        self._optimizer = None
        del self.model, self._forward, self._placement
        if self._shards is not None:
            self._shards.leave()
        if self._device.type == "cuda":
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


def _generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    shared = ("model_name", "temperature")
    defaults = {"backend": "hf", **{key: config[key] for key in shared if key in config}}
    return check_config(
        HuggingFaceGenerationConfig,
        {**defaults, **config.get("generation", {})},
        what="policy backend 'hf', generation",
    )


def _packs(model: nn.Module, config: Mapping[str, Any], vocab_size: int) -> bool:
    """Whether the rows of a microbatch lie end to end: as configured, or where the model can.

    Raises:
        CapabilityError: They were to, and the model cannot.
    """
    asked = (config.get("sequence_packing") or {}).get("enabled")
    if asked is False or (config.get("dynamic_batching") or {}).get("enabled"):
        return False
    fault = packing_fault(model, vocab_size)
    name = type(base_model(model)).__name__
    if fault and asked:
        raise CapabilityError(
            f"{name} does not support sequence_packing: {fault}",
            fix="leave sequence_packing out; dynamic_batching works with every model",
        )
    if fault:
        _log.warning("%s pads the rows of a microbatch to one length: %s", name, fault)
    return not fault


def _labels(model: Any) -> int | None:
    """Number of labels of a sequence classifier; None for a language model."""
    if type(model).__name__.endswith("ForSequenceClassification"):
        return int(model.config.num_labels)
    return None
