"""A policy without tricks: one row per forward pass, AdamW, one file per checkpoint."""

from __future__ import annotations

import copy
import datetime as dt
import math
import os
from collections import defaultdict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_conformance.quiet import no_progress_bars
from rl_conformance.reference.fp8 import E4M3_MAX, observed
from rl_conformance.reference.loading import load_once
from rl_conformance.reference.stepping import make_optimizer, rate_of
from rl_core.backends import PolicyBackend
from rl_core.backends.inputs import as_batch, input_lengths
from rl_core.backends.losses import call_loss, input_type_of
from rl_core.backends.tensors import NamedTensorSource, module_tensors
from rl_core.batch import BatchedDataDict
from rl_core.errors import CheckpointError, DataError, TrainingError
from rl_core.interfaces import LossInputType

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping
    from contextlib import AbstractContextManager

    from rl_core.interfaces import LossFunction, WeightSource, WorkerContext

__all__ = ["ReferencePolicy"]

_STATE_FILE = "training_state.pt"
#: For which a rank waits for the others.
_MEETING = dt.timedelta(minutes=2)


class ReferencePolicy(PolicyBackend):
    """The plainest trainer there is.

    Args:
        model_name: Directory of the checkpoint.
        torch_dtype: Of the weights.
        temperature: Divides the logits.
        optimizer: Of AdamW.
        scheduler: The learning rate by step.
        max_grad_norm: The gradient is scaled down to it.
        train_micro_batch_size: Rows whose losses are computed together.
        train_global_batch_size: Rows per step; all rows if None.
        seed: Of dropout.
        resume_from: A checkpoint to continue from.
        worker: Given when it is one of several.
        **_: How rows are split, which cannot show: every row goes through the model alone.
    """

    def __init__(
        self,
        model_name: str,
        *,
        torch_dtype: str = "float32",
        temperature: float = 1.0,
        optimizer: Mapping[str, Any] | None = None,
        scheduler: Mapping[str, Any] | None = None,
        max_grad_norm: float | None = 1.0,
        train_micro_batch_size: int = 1,
        train_global_batch_size: int | None = None,
        seed: int = 0,
        resume_from: str | None = None,
        worker: WorkerContext | None = None,
        **_: Any,
    ) -> None:
        oracle = load_once(str(model_name))
        self.model: Any = copy.deepcopy(oracle.model).to(getattr(torch, torch_dtype))
        self.tokenizer = oracle.tokenizer
        self.reference_model = copy.deepcopy(self.model)
        self.temperature, self.max_grad_norm = temperature, max_grad_norm or float("inf")
        self.mbs, self.gbs = train_micro_batch_size, train_global_batch_size
        self.steps, self.ranks, self.joined = 0, 1, False
        self.row_group: torch.distributed.ProcessGroup | None = None  # of those with other rows
        self.optimizer = make_optimizer(self.model, optimizer or {})
        self.peak, self.schedule = self.optimizer.param_groups[0]["lr"], dict(scheduler or {})
        self.dropped = torch.Generator().manual_seed(seed).get_state()
        if resume_from is not None:
            self._load(Path(resume_from))
        super().__init__(worker)
        self.config = {"temperature": temperature, **_}
        if worker is not None and worker.world_size > 1:
            self.join(worker)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`PolicyBackend.from_config`."""
        return cls(
            worker=worker, **{key: value for key, value in config.items() if key != "backend"}
        )

    def join(self, worker: WorkerContext) -> None:
        """Makes it one of several data-parallel ranks, which meet at the first one's address."""
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{worker.master_addr}:{worker.master_port}",
            rank=worker.rank,
            world_size=worker.world_size,
            timeout=_MEETING,
        )
        self.ranks, self.joined = worker.world_size, True

    def _summed(self, values: torch.Tensor) -> torch.Tensor:
        """Over all data-parallel ranks, in place."""
        if self.ranks > 1:
            torch.distributed.all_reduce(values, group=self.row_group)
        return values

    # -- scoring ---------------------------------------------------------------------------------

    def get_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_logprobs`."""
        with torch.no_grad():
            return BatchedDataDict({"logprobs": self._score(self.model, data)})

    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[Any], micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_reference_policy_logprobs`."""
        with torch.no_grad():
            return BatchedDataDict({"reference_logprobs": self._score(self.reference_model, data)})

    def get_topk_logits(
        self, data: BatchedDataDict[Any], k: int, micro_batch_size: int | None = None
    ) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.get_topk_logits`."""
        with torch.no_grad():
            top = self._logits(self.model, data)[:, :-1].topk(k)
        return BatchedDataDict({"topk_logits": top.values, "topk_indices": top.indices})

    def calibrate_qkv_fp8_scales(
        self,
        data: BatchedDataDict[Any],
        micro_batch_size: int | None = None,
        percentile: float = 99.9,
        margin: float = 1.05,
        include_q: bool = False,
    ) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        with torch.no_grad(), observed(self.model, "qkv" if include_q else "kv") as seen:
            self._logits(self.model, data)
        layers: dict[str, dict[str, float]] = defaultdict(dict)
        for (layer, kind), values in seen.items():
            magnitudes = torch.cat(values).sort().values
            rank = max(1, math.ceil(len(magnitudes) * percentile / 100))
            largest = float(magnitudes[rank - 1])
            layers[f"layer_{layer}"][f"{kind}_scale"] = largest * margin / E4M3_MAX
        return {"format": "e4m3", "layers": dict(layers)}

    def _score(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        data = as_batch(data, needed_by="the policy")
        ids, lengths = data["input_ids"], input_lengths(data)
        scores = self._logits(model, data).log_softmax(-1)[:, :-1]
        chosen = scores.gather(2, ids[:, 1:, None])[..., 0]
        real = torch.arange(1, ids.shape[1]) < lengths[:, None]
        return torch.cat([torch.zeros(len(ids), 1), chosen * real], 1)

    def _logits(self, model: Any, data: BatchedDataDict[Any]) -> torch.Tensor:
        """``[B, S, V]`` float32 with the temperature; 0 on padding."""
        rows = []
        width = data["input_ids"].shape[1]
        for row, length in zip(data["input_ids"], input_lengths(data).tolist(), strict=True):
            logits = model(row[None, :length], use_cache=False).logits[0].float()
            rows.append(torch.nn.functional.pad(logits, (0, 0, 0, width - length)))
        return torch.stack(rows) / self.temperature

    # -- training --------------------------------------------------------------------------------

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
        rows = (gbs or self.gbs or data.size * self.ranks) // self.ranks
        if data.size % rows or not data.size:
            raise DataError(f"{data.size} rows are no multiple of {rows}", fix="fill them up")
        steps = []
        for start in range(0, data.size, rows):
            batch = data.slice(start, start + rows)
            steps.append(self._step(batch, loss_fn, eval_mode, mbs or self.mbs))
        history = {key: [step[key] for step in steps] for key in steps[-1]}
        return {**steps[-1], "all_mb_metrics": history}

    def _step(
        self, batch: BatchedDataDict[Any], loss_fn: LossFunction, eval_mode: bool, mbs: int
    ) -> dict[str, Any]:
        weights = batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]
        counts = {
            "global_valid_seqs": self._summed(batch["sample_mask"].sum()),
            "global_valid_toks": self._summed(weights.sum()),
        }
        self.optimizer.zero_grad()
        total, metrics = 0.0, dict[str, float]()
        group = getattr(loss_fn, "group_size", 1)
        with self._eval_mode() if eval_mode else self._train_mode():
            for part in self._parts(batch, max(1, mbs // group) * group):
                loss, shares = call_loss(loss_fn, self._inputs(part, loss_fn), part, **counts)
                if loss.requires_grad:
                    loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
                for key, value in shares.items():
                    metrics[key] = _added(key, metrics[key], value) if key in metrics else value
        sums = self._summed(torch.tensor([total, *metrics.values()], dtype=torch.float64)).tolist()
        if not math.isfinite(sums[0]):
            self.optimizer.zero_grad()
            raise TrainingError("the loss is not finite", fix="look at the batch")
        rate = rate_of(self.steps, self.peak, self.schedule)
        counted = all(float(value) for value in counts.values())
        norm = 0.0 if eval_mode or not counted else self._update()
        return {
            **dict(zip(metrics, sums[1:], strict=True)),
            "loss": sums[0],
            "grad_norm": norm,
            "lr": rate,
            **{key: float(value) for key, value in counts.items()},
        }

    @contextmanager
    def _train_mode(self) -> Generator[None]:
        """With dropout, which draws from numbers of the policy's own."""
        self.model.train()
        try:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(self.dropped)
                yield
                self.dropped = torch.get_rng_state()
        finally:
            self.model.eval()

    def _eval_mode(self) -> AbstractContextManager[Any]:
        return torch.no_grad()

    def _parts(self, batch: BatchedDataDict[Any], size: int) -> Iterator[BatchedDataDict[Any]]:
        for start in range(0, batch.size, size):
            yield batch.slice(start, min(start + size, batch.size))

    def _inputs(self, part: BatchedDataDict[Any], loss_fn: LossFunction) -> torch.Tensor:
        if input_type_of(loss_fn) is LossInputType.LOGIT:
            return self._logits(self.model, part)
        return self._score(self.model, part)

    def _update(self) -> float:
        for parameter in self.model.parameters() if self.ranks > 1 else ():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self._summed(parameter.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        if not torch.isfinite(norm):
            self.optimizer.zero_grad()
            raise TrainingError("the gradient is not finite", fix="look at the batch")
        for group in self.optimizer.param_groups:
            group["lr"] = rate_of(self.steps, self.peak, self.schedule)
        with self.changes.declared():
            self._step_optimizer()
        self.steps += 1
        return float(norm)

    def _step_optimizer(self) -> None:
        self.optimizer.step()

    # -- the rest --------------------------------------------------------------------------------

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """See :meth:`PolicyInterface.save_checkpoint`; the training state is renamed in last."""
        path = Path(args[0] if args else kwargs["path"])
        if self.worker is None or self.worker.rank == 0:
            self._write(path)
        if self.joined:
            torch.distributed.barrier()  # the first rank has written

    def _write(self, path: Path) -> None:
        with no_progress_bars():
            self.model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.dropped,
            "steps": self.steps,
        }
        torch.save(state, path / "partial")
        os.replace(path / "partial", path / _STATE_FILE)

    def _load(self, path: Path) -> None:
        try:
            state = torch.load(path / _STATE_FILE, weights_only=True)
        except (OSError, RuntimeError) as error:
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.dropped, self.steps = state["rng"], state["steps"]

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyBackend.weight_source`."""
        return NamedTensorSource(module_tensors(self.model))

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to bring anywhere."""

    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to let go of."""

    def prepare_for_lp_inference(self) -> None:
        """Nothing to bring anywhere."""

    def shutdown(self) -> bool:
        """See :meth:`PolicyInterface.shutdown`."""
        self.close_refits()
        if self.joined:
            self.joined = False
            torch.distributed.destroy_process_group()
        return True


def _added(key: str, total: float, value: float) -> float:
    """Metrics are shares, but for the extremes."""
    if key.endswith(("_min", "_max")):
        return min(total, value) if key.endswith("_min") else max(total, value)
    return total + value
