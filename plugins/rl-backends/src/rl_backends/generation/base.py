"""The base class of generation backends: an author writes five small methods."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from rl_backends.description import described, not_copied
from rl_backends.generation.batch_engine import BatchEngine
from rl_backends.generation.prompts import (
    PromptBatch,
    RowStreams,
    assemble_output,
    assemble_row,
    greedy_params,
    provenance_of,
    repeat_for_samples,
)
from rl_backends.generation.row_stream import RowStream
from rl_backends.generation.rows import Completion, ModelFacts, SamplingParams
from rl_backends.generation.serving import CallDeadline, Mailbox, RowService, ServedCall
from rl_backends.inputs import TAGS, as_batch, check_greedy, tags_of
from rl_backends.spellings import TakesWeights
from rl_core.errors import ConfigError, LifecycleError
from rl_core.interfaces import GenerationInterface
from rl_core.plugins.discovery import load_object
from rl_core.weights import DEFAULT_DEADLINE_S, RefitReceiver
from rl_core.weights.engine_lock import EngineLock, exclusively

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

    from rl_backends.generation.rows import RowEngine
    from rl_backends.spellings import Receiver
    from rl_core.batch import BatchedDataDict
    from rl_core.batch.provenance import Provenance
    from rl_core.interfaces import GenerationOutputSpec, WeightSink, WorkerContext

__all__ = ["GenerationBackend"]


class GenerationBackend(TakesWeights, GenerationInterface):
    """Turns an engine into a :class:`GenerationInterface`.

    A subclass loads its engine, calls ``super().__init__`` and implements :meth:`complete` (or
    :meth:`row_engine`), :meth:`weight_sink`, :meth:`on_wake`, :meth:`on_sleep` and
    :meth:`on_shutdown`. Input checks, output layout, many calls at once, lifecycle, versions and
    every refit method are here.

    Args:
        config: The checked configuration.
        facts: Limits of the loaded model.
    """

    #: Tags of the memory that is taken before the first ``prepare_for_generation``.
    initially_resident: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], facts: ModelFacts) -> None:
        self.cfg = self.config = dict(config)
        limit = config.get("max_model_len") or facts.max_model_len
        if limit > facts.max_model_len:
            raise ConfigError(
                f"max_model_len {limit} is above the model's context of {facts.max_model_len}",
                fix=f"set max_model_len to {facts.max_model_len} or less",
                key="max_model_len",
            )
        pad = config.get("pad_token_id")
        self.facts = ModelFacts(
            pad_token_id=facts.pad_token_id if pad is None else pad,
            eos_token_ids=facts.eos_token_ids,
            vocab_size=facts.vocab_size,
            max_model_len=limit,
        )
        self.sampling = SamplingParams.from_config(config, self.facts)
        self._awake: frozenset[str] = frozenset()  # by the user's calls: generate needs all
        self._resident = self.initially_resident  # what has memory, by the user's calls or not
        self._closed = self._ended = False
        self._streams = RowStreams()
        self._lock = EngineLock()
        self._service: RowService | None = None
        self._service_made = threading.Lock()
        self._mailbox: Mailbox | None = None  # of the event loop that streamed last
        self._receiver = self.make_receiver(self._lock)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """Builds the backend from its checked configuration.

        Args:
            config: Of the form of its TypedDict, ``backend`` included.
            worker: Given when it is one of several workers; replicas are independent.
        """
        del worker
        return cls(**{key: value for key, value in config.items() if key != "backend"})

    def __repr__(self) -> str:
        state = "shut down" if self._closed else "awake" if self._awake else "asleep"
        return described(self, self.config, self.placement, state)

    def __reduce__(self) -> tuple[Any, ...]:
        raise not_copied(self, "create_generation")

    @property
    def placement(self) -> str:
        """Dtype and device of the weights, as far as the configuration tells, for ``repr``."""
        return ", ".join(str(self.config[k]) for k in ("torch_dtype", "device") if k in self.config)

    # -- what an author writes -----------------------------------------------------------------

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """Generates, yielding each row as it finishes. One batch after the other is completed.

        Args:
            prompts: At least one row, every row with a budget of at least 1. They may be of
                several calls.
            sampling: The same for all rows; seeds, budgets and stop strings are per row.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither complete nor row_engine")

    def row_engine(self) -> RowEngine:
        """What decodes the rows of all calls; called once, when the first call comes.

        By default :meth:`complete` does, batch by batch, so that a call waits for the batch before
        it. An engine that takes rows at any time has its own, and the manifest declares
        ``concurrent_calls``.
        """
        return BatchEngine(
            self.complete, pad_token_id=self.facts.pad_token_id, name=type(self).__name__
        )

    @abstractmethod
    def weight_sink(self) -> WeightSink:
        """Where a refit writes; called once for each refit."""

    def make_receiver(self, lock: EngineLock) -> Receiver:
        """What takes refits: a receiver in this process, unless the weights are in another.

        Args:
            lock: Held while the engine generates, and by a refit while it writes.
        """
        return RefitReceiver(
            self.weight_sink, name=type(self).__name__, lock=lock, on_commit=self._on_commit
        )

    @abstractmethod
    def on_wake(self, tags: frozenset[str]) -> None:
        """Takes the memory behind ``tags`` (``"weights"``, ``"kv_cache"``) that is asleep."""

    @abstractmethod
    def on_sleep(self, tags: frozenset[str]) -> None:
        """Frees the memory behind ``tags``, as far as the manifest declares ``sleep``."""

    @abstractmethod
    def on_shutdown(self) -> None:
        """Ends the engine; called once."""

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationInterface.generate`."""
        call = self._accept(data, greedy, "generate")
        completions: list[Completion] = []
        ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def deliver(item: Completion | BaseException | None) -> None:
            # The caller is woken once, at the end: each time takes the interpreter from the engine.
            if isinstance(item, Completion):
                completions.append(item)
            else:
                ended.put(item)

        served = ServedCall("generate", call.prompts, call.sampling, deliver)
        service, deadline = self._serving("generate"), self._deadline()
        service.submit(served)
        try:
            if (error := ended.get(timeout=deadline.left())) is not None:
                raise error
        except queue.Empty:
            raise deadline.passed(service.progress(served)) from None
        finally:
            service.cancel(served)
        output = assemble_output(
            call.data,
            call.prompts,
            completions,
            pad_token_id=self.facts.pad_token_id,
            weights=served.weights,
        )
        output.provenance = call.provenance
        return output

    def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationInterface.generate_async`.

        Prompts are checked, and take their random streams, when it is called; rows come when it is
        iterated over.
        """
        return RowStream(self._stream(self._accept(data, greedy, "generate_async")))

    async def _stream(
        self, call: _Call
    ) -> AsyncGenerator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        mailbox, inbox = self._mailbox, asyncio.Queue[Any]()
        if mailbox is None or mailbox.loop is not asyncio.get_running_loop():
            mailbox = self._mailbox = Mailbox(asyncio.get_running_loop())
        served = ServedCall(
            "generate_async", call.prompts, call.sampling, partial(mailbox.post, inbox)
        )
        service, deadline = self._serving("generate_async"), self._deadline()
        service.submit(served)
        try:
            while True:
                try:
                    if not inbox.empty():
                        item = inbox.get_nowait()
                    elif (left := deadline.left()) is None:
                        item = await inbox.get()
                    else:
                        async with asyncio.timeout(left):
                            item = await inbox.get()
                except TimeoutError:
                    # Rows that are done are not late, however slow their reader is: what was put
                    # while it held the event loop arrives together with the timeout.
                    if inbox.empty():
                        raise deadline.passed(service.progress(served)) from None
                    continue
                if item is None:
                    break
                if isinstance(item, BaseException):
                    raise item
                yield item.row, self._one_row(call, item, served.weights)
            for row in served.roomless:
                yield row, self._one_row(call, Completion(row, (), (), True), served.weights)
        finally:
            service.cancel(served)

    def _one_row(
        self, call: _Call, done: Completion, weights: tuple[int, int]
    ) -> BatchedDataDict[GenerationOutputSpec]:
        output = assemble_row(call.data, call.prompts, done, weights=weights)
        output.provenance = call.provenance
        return output

    def _accept(self, data: BatchedDataDict[Any], greedy: bool, method: str) -> _Call:
        """Checks a call; rows count in the order in which calls begin, refused or not."""
        check_greedy(greedy)
        sampling = greedy_params(self.sampling) if greedy or self.sampling.greedy else self.sampling
        data = repeat_for_samples(as_batch(data, needed_by=method), sampling.num_generations)
        first = self._streams.first_of(data, sampling)
        self._check_awake(method)
        prompts = PromptBatch.from_data(
            data,
            sampling,
            self.facts,
            self.config.get("stop_strings") or (),
            first_stream=first,
        )
        return _Call(data, prompts, sampling, provenance_of(sampling))

    def _serving(self, method: str) -> RowService:
        """What serves all calls."""
        with self._service_made:
            self._check_open(method)
            if self._service is None:
                self._service = RowService(
                    self.row_engine(),
                    self._lock,
                    name=type(self).__name__,
                    check=self._check_serves,
                    weights=lambda: (self.weights_version, self.weights_origin),
                )
            return self._service

    def _check_serves(self, method: str) -> None:
        self._check_awake(method)
        self._receiver.check()

    def _deadline(self) -> CallDeadline:
        return CallDeadline(self.config.get("call_deadline_s"), type(self).__name__)

    def _check_awake(self, method: str) -> None:
        self._check_open(method)
        if asleep := sorted(TAGS - self._awake):
            raise LifecycleError(
                f"{type(self).__name__}.{method} was called while {' and '.join(asleep)} "
                f"{'are' if 'weights' in asleep else 'is'} asleep",
                fix="call prepare_for_generation first",
            )

    # -- lifecycle ------------------------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.prepare_for_generation`."""
        tags = tags_of(args, kwargs)
        with self._lock:
            self._check_open("prepare_for_generation")
            self.wake(tags)
            self._awake |= tags
        return True

    def wake(self, tags: frozenset[str]) -> None:
        """Takes the memory behind ``tags`` where it is asleep; the caller may still not generate.

        For a subclass that needs memory outside a call of its user, such as a refit's weights.
        """
        if asleep := tags - self._resident:
            self.on_wake(asleep)
            self._resident |= asleep

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.finish_generation`."""
        tags = tags_of(args, kwargs, also=("release_gpu",))
        # An engine that shares its devices with nobody keeps them, unless the caller releases them.
        alone = (self.config.get("colocated") or {}).get("enabled") is False
        release = kwargs.get("release_gpu", not alone or bool(args) or "tags" in kwargs)
        with self._lock:
            self._check_open("finish_generation")
            if not release:
                return True
            tags = self.tags_that_sleep_with(tags)
            if resident := tags & self._resident:
                self._receiver.release_weights()
                self.on_sleep(resident)
                self._resident -= resident
            self._awake -= tags
        return True

    def tags_that_sleep_with(self, tags: frozenset[str]) -> frozenset[str]:
        """What goes to sleep when ``tags`` are to: these, unless an engine cannot divide them.

        Raises:
            CapabilityError: It can neither put these to sleep alone, nor is more meant.
        """
        return tags

    def shutdown(self) -> bool:
        """See :meth:`GenerationInterface.shutdown`."""
        self._closed = True
        self._receiver.close()
        with exclusively(self._lock, DEFAULT_DEADLINE_S, f"{type(self).__name__}.generate"):
            if not self._ended:
                self._ended = True
                with self._service_made:
                    self._service = None
                self.on_shutdown()
        return True

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise LifecycleError(
                f"{type(self).__name__}.{method} was called after shutdown",
                fix="build a new backend",
            )

    def invalidate_kv_cache(self) -> bool:
        """Nothing outlives a call unless a backend overrides this."""
        return True

    def call_in_workers(self, function: str, **arguments: Any) -> list[Any]:
        """Calls a function in every process that refits write in, to look or to test.

        Args:
            function: ``"module:name"``, importable there. Its first argument makes the sink of a
                refit.
            **arguments: Plain values.

        Returns:
            What each call returned: plain values.
        """
        return [load_object(function)(self.weight_sink, **arguments)]

    def _on_commit(self, version: int) -> None:
        self.invalidate_kv_cache()


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, as it was accepted: the rows to complete, and how."""

    data: BatchedDataDict[Any]
    prompts: PromptBatch
    sampling: SamplingParams
    provenance: Provenance
