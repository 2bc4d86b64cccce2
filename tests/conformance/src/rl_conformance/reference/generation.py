"""Generation without a cache: every token is a forward pass over its whole prefix."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import torch

from rl_backends import Completion, GenerationBackend, ModelFacts, Row, RowEngine
from rl_backends.generation.serving import ServedCall
from rl_backends.tensors import NamedTensorSink
from rl_conformance.oracle import penalised, truncated_distribution
from rl_conformance.reference.adapters import ReferenceAdapters
from rl_conformance.reference.fp8 import rounded
from rl_conformance.reference.loading import load_once

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping, Sequence

    from rl_backends import PromptBatch, SamplingParams
    from rl_core.interfaces import WeightSink

__all__ = ["ReferenceGeneration", "ReferenceRows", "ScaledSink"]


class ScaledSink(NamedTensorSink):
    """Takes the scales of the key/value cache, too.

    Args:
        tensors: See :class:`NamedTensorSink`.
        scales: Where they are put.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], scales: dict[str, float]) -> None:
        super().__init__(tensors)
        self.scales = scales

    def scale_kv(self, scales: Mapping[str, float]) -> None:
        """See :meth:`WeightSink.scale_kv`."""
        self.scales.update(scales)


class ReferenceGeneration(GenerationBackend):
    """The slowest engine there is.

    Args:
        model_name: Directory of the checkpoint.
        torch_dtype: Of the weights.
        device: Of the weights.
        kv_cache_dtype: ``"fp8"`` rounds keys and values as such a cache would.
        lora: The rank ``r`` of adapters; a refit then sends only these.
        **config: See :class:`rl_core.interfaces.GenerationConfig`.
    """

    #: Of the engines that serve them.
    adapters_class = ReferenceAdapters

    def __init__(
        self,
        model_name: str,
        torch_dtype: str = "float32",
        device: str = "cpu",
        kv_cache_dtype: str = "auto",
        lora: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:
        oracle = load_once(str(model_name))
        self.model = copy.deepcopy(oracle.model).to(device, getattr(torch, torch_dtype))
        self.kv_scales: dict[str, float] | None = None
        if kv_cache_dtype == "fp8":
            self.kv_scales = {}
            rounded(self.model, self.kv_scales)
        self.adapters = self.adapters_class(self.model, lora.get("r", 16)) if lora else None
        self.tokenizer = oracle.tokenizer
        self.boundary = oracle.boundary
        facts = ModelFacts(
            pad_token_id=oracle.pad_token_id,
            eos_token_ids=oracle.eos_token_ids,
            vocab_size=oracle.vocab_size,
            max_model_len=oracle.context,
        )
        super().__init__({"model_name": model_name, **config}, facts)

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        if type(self).complete is not ReferenceGeneration.complete:
            return super().row_engine()  # a subclass has its own
        return ReferenceRows(self)

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """The rows of one call, for subclasses that change something about it."""
        call, engine = ServedCall("complete", prompts, sampling, print), ReferenceRows(self)
        engine.submit([call.next_row(key) for key in range(len(prompts))])
        while engine.rows:
            yield from engine.collect()

    def next_logits(self, prefixes: set[tuple[int, ...]]) -> dict[tuple[int, ...], torch.Tensor]:
        """``[V]`` float64 logits after each prefix; prefixes of one length go together."""
        found: dict[tuple[int, ...], torch.Tensor] = {}
        for length in sorted({len(ids) for ids in prefixes}):
            group = sorted(ids for ids in prefixes if len(ids) == length)
            with torch.no_grad():
                logits = self.logits(torch.tensor(group))[:, -1]
            found |= dict(zip(group, logits.double(), strict=True))
        return found

    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        """``[n, length, V]`` of tokens without padding."""
        logits: torch.Tensor = self.model(ids.to(self.model.device), use_cache=False).logits
        return logits.cpu()

    def step(self, row: _Row, logits: torch.Tensor, sampling: SamplingParams) -> None:
        """Appends one token to a row, and ends it where it must end."""
        token, logprob = self.choose(logits, sampling, row.generator, row.ids)
        row.ids.append(token)
        row.logprobs.append(logprob)
        stopped = token in sampling.stop_token_ids or self.matches(row.new, row.stop_strings)
        if stopped or len(row.new) == row.budget:
            row.done = Completion(row.index, row.new, row.logprobs, not stopped)

    def choose(
        self,
        logits: torch.Tensor,
        sampling: SamplingParams,
        generator: torch.Generator,
        seen: list[int],
    ) -> tuple[int, float]:
        """The next token after those that were seen, and its log-prob."""
        raw = logits.log_softmax(-1)
        if raw.isnan().any():
            return 0, math.nan  # which fails the row
        scores = penalised(logits, seen, sampling.repetition_penalty)
        if sampling.greedy:
            token = int(scores.argmax())
            return token, float(raw[token])
        distribution = truncated_distribution(
            scores / sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p
        )
        token = int(distribution.multinomial(1, generator=generator))
        processed = sampling.logprobs_mode == "processed"
        return token, float(distribution[token].log() if processed else raw[token])

    def matches(self, ids: Sequence[int], stop_strings: Sequence[str]) -> bool:
        """Whether the text of the generated tokens has one of the strings in it."""
        text = self.tokenizer.decode(ids) if stop_strings else ""
        return any(string in text for string in stop_strings)

    def weight_sink(self) -> WeightSink:
        """See :meth:`GenerationBackend.weight_sink`."""
        if self.adapters is not None:
            return self.adapters
        tensors = self.model.state_dict(keep_vars=True)
        return (
            NamedTensorSink(tensors)
            if self.kv_scales is None
            else ScaledSink(tensors, self.kv_scales)
        )

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return self.kv_scales is not None

    def on_wake(self, tags: frozenset[str]) -> None:
        """Nothing sleeps."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        """Nothing is released."""

    def on_shutdown(self) -> None:
        """Lets go of the model."""
        del self.model


class ReferenceRows(RowEngine):
    """All rows advance by one token in turn.

    Args:
        backend: Decodes.
    """

    def __init__(self, backend: ReferenceGeneration) -> None:
        self._backend = backend
        self.rows: dict[int, _Row] = {}

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        self.rows |= {row.key: _Row(row, self._backend.boundary) for row in rows}

    def collect(self) -> list[Completion]:
        """See :meth:`RowEngine.collect`."""
        unfinished = [row for row in self.rows.values() if row.done is None]
        logits = self._backend.next_logits({tuple(row.ids) for row in unfinished})
        for row in unfinished:
            self._backend.step(row, logits[tuple(row.ids)], row.sampling)
        done = [row.done for row in self.rows.values() if row.done is not None]
        self.cancel([completion.row for completion in done])
        return done

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`."""
        for key in keys:
            self.rows.pop(key, None)


class _Row:
    """A row that is not complete."""

    def __init__(self, row: Row, boundary: int) -> None:
        self.index = row.key
        self.call = row.call
        self.sampling = row.sampling
        self.prompt_length = len(row.token_ids)
        self.ids = list(row.token_ids)
        self.logprobs: list[float] = []
        left = boundary - self.prompt_length
        self.budget = row.budget if left < 0 else min(row.budget, left)
        self.stop_strings = row.stop_strings
        self.generator = torch.Generator().manual_seed(row.seed)
        self.done = None if self.budget else Completion(row.key, [], [], True)

    @property
    def new(self) -> list[int]:
        """What was generated."""
        return self.ids[self.prompt_length :]
