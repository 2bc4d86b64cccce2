"""The reference policy with its weights spread over ranks: each keeps a part of every tensor.

Ranks of one copy of the model have the same rows; copies are data-parallel. A rank has whole
tensors only while it computes. Each rank of a copy computes all of it, or the logits of its part of
the vocabulary.
"""

from __future__ import annotations

import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import torch
import transformers.models.auto.modeling_auto  # noqa: F401 - before workers are forked, not in each
from torch import distributed as dist
from torch import nn

from rl_backends.refit_ranks import RefitRanks
from rl_backends.tensors import module_tensors, tensor_specs
from rl_conformance.reference.config import ReferencePolicyConfig
from rl_conformance.reference.generation import ReferenceGeneration
from rl_conformance.reference.policy import ReferencePolicy
from rl_conformance.reference.stepping import make_optimizer
from rl_conformance.reference.vocabulary import Vocabulary
from rl_core.config import Range
from rl_core.errors import ConfigError
from rl_core.interfaces import DataParallelRank, Piece, WeightSource

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from pathlib import Path

    from rl_backends import Completion, PromptBatch, SamplingParams
    from rl_backends.policy.steps import StepResult
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import TensorSpec, WorkerContext

__all__ = ["ShardedReferenceConfig", "ShardedReferencePolicy", "ShardedSource"]


class ShardedReferenceConfig(ReferencePolicyConfig):
    """A :class:`ReferencePolicyConfig`, and over how many ranks a copy is spread.

    Attributes:
        shard_ranks: Ranks that share one copy of the model. Default 1: each has all of it.
        vocab_parallel: Each of these ranks computes the logits of its part of the vocabulary;
            otherwise each computes everything.
        generation: Sampling keys of a :class:`ReferenceGenerationConfig`, for ``policy.generate``.
    """

    shard_ranks: NotRequired[Annotated[int, Range(ge=1)]]
    vocab_parallel: NotRequired[bool]
    generation: NotRequired[dict[str, Any]]


class Parts(nn.Module):
    """One rank's rows of every parameter of a model, in its order.

    Args:
        model: With whole parameters.
        shard: Which part.
        shards: Of how many.
    """

    def __init__(self, model: nn.Module, shard: int, shards: int) -> None:
        super().__init__()
        self.by_name: dict[str, nn.Parameter] = {}
        for number, (name, whole) in enumerate(model.named_parameters()):
            part = nn.Parameter(whole.detach().tensor_split(shards)[shard].clone())
            self.register_parameter(f"part{number}", part)
            self.by_name[name] = part


