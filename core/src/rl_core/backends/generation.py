"""The base class of generation backends: an author writes five small methods."""

from __future__ import annotations

import asyncio
import threading
from abc import abstractmethod
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_core.backends.prompts import (
    Completion,
    ModelFacts,
    PromptBatch,
    SamplingParams,
    assemble_output,
    greedy_params,
    repeated,
)
from rl_core.errors import ConfigError, LifecycleError, PluginError
from rl_core.interfaces import GenerationInterface
from rl_core.plugins.discovery import load_object
from rl_core.refit import DEFAULT_DEADLINE_S, RefitReceiver
from rl_core.refit.jobs import exclusively
from rl_core.refit.turns import TurnLock

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Generator, Iterator, Mapping

    from rl_core.backends.receivers import Receiver
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import Future, GenerationOutputSpec, WeightSink, WorkerContext

__all__ = ["GenerationBackend"]

TAGS = frozenset({"weights", "kv_cache"})


class GenerationBackend(GenerationInterface):
    """Turns an engine into a :class:`GenerationInterface`.

    A subclass loads its engine, calls ``super().__init__`` and implements :meth:`complete`,
    :meth:`weight_sink`, :meth:`on_wake`, :meth:`on_sleep` and :meth:`on_shutdown`. Input checks,
    output layout, lifecycle, versions and every refit method are here.

    Args:
        config: The checked configuration.
        facts: Limits of the loaded model.
    """

    #: Engines behind this object that take a refit each; a proxy over replicas has more.
    receiver_count = 1
    #: Tags of the memory that is taken before the first ``prepare_for_generation``.
    resident_at_first: frozenset[str] = frozenset()

    def __init__(self, config: Mapping[str, Any], facts: ModelFacts) -> None:
        self.config = dict(config)
        limit = config.get("max_model_len") or facts.max_model_len
        if limit > facts.max_model_len:
            raise ConfigError(
                f"max_model_len {limit} is above the model's context of {facts.max_model_len}",
                fix=f"set max_model_len to at most {facts.max_model_len}",
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
        self._awake: frozenset[str] = frozenset()  # what the user asked for: generate needs all
        self._resident = self.resident_at_first  # what has memory, asked for or not
        self._closed = self._ended = False
        self._lock = TurnLock()
        self._receiver = self.make_receiver(self._lock)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """Builds the backend from its checked configuration.

        Args:
            config: As its TypedDict says, ``backend`` included.
            worker: Given when it is one of several workers; replicas are independent.
        """
        del worker
        return cls(**{key: value for key, value in config.items() if key != "backend"})

    # -- what an author writes -----------------------------------------------------------------

    @abstractmethod
    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """Generates, yielding each row as it finishes.

        Args:
            prompts: At least one row, every row with a budget of at least 1.
            sampling: The same for all rows; seeds, budgets and stop strings are per row.
        """

    @abstractmethod
    def weight_sink(self) -> WeightSink:
        """Where a refit writes; called once for each refit."""

    def make_receiver(self, lock: TurnLock) -> Receiver:
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
        """Gives the memory behind ``tags`` back, as far as the manifest declares ``sleep``."""

    @abstractmethod
    def on_shutdown(self) -> None:
        """Ends the engine; called once."""

    # -- generation -----------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationInterface.generate`."""
        with self._serving():
            data, prompts, sampling = self._accept(data, greedy)
            completions = list(self._complete_with_room(prompts, sampling))
            return assemble_output(
                data,
                prompts,
                completions,
                pad_token_id=self.facts.pad_token_id,
                weights_version=self.weights_version,
            )

    async def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationInterface.generate_async`."""
        rows = self._stream_rows(data, greedy)
        # One thread for the whole stream: the lock that keeps refits out belongs to a thread.
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Any]()
        stop = threading.Event()
        thread = threading.Thread(
            target=_pump, args=(rows, loop, queue, stop), name="generate_async", daemon=True
        )
        thread.start()
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()

    def _stream_rows(
        self, data: BatchedDataDict[Any], greedy: bool
    ) -> Iterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        with self._serving():
            data, prompts, sampling = self._accept(data, greedy)
            seen = torch.zeros(len(prompts), dtype=torch.bool)
            for completion in self._complete_with_room(prompts, sampling):
                seen[completion.row] = True
                yield completion.row, self._one_row(data, prompts, completion)
            for row in (~seen).nonzero().flatten().tolist():
                yield row, self._one_row(data, prompts, Completion(row, (), (), True))

    def _one_row(
        self, data: BatchedDataDict[Any], prompts: PromptBatch, done: Completion
    ) -> BatchedDataDict[GenerationOutputSpec]:
        return assemble_output(
            data.slice(done.row, done.row + 1),
            prompts.select(torch.tensor([done.row])),
            [Completion(0, done.token_ids, done.logprobs, done.truncated)],
            pad_token_id=self.facts.pad_token_id,
            weights_version=self.weights_version,
        )

    def _accept(
        self, data: BatchedDataDict[Any], greedy: bool
    ) -> tuple[BatchedDataDict[Any], PromptBatch, SamplingParams]:
        sampling = self.sampling
        data = repeated(data, sampling.num_samples)
        prompts = PromptBatch.from_data(
            data, sampling, self.facts, self.config.get("stop_strings") or ()
        )
        return data, prompts, greedy_params(sampling) if greedy or sampling.greedy else sampling

    def _complete_with_room(
        self, prompts: PromptBatch, sampling: SamplingParams
    ) -> Iterator[Completion]:
        rows = (prompts.budgets > 0).nonzero().flatten()
        if not len(rows):
            return
        original = dict(enumerate(rows.tolist()))
        for done in self.complete(prompts.select(rows), sampling):
            row = original.pop(done.row, -1)
            count = len(done.token_ids)
            if row < 0 or count != len(done.logprobs) or count > prompts.budgets[row]:
                raise self._fault(f"gave row {done.row} twice or with too many tokens or log-probs")
            yield Completion(row, done.token_ids, done.logprobs, done.truncated)
        if original:
            raise self._fault(f"did not complete rows {list(original.values())[:5]}")

    def _fault(self, what: str) -> PluginError:
        return PluginError(
            f"{type(self).__name__}.complete {what}", fix="report it to the backend's author"
        )

    @contextmanager
    def _serving(self) -> Generator[None]:
        with self._lock.reading():
            self._check_open("generate")
            if self._awake != TAGS:
                raise LifecycleError(
                    f"{type(self).__name__}.generate was called while "
                    f"{', '.join(sorted(TAGS - self._awake))} asleep",
                    fix="call prepare_for_generation first",
                )
            self._receiver.check()
            yield

    # -- lifecycle ------------------------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.prepare_for_generation`."""
        tags = tags_of(args, kwargs)
        with self._lock:
            self._check_open("prepare_for_generation")
            self.bring(tags)
            self._awake |= tags
        return True

    def bring(self, tags: frozenset[str]) -> None:
        """Takes the memory behind ``tags`` where it is asleep; the caller may still not generate.

        For a subclass that needs memory outside a call of its user, such as a refit's weights.
        """
        if asleep := tags - self._resident:
            self.on_wake(asleep)
            self._resident |= asleep

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.finish_generation`."""
        tags = tags_of(args, kwargs)
        with self._lock:
            self._check_open("finish_generation")
            if resident := tags & self._resident:
                self._receiver.let_go_of_weights()
                self.on_sleep(resident)
                self._resident -= resident
            self._awake -= tags
        return True

    def shutdown(self) -> bool:
        """See :meth:`GenerationInterface.shutdown`."""
        self._closed = True
        self._receiver.close()
        with exclusively(self._lock, DEFAULT_DEADLINE_S, f"{type(self).__name__}.generate"):
            if not self._ended:
                self._ended = True
                self.on_shutdown()
        return True

    def _check_open(self, method: str) -> None:
        if self._closed:
            raise LifecycleError(
                f"{type(self).__name__}.{method} was called after shutdown",
                fix="build a new backend",
            )

    # -- refit ----------------------------------------------------------------------------------

    @property
    def weights_version(self) -> int:
        """See :attr:`GenerationInterface.weights_version`."""
        return self._receiver.version

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`GenerationInterface.prepare_refit_info`."""
        self._check_open("prepare_refit_info")
        self._receiver.prepare(state_dict_info)

    def update_weights_via_ipc_zmq(self, *args: Any, **kwargs: Any) -> list[Future]:
        """See :meth:`GenerationInterface.update_weights_via_ipc_zmq`."""
        self._check_open("update_weights_via_ipc_zmq")
        return [self._receiver.receive(*args, **kwargs)]

    def update_weights(self, ipc_handles: dict[str, Any]) -> bool:
        """See :meth:`GenerationInterface.update_weights`."""
        self._check_open("update_weights")
        return self._receiver.load_handles(ipc_handles)

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int = 1
    ) -> list[Future]:
        """See :meth:`GenerationInterface.init_collective`."""
        self._check_open("init_collective")
        del world_size, train_world_size  # the trainer counts
        return [self._receiver.open("collective", DEFAULT_DEADLINE_S, {"ip": ip, "port": port})]

    def update_weights_from_collective(
        self, info: dict[str, Any] | None = None, **options: Any
    ) -> list[Future]:
        """See :meth:`GenerationInterface.update_weights_from_collective`."""
        self._check_open("update_weights_from_collective")
        if info is not None:
            self._receiver.prepare(info)
        return [self._receiver.receive(transport="collective", **options)]

    def invalidate_kv_cache(self) -> bool:
        """Nothing outlives a call unless a backend says otherwise."""
        return True

    def beside_weights(self, function: str, **arguments: Any) -> list[Any]:
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


def tags_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """The tags of a lifecycle call: all if none are given.

    Raises:
        ConfigError: There is no such tag.
    """
    tags = kwargs.get("tags") or (args[0] if args else None)
    chosen = TAGS if tags is None else frozenset(tags)
    if unknown := chosen - TAGS:
        raise ConfigError(
            f"unknown tags {sorted(unknown)}", fix=f"use some of {sorted(TAGS)}", key="tags"
        )
    return chosen


def _pump(
    rows: Iterator[Any],
    loop: asyncio.AbstractEventLoop,
    queue: asyncio.Queue[Any],
    stop: threading.Event,
) -> None:
    """Feeds rows to the event loop until they end or the reader is gone."""
    last: BaseException | None = None
    try:
        for row in rows:
            if stop.is_set():
                break
            loop.call_soon_threadsafe(queue.put_nowait, row)
    except BaseException as error:  # it is raised again in the reader
        last = error
    finally:
        rows.close()  # type: ignore[attr-defined]
        with suppress(RuntimeError):  # the loop is closed: nobody reads
            loop.call_soon_threadsafe(queue.put_nowait, last)
