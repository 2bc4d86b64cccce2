"""A policy without tricks: one row per forward pass, AdamW, one file of training state."""

from __future__ import annotations

import copy
import datetime as dt
import math
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from rl_backends import PolicyBackend, RowLimits
from rl_backends.inputs import input_lengths
from rl_backends.policy.ranks import RankGroup
from rl_backends.tensors import NamedTensorSource, module_tensors
from rl_conformance.quiet import no_progress_bars
from rl_conformance.reference.fp8 import E4M3_MAX, observed
from rl_conformance.reference.loading import load_once
from rl_conformance.reference.stepping import make_optimizer
from rl_core.errors import CapabilityError, CheckpointError, DataError
from rl_core.interfaces import LossInputType

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import DataParallelRank, WeightSource, WorkerContext

__all__ = ["ReferencePolicy"]

_STATE_FILE = "rl_training/state.pt"
#: For which a rank waits for the others.
_MEETING = dt.timedelta(minutes=2)


class ReferencePolicy(PolicyBackend):
    """The plainest trainer there is.

    Args:
        model_name: Directory of the checkpoint.
        torch_dtype: Of the weights.
        device: Of the weights.
        worker: Given when it is one of several.
        **config: The other keys of :class:`~rl_conformance.reference.config.ReferencePolicyConfig`.
            However rows are split, every row goes through the model alone.
    """

    def __init__(
        self,
        model_name: str,
        *,
        torch_dtype: str = "float32",
        device: str = "cpu",
        worker: WorkerContext | None = None,
        **config: Any,
    ) -> None:
        oracle = load_once(str(model_name))
        self.model: Any = copy.deepcopy(oracle.model).to(device, getattr(torch, torch_dtype))
        self.tokenizer = oracle.tokenizer
        self.reference_model = copy.deepcopy(self.model)
        if config.get("gradient_checkpointing"):
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.scored = self.model  # what forward passes go through
        self.temperature: float = config.get("temperature", 1.0)
        self.optimizer = make_optimizer(self.model, config.get("optimizer") or {})
        several = worker is not None and worker.world_size > 1
        shared = self.join(worker) if worker is not None and several else None
        super().__init__(
            {"model_name": model_name, **config},
            RowLimits(oracle.vocab_size, oracle.context),
            worker=worker,
            ranks=RankGroup.of(torch.distributed.group.WORLD) if several else None,  # type: ignore[arg-type]
            data_parallel=shared,
        )
        if config.get("resume_from") is not None:
            self.load_checkpoint(config["resume_from"])

    def join(self, worker: WorkerContext) -> DataParallelRank | None:
        """Meets the other ranks at the first one's address.

        Returns:
            Which rows this one gets, unless each has rows of its own.
        """
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{worker.master_addr}:{worker.master_port}",
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=_MEETING,
        )
        return None

    # -- scoring ---------------------------------------------------------------------------------

    def forward(self, rows: BatchedDataDict[Any], wanted: LossInputType) -> torch.Tensor:
        """See :meth:`PolicyModel.forward`."""
        if wanted is LossInputType.LOGIT:
            return self._logits(self.scored, rows)
        return self._score(self.scored, rows)

    def topk(self, rows: BatchedDataDict[Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`PolicyModel.topk`."""
        logits = self._logits(self.model, rows)[:, :-1]
        predicts = torch.arange(logits.shape[1]) < rows["input_lengths"][:, None] - 1
        values, indices = logits.topk(k)
        return values * predicts[..., None], indices * predicts[..., None]

    @contextmanager
    def reference(self) -> Generator[None]:
        """See :meth:`PolicyModel.reference`."""
        if self.config.get("reference") == "none":
            raise CapabilityError(
                "the policy was built with reference='none'", fix="build it with reference='copy'"
            )
        self.scored = self.reference_model
        try:
            yield
        finally:
            self.scored = self.model

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        if not (0 < percentile <= 100 and margin > 0):
            raise DataError(
                f"percentile must be above 0 and at most 100, margin above 0; got {percentile} and "
                f"{margin}",
                fix="use a percentile such as 99.9 and a margin such as 1.05",
            )
        with torch.no_grad(), observed(self.model, "qkv" if include_q else "kv") as seen:
            self._logits(self.model, data)
        layers: dict[str, dict[str, float]] = defaultdict(dict)
        for (layer, kind), values in seen.items():
            magnitudes = torch.cat(values).sort().values
            rank = max(1, math.ceil(len(magnitudes) * percentile / 100))
            largest = float(magnitudes[rank - 1])
            layers[f"layer_{layer}"][f"{kind}_scale"] = largest * margin / E4M3_MAX
        return {"format": "e4m3", "layers": dict(layers)}

    def _score(self, model: Any, rows: BatchedDataDict[Any]) -> torch.Tensor:
        """``[b, s]`` float32 log-probs; 0 at the first token and on padding."""
        ids, lengths = rows["input_ids"], rows["input_lengths"]
        scores = self._logits(model, rows).log_softmax(-1)[:, :-1]
        real = torch.arange(1, ids.shape[1]) < lengths[:, None]
        chosen = scores.gather(2, torch.where(real, ids[:, 1:], 0)[..., None])[..., 0]
        return torch.cat([torch.zeros(len(ids), 1), chosen * real], 1)

    def _logits(self, model: Any, rows: BatchedDataDict[Any]) -> torch.Tensor:
        """``[b, s, V]`` float32 with the temperature; 0 on padding."""
        each = []
        width = rows["input_ids"].shape[1]
        for row, length in zip(rows["input_ids"], input_lengths(rows).tolist(), strict=True):
            logits = self.outputs(model, row[None, :length])[0].float()
            each.append(torch.nn.functional.pad(logits, (0, 0, 0, width - length)))
        return torch.stack(each) / self.temperature

    def outputs(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """The model's logits of ``[n, length]`` tokens without padding."""
        logits: torch.Tensor = model(ids.to(model.device), use_cache=False).logits
        return logits.cpu()

    # -- training --------------------------------------------------------------------------------

    def gradient_norm(self) -> float:
        """See :meth:`PolicyModel.gradient_norm`."""
        for name, parameter in self.model.named_parameters() if self.ranks.size > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            for group in self.summed_over(name):
                torch.distributed.all_reduce(parameter.grad, group=group)
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def summed_over(self, name: str) -> Sequence[Any]:
        """The groups of ranks that have shares of the gradient of a parameter; None is all."""
        return [None]

    def take_step(self, lr: float, scale: float) -> None:
        """See :meth:`PolicyModel.take_step`."""
        for parameter in self.model.parameters():
            if parameter.grad is not None and scale != 1:
                parameter.grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def clear_gradients(self) -> None:
        """See :meth:`PolicyModel.clear_gradients`."""
        self.model.zero_grad()

    # -- the rest --------------------------------------------------------------------------------

    def write_checkpoint(self, directory: Path) -> None:
        """See :meth:`PolicyModel.write_checkpoint`; the first rank writes."""
        if self.ranks.rank:
            return
        with no_progress_bars():
            self.model.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, directory / _STATE_FILE)

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        """See :meth:`PolicyModel.read_checkpoint`."""
        try:
            state = torch.load(directory / _STATE_FILE, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{directory} is not a whole checkpoint: {error}") from error

        def put() -> None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])

        return put

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyModel.weight_source`."""
        return NamedTensorSource(module_tensors(self.model))

    def on_shutdown(self) -> None:
        """See :meth:`PolicyModel.on_shutdown`."""
        if self.ranks.size > 1:
            torch.distributed.destroy_process_group()
