"""The policy backend: a megatron-core model that is trained and scores sequences."""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from rl_backends import PolicyBackend, RowLimits
from rl_backends.model_files import check_remote_code, config_of
from rl_backends.policy.base import check_policy_config
from rl_backends.policy.checkpoint_directory import STATE_FILE, read_json
from rl_backends.policy.rows import scoring_rows
from rl_backends.refit_ranks import RefitRanks
from rl_backends.torch.calibration import BINS, Calibration, check_calibration
from rl_backends.torch.checkpoints import checkpoint_directory, load_tokenizer
from rl_backends.torch.reference import make_reference
from rl_core.config import check_config
from rl_core.errors import CheckpointError, ConfigError
from rl_core.interfaces import LossInputType
from rl_megatron import checkpoint
from rl_megatron.architectures import Architecture
from rl_megatron.config import MegatronPolicyConfig
from rl_megatron.cpu import without_cuda
from rl_megatron.engine import finalize_model_grads
from rl_megatron.forward import Forward
from rl_megatron.generation import generation_config, make_generation, whole_sequences
from rl_megatron.memory import Sleeper
from rl_megatron.model import build_model, model_device
from rl_megatron.parallel import ParallelState
from rl_megatron.sharding import make_optimizer, memory_users, shares_of
from rl_megatron.sizes import Sizes
from rl_megatron.source import MegatronSource, RankTensors
from rl_megatron.table import Table
from rl_megatron.vocabulary import Vocabulary
from rl_megatron.weights import (
    CheckpointFiles,
    Gathering,
    load_weights,
    owned_pieces,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence
    from pathlib import Path

    from rl_backends.torch.optimizer import Optimizer
    from rl_backends.torch.policy_generation import PolicyGeneration
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import WeightSource, WorkerContext
    from rl_megatron.forward import Laid, Results

__all__ = ["MegatronPolicy"]


class MegatronPolicy(PolicyBackend):
    """Trains and scores with megatron-core; this process is one rank, or the only one.

    One rank needs no launcher. Several are built as workers of a cluster, with
    ``create_policy(config, cluster)``.

    Args:
        model_name: Directory (or hub name) of a checkpoint in Hugging Face's format.
        worker: Given when this is one of several ranks.
        **config: Keys of :class:`~rl_megatron.config.MegatronPolicyConfig`; checked, with the
            checkpoint's files, before a model is built.

    Raises:
        ConfigError: A key is unknown or wrong, sizes do not divide, the architecture has no
            mapping, or the checkpoint does not fit.
        CapabilityError: The model or a size needs what is not implemented.
    """

    def __init__(
        self, model_name: str, *, worker: WorkerContext | None = None, **config: Any
    ) -> None:
        given = {"backend": "megatron", **config, "model_name": model_name}
        checked = check_config(MegatronPolicyConfig, given, what="policy backend 'megatron'")
        check_policy_config(checked)
        generation_config(checked)
        directory = checkpoint_directory(model_name)
        self._settings = config_of(directory)
        trust = checked.get("trust_remote_code", False)
        check_remote_code(model_name, self._settings, trust=trust)
        architecture = Architecture.of(self._settings, model_name, checked.get("architecture"))
        self.tokenizer = load_tokenizer(model_name, trust)
        world = worker.world_size if worker is not None else 1
        sizes = Sizes.of(checked, world, architecture)
        files = CheckpointFiles(directory)
        read = files.table(architecture)
        self._parallel = ParallelState.joined(sizes, worker, checked.get("rank_timeout_s", 600.0))
        try:
            self._build(checked, architecture, files, read, worker)
        except BaseException:
            self._parallel.leave()
            raise

    def _build(
        self,
        checked: dict[str, Any],
        architecture: Architecture,
        files: CheckpointFiles,
        read: Table,
        worker: WorkerContext | None,
    ) -> None:
        """Makes the model, of which everything was checked that can be."""
        self._at = self._parallel.here
        self.table = Table(architecture)
        self._published = read
        self._device = model_device()
        self._vocabulary = Vocabulary.of(architecture, self._at)
        self.model = build_model(architecture, self._at, checked)
        load_weights(files, owned_pieces(read, self._at, self._module))
        self._owned = owned_pieces(self.table, self._at, self._module)
        sent = Table(architecture, checked.get("refit_experts", "stacked"))
        self._given = RankTensors.of(sent, owned_pieces(sent, self._at, self._module))
        self._shares = shares_of(self.model)
        limits = RowLimits(architecture.vocabulary, architecture.context)
        PolicyBackend.__init__(
            self,
            checked,
            limits,
            worker=worker,
            device=self._device,
            ranks=self._parallel.ranks,
            data_parallel=self._at.data_parallel
            if worker is not None and worker.world_size > 1
            else None,
        )
        if worker is not None and worker.world_size > 1:
            self.refit_ranks = RefitRanks(self._parallel.messages, address=worker.master_addr)
        self._forward = Forward(
            self.model,
            self._parallel,
            self._vocabulary,
            self._device,
            temperature=checked.get("temperature", 1.0),
            packed=self.microbatching.packed,
        )
        kind = checked.get("reference", "swap")
        # Modules know their ranks, which cannot be copied.
        self._reference = make_reference("memory" if kind == "copy" else kind, self._module)
        self._optimizer: Optimizer | None = None
        if checked.get("resume_from"):
            self.load_checkpoint(checked["resume_from"])

    @property
    def _module(self) -> torch.nn.Module:
        """The model inside what adds up its gradients."""
        module: torch.nn.Module = self.model.module  # type: ignore[assignment]
        return module

    # -- the model ------------------------------------------------------------------------------

    def rows_to_score(self, data: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """See :meth:`PolicyBackend.rows_to_score`: copies that share experts compute together."""
        if self._parallel.sizes.expert == 1:
            return super().rows_to_score(data)
        with self.ranks.all_or_none("checking the rows"):
            return super().rows_to_score(data)

    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        """See :meth:`PolicyModel.forward`; log-probs are on every rank."""
        [scores] = self.forward_all([rows], wanted)
        return scores

    def forward_all(
        self, parts: Sequence[BatchedDataDict[Any]], wanted: LossInputType
    ) -> Iterable[torch.Tensor]:
        """See :meth:`PolicyModel.forward_all`."""
        logits = wanted is LossInputType.LOGIT
        compute = self._forward.logits if logits else self._forward.logprobs
        features = (self._vocabulary.size,) if logits else ()
        found = self._forward.over(
            parts,
            lambda output, laid: (compute(output, laid),),
            lambda laid: (torch.zeros(*laid.sizes, *features, device=self._device),),
        )
        return (scores for [scores] in found)

    def topk(self, rows: BatchedDataDict[Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`PolicyModel.topk`."""
        [found] = self.topk_all([rows], k)
        return found

    def topk_all(
        self, parts: Sequence[BatchedDataDict[Any]], k: int
    ) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """See :meth:`PolicyModel.topk_all`."""

        def empty(laid: Laid) -> Results:
            shape = (laid.sizes[0], max(laid.sizes[1] - 1, 0), k)
            values = torch.zeros(shape, device=self._device)
            return values, torch.zeros(shape, dtype=torch.int64, device=self._device)

        found = self._forward.over(parts, partial(self._forward.topk, k), empty)
        return ((values, indices) for values, indices in found)

    def accumulate(
        self,
        parts: Sequence[BatchedDataDict[Any]],
        share: Callable[[int, torch.Tensor], torch.Tensor],
        wanted: LossInputType,
        *,
        learn: bool,
    ) -> None:
        """See :meth:`PolicyModel.accumulate`."""
        drawn = int(torch.randint(1 << 62, ())) if learn else None
        self._forward.accumulate(parts, share, wanted, learn=learn, dropout=drawn)

    @contextmanager
    def reference(self) -> Generator[None]:
        """See :meth:`PolicyModel.reference`.

        Raises:
            CapabilityError: The policy was built with ``reference="none"``.
        """
        moves = self._reference.moves_weights
        moved = self.changes.declared(lasts=False) if moves else nullcontext()
        with moved, self._reference.using(self._module):
            yield

    def keep_reference(self) -> None:
        """See :meth:`PolicyModel.keep_reference`."""
        self._reference.keep(self._module)

    def gradient_norm(self) -> float:
        """See :meth:`PolicyModel.gradient_norm`; every element of the model counts once."""
        counted = dict.fromkeys(one.name for one in self._owned if one.piece.counts)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        with self.ranks.collectives("the sum of the gradients"):
            with without_cuda():
                finalize_model_grads([self.model])
            for name in counted:
                share: Any = self._shares[name]
                total += share.of(share.parameter.main_grad).double().square().sum()
            dist.all_reduce(total)
            return math.sqrt(float(total))

    def take_step(self, lr: float, scale: float) -> None:
        """See :meth:`PolicyModel.take_step`."""
        for name, master in self._stepping.masters.items():
            share: Any = self._shares[name]
            gradient = share.of(share.parameter.main_grad)
            master.grad = gradient.mul_(scale) if scale != 1 else gradient
        with self.ranks.all_or_none("an optimizer step"):
            self._stepping.step(lr)
        if self._at.sizes.data > 1:
            with self.ranks.collectives("the weights after a step"), without_cuda():
                self.model.start_param_sync()  # type: ignore[operator]

    def clear_gradients(self) -> None:
        """See :meth:`PolicyModel.clear_gradients`."""
        self.model.zero_grad_buffer()  # type: ignore[operator]
        if self._optimizer is not None:
            self._optimizer.clear()

    @property
    def _stepping(self) -> Optimizer:
        """Made when training begins; a policy that only scores needs no moments."""
        if self._optimizer is None:
            self._optimizer = make_optimizer(self._shares, self.config.get("optimizer", {}))
        return self._optimizer

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
            DataError: There is no row, or ``percentile`` or ``margin`` is out of range.
        """
        self.ready("calibrate_qkv_fp8_scales")
        rows = scoring_rows(data, self.limits)
        check_calibration(rows.size, percentile, margin)
        seen = Calibration(include_q=include_q)
        parts = [part for _, part in self.microbatches(rows, micro_batch_size)]
        with self.running(training=False):
            self._forward.observe(parts, seen.observe)
        together = Calibration(include_q=include_q)  # of the heads and layers of all ranks
        for layer in range(self.table.architecture.layers):
            for kind in "qkv" if include_q else "kv":
                counts = torch.zeros(BINS, dtype=torch.int64)
                if self._at.data == 0:  # other copies of the model have seen the same
                    counts += seen.counts.get((layer, kind), 0)
                self.ranks.sum_([counts])
                together.add({(layer, kind): counts})
        return together.scales(percentile, margin)

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.generate`; all ranks call it with all rows.

        Raises:
            ConfigError: The model has no pad token.
            DataError: A row is left-padded, empty, too long or inconsistent with its length.
        """
        self.ready("generate")
        data = self._generation.drawn_alike(data, self.ranks, greedy=greedy)
        with whole_sequences(self._module):
            return self._generation.generate(data, greedy)

    @cached_property
    def _generation(self) -> PolicyGeneration:
        return make_generation(
            self._forward,
            self._module,
            self.table.architecture,
            generation_config(self.config),
            self._device,
            self.tokenizer,
            self,
        )

    # -- what leaves it -------------------------------------------------------------------------

    def write_checkpoint(self, directory: Path) -> None:
        """See :meth:`PolicyModel.write_checkpoint`."""
        with self.ranks.all_or_none("saving the weights"):
            self._export(directory)
            (directory / checkpoint.FOLDER).mkdir(exist_ok=True)
        state = checkpoint.OptimizerState(self._stepping, self._owned, self._shares, self.steps)
        with self.ranks.all_or_none("saving the optimizer"):
            state.save(directory, self.ranks.rank)

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        """See :meth:`PolicyModel.read_checkpoint`."""
        steps = read_json(directory / STATE_FILE)["steps"]
        state = checkpoint.OptimizerState(self._stepping, self._owned, self._shares, steps)
        try:
            files = CheckpointFiles(directory)
            table = files.table(self.table.architecture)
        except ConfigError as error:
            raise CheckpointError(str(error), fix=error.fix, file=str(directory)) from error
        found = state.read(directory)

        def put() -> None:
            load_weights(files, owned_pieces(table, self._at, self._module))
            self._stepping.load_state(found)

        return put

    def export_hf(self, path: str | Path) -> None:
        """Writes the model alone as a Hugging Face checkpoint; all ranks call it with one path."""
        self._check_open("export_hf")
        self.ranks.check_weights(self.changes)
        with self.written_by_all(path) as directory:
            self._export(directory)

    def _export(self, directory: Path) -> None:
        table, sizes = self._published, self._parallel.sizes
        owned = owned_pieces(table, self._at, self._module)
        dtype = owned[0].parameter.dtype
        checkpoint.export(
            directory,
            Gathering(table, sizes, owned, dtype, self._device),
            self._settings,
            self.tokenizer,
            writes=self.ranks.rank == 0,
        )

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyModel.weight_source`; every rank gives what it has."""
        self._check_open("weight_source")
        self.on_wake(frozenset({"model"}))
        return MegatronSource(self._given, self.changes, self._memory_users)

    # -- memory ---------------------------------------------------------------------------------

    def on_wake(self, parts: frozenset[str]) -> None:
        """See :meth:`PolicyModel.on_wake`; host memory is where things sleep."""
        if "model" in parts:
            self._sleepers["model"].wake()
        if "optimizer" in parts:
            self._sleepers["gradients"].wake()
            self._stepping.to(None)

    def on_sleep(self, parts: frozenset[str]) -> None:
        """See :meth:`PolicyModel.on_sleep`; nothing where the host is the device."""
        if self._device.type != "cuda":
            return
        if "optimizer" in parts:
            self._sleepers["gradients"].sleep()
            if self._optimizer is not None:
                self._optimizer.to(torch.device("cpu"))
        if "model" in parts:
            self.weights_moved()
            self._sleepers["model"].sleep()
        torch.cuda.empty_cache()

    @cached_property
    def _sleepers(self) -> dict[str, Sleeper]:
        shares: Any = self._shares.values()
        views = [view for _, _, view in self._given.pieces if view is not None]
        return {
            "model": Sleeper(lambda: [*self._memory_users(), *views]),
            "gradients": Sleeper(lambda: [s.parameter.main_grad for s in shares], keeps=False),
        }

    def _memory_users(self) -> list[torch.Tensor]:
        return memory_users(self.model, self._optimizer)

    def on_shutdown(self) -> None:
        """See :meth:`PolicyModel.on_shutdown`."""
        self._reference.close()
        for name in ("_generation", "_sleepers"):
            self.__dict__.pop(name, None)
        self._optimizer = None
        del self.model, self._forward, self._given, self._owned, self._shares, self._vocabulary
        self._parallel.leave()