class ShardedReferencePolicy(ReferencePolicy):
    """A :class:`ReferencePolicy` with weights and optimizer that are spread over ranks.

    Args:
        model_name: Directory of the checkpoint.
        shard_ranks: Ranks that share one copy of the model.
        vocab_parallel: Whether they share the computation of its output, too.
        generation: Sampling keys for :meth:`generate`.
        **config: See :class:`ReferencePolicy`.

    Attributes:
        shards: Ranks that share one copy here.
        sources: How many weight sources were made on this rank, and how many of them closed.
    """

    def __init__(
        self,
        model_name: str,
        *,
        shard_ranks: int = 1,
        vocab_parallel: bool = False,
        generation: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        self.shards = 1
        self._shard_ranks = shard_ranks
        self._vocab_parallel = vocab_parallel
        self._generation = generation or {}
        self._engine: ReferenceGeneration | None = None
        self.vocabulary: Vocabulary | None = None
        self._optimizer_config = config.get("optimizer") or {}
        self.sources = {"made": 0, "closed": 0}
        self.parts: Parts | None = None
        self._is_whole = False
        super().__init__(model_name, **config)
        self._specs = tensor_specs(module_tensors(self.model))
        if self.worker is not None and self.worker.world_size > 1:
            self.refit_ranks = RefitRanks(dist.group.WORLD, address=self.worker.master_addr)
            self._shard(self.worker.rank % self.shards)
            if self._vocab_parallel:
                self.vocabulary = self.dealt_vocabulary()

    def join(self, worker: WorkerContext) -> DataParallelRank | None:
        """See :meth:`ReferencePolicy.join`; also makes groups of the ranks of a copy, and of rows.

        Raises:
            ConfigError: The ranks make no whole number of copies.
        """
        super().join(worker)
        size, self.shards = worker.world_size, self._shard_ranks
        if size % self.shards:
            raise ConfigError(
                f"{size} ranks are not whole copies of {self.shards} ranks each",
                fix="set shard_ranks to a divisor of the number of ranks",
                key="shard_ranks",
            )
        copies = [list(range(first, first + self.shards)) for first in range(0, size, self.shards)]
        self.copy_group = _own(copies, worker.rank)
        rows = [list(range(shard, size, self.shards)) for shard in range(self.shards)]
        self.row_group = _own(rows, worker.rank)
        self.copies = len(copies)
        mine, part = divmod(worker.rank, self.shards)
        return DataParallelRank(mine, self.copies, part == 0)

    def dealt_vocabulary(self) -> Vocabulary:
        """Which tokens this rank computes the logits of."""
        assert self.worker is not None
        shard = self.worker.rank % self.shards
        return Vocabulary(self.limits.vocab_size, shard, self.shards, self.copy_group)

    # -- the parts --------------------------------------------------------------------------------

    def _shard(self, shard: int) -> None:
        """Keeps this rank's part of the weights and of what the optimizer knows of them."""
        self.parts = Parts(self.model, shard, self.shards)
        whole, self.optimizer = self.optimizer, make_optimizer(self.parts, self._optimizer_config)
        for name, parameter in self.model.named_parameters():
            for key, value in whole.state.get(parameter, {}).items():
                part = value.tensor_split(self.shards)[shard].clone() if value.dim() else value
                self.optimizer.state[self.parts.by_name[name]][key] = part
        self._let_go_of_whole()

    def _let_go_of_whole(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)

    def gathered(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """The whole tensor, of the same rows that a split gives, on all ranks of a copy."""
        shape = next(tuple(spec.shape) for spec in self._specs if spec.name == name)
        rows = -(-shape[0] // self.shards)
        sent = part.new_zeros(rows, *shape[1:])
        sent[: len(part)] = part.detach()
        parts = [torch.empty_like(sent) for _ in range(self.shards)]
        dist.all_gather(parts, sent, group=self.copy_group)
        counts = [len(p) for p in torch.empty(shape[0]).tensor_split(self.shards)]
        return torch.cat([p[:count] for p, count in zip(parts, counts, strict=True)])

    @contextmanager
    def _whole(self) -> Generator[None]:
        """The model with whole tensors, for as long as something is computed."""
        if self.parts is None or self._is_whole:
            yield
            return
        self._is_whole = True
        try:
            for name, parameter in self.model.named_parameters():
                parameter.data = self.gathered(name, self.parts.by_name[name])
            yield
        finally:
            self._is_whole = False
            self._let_go_of_whole()

    # -- what is computed -------------------------------------------------------------------------

    @contextmanager
    def running(self, *, training: bool) -> Generator[None]:
        """See :meth:`PolicyBackend.running`: whatever is computed is computed in it."""
        with self._whole(), super().running(training=training):
            yield

    def outputs(self, model: Any, ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`ReferencePolicy.outputs`; while it scores, on the rank that reports alone."""
        if self.vocabulary is None:
            return super().outputs(model, ids)
        own = self._own_outputs(self.vocabulary, model, ids)
        return self.vocabulary.joined(own, everywhere=torch.is_grad_enabled())

    def _own_outputs(self, vocabulary: Vocabulary, model: Any, ids: torch.Tensor) -> torch.Tensor:
        hidden = model.model(ids, use_cache=False).last_hidden_state
        return vocabulary.own(hidden, model.get_output_embeddings().weight)

    def topk(self, rows: BatchedDataDict[Any], k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See :meth:`PolicyModel.topk`; every rank looks through its own tokens."""
        if self.vocabulary is None:
            return super().topk(rows, k)
        shape = (*rows["input_ids"][:, 1:].shape, k)
        values, tokens = torch.zeros(shape), torch.zeros(shape, dtype=torch.int64)
        for row, length in enumerate(rows["input_lengths"].tolist()):
            ids = rows["input_ids"][row : row + 1, : length - 1]
            if length > 1:
                own = self._own_outputs(self.vocabulary, self.model, ids)[0].float()
                found = self.vocabulary.largest(own / self.temperature, k)
                values[row, : length - 1], tokens[row, : length - 1] = found
        return values, tokens

    def generate(self, data: BatchedDataDict[Any], greedy: bool = False) -> BatchedDataDict[Any]:
        """See :meth:`PolicyInterface.generate`; every rank draws the same tokens."""
        self.ready("generate")
        if self._engine is None:
            seed = self.generation_seed()
            named = {key: v for key, v in self._generation.items() if v is not None}
            self._engine = _OwnGeneration(self, {"seed": seed} | named)
            self._engine.prepare_for_generation()
        with self._whole():
            return self._engine.generate(data, greedy)

    def generation_seed(self) -> int:
        """A fresh one, which is the first rank's on all of them."""
        seed: int = self.ranks.gather(secrets.randbits(62))[0]
        return seed

    def all_outputs(self, ids: torch.Tensor) -> torch.Tensor:
        """The logits of ``[n, length]`` tokens, on every rank."""
        if self.vocabulary is None:
            return super().outputs(self.model, ids)
        own = self._own_outputs(self.vocabulary, self.model, ids)
        return self.vocabulary.joined(own, everywhere=True)

    def _step(self, *args: Any) -> StepResult:
        with self._whole():  # the gradients are those of whole tensors
            return super()._step(*args)

    def calibrate_qkv_fp8_scales(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See :meth:`PolicyInterface.calibrate_qkv_fp8_scales`."""
        with self._whole():
            return super().calibrate_qkv_fp8_scales(*args, **kwargs)

    def summed_over(self, name: str) -> Sequence[Any]:
        """See :meth:`ReferencePolicy.summed_over`: the copies; the ranks of one if they share."""
        among_copies = [self.row_group] if self.copies > 1 else []
        return among_copies + ([self.copy_group] if self.vocabulary is not None else [])

    def take_step(self, lr: float, scale: float) -> None:
        """See :meth:`PolicyModel.take_step`: the gradients are whole, the optimizer's parts."""
        if self.parts is None:
            super().take_step(lr, scale)
            return
        assert self.worker is not None
        shard = self.worker.rank % self.shards
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            part = parameter.grad.tensor_split(self.shards)[shard]
            self.parts.by_name[name].grad = part * scale
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    # -- what leaves it ---------------------------------------------------------------------------

    def write_checkpoint(self, directory: Path) -> None:
        """See :meth:`PolicyModel.write_checkpoint`: the file that one process writes."""
        if self.parts is None:
            super().write_checkpoint(directory)
            return
        parts = self.optimizer
        try:
            with self._whole():
                self.optimizer = make_optimizer(self.model, self._optimizer_config)
                for name, parameter in self.model.named_parameters():
                    for key, value in parts.state.get(self.parts.by_name[name], {}).items():
                        whole = value
                        if value.dim():
                            whole = self.gathered(name, value)
                        self.optimizer.state[parameter][key] = whole
                for given, kept in zip(
                    self.optimizer.param_groups, parts.param_groups, strict=True
                ):
                    given["lr"] = kept["lr"]
                super().write_checkpoint(directory)
        finally:
            self.optimizer = parts

    def read_checkpoint(self, directory: Path) -> Callable[[], None]:
        """See :meth:`PolicyModel.read_checkpoint`; of the whole each rank keeps its part."""
        put = super().read_checkpoint(directory)
        if self.parts is None:
            return put

        def put_part() -> None:
            shapes = {spec.name: spec.shape for spec in self._specs}
            for name, parameter in self.model.named_parameters():
                parameter.data = parameter.data.new_empty(shapes[name])
            self.optimizer = make_optimizer(self.model, self._optimizer_config)
            put()
            assert self.worker is not None
            self._shard(self.worker.rank % self.shards)

        return put_part

    def weight_source(self) -> WeightSource:
        """See :meth:`PolicyBackend.weight_source`."""
        if self.parts is None:
            return super().weight_source()
        return ShardedSource(self)

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """Of whole tensors."""
        return self._specs

    def on_shutdown(self) -> None:
        """See :meth:`PolicyModel.on_shutdown`."""
        if self._engine is not None:
            self._engine.shutdown()
        super().on_shutdown()


class _OwnGeneration(ReferenceGeneration):
    """Generates with a policy's weights.

    Args:
        policy: Whose.
        config: Sampling keys.
    """

    def __init__(self, policy: ShardedReferencePolicy, config: dict[str, Any]) -> None:
        super().__init__(policy.config["model_name"], **config)
        self._policy = policy

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """All rows of a call together, so that every rank takes the same steps."""
        yield from super().complete(prompts, sampling)

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """See :meth:`ReferenceGeneration.logits`."""
        return self._policy.all_outputs(ids)


class ShardedSource(WeightSource):
    """A rank's rows of the tensors of a sharded policy.

    Args:
        policy: Whose.
    """

    def __init__(self, policy: ShardedReferencePolicy) -> None:
        self._policy = policy
        policy.sources["made"] += 1

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return self._policy.specs

    def pieces(self) -> Sequence[Piece]:
        """See :meth:`WeightSource.pieces`; copies of the model have the same ones."""
        policy, found = self._policy, []
        assert policy.parts is not None
        assert policy.worker is not None
        shard, buffers = policy.worker.rank % policy.shards, policy.model.state_dict()
        for spec in self.specs():
            part = policy.parts.by_name.get(spec.name)
            if part is None:  # a buffer, which every rank has
                found.append(Piece.whole(spec.name, buffers[spec.name]))
            elif len(part):
                split = torch.empty(spec.shape[0]).tensor_split(policy.shards)
                first = sum(map(len, split[:shard]))
                others = [(0, size) for size in spec.shape[1:]]
                box = ((first, first + len(part)), *others)
                found.append(Piece(spec.name, box, part.detach()))
        return found

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`; of what is whole here."""
        for piece in self.pieces():
            if piece.name in names and piece.tensor is not None:
                yield piece.name, piece.tensor

    def confirm(self) -> None:
        """Nothing: the policy's changes are declared."""

    def close(self) -> None:
        """See :meth:`WeightSource.close`."""
        self._policy.sources["closed"] += 1


def _own(groups: Sequence[Sequence[int]], rank: int) -> Any:
    """Makes all of the groups, as every rank must; the one that this rank is in."""
    made = [(members, dist.new_group(list(members))) for members in groups]
    return next(group for members, group in made if rank in members)
