"""A generation backend whose engine runs in a process of its own: this process's side of it."""

from __future__ import annotations

import sys
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rl_core.backends import Completion, FailedRow, GenerationBackend, ModelFacts, RowEngine
from rl_core.errors import PluginError, RLError, WorkerDiedError
from rl_hosting.host import SOCKETS
from rl_hosting.process import EngineProcess
from rl_hosting.receivers import WorkerReceivers
from rl_hosting.remote_sink import RemoteSink
from rl_hosting.wire import Prompt, Sampling, raised

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

    from rl_core.backends import Receiver, Row
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import GenerationOutputSpec, WeightSink
    from rl_core.refit.turns import TurnLock

__all__ = ["HostedGeneration", "HostedRows"]

#: Seconds for which a service waits for rows before it looks at what else there is.
_COLLECT_S = 0.2
#: Engines take seeds of 63 bits.
_SEEDS = (1 << 63) - 1


class _Facts(msgspec.Struct):
    pad_token_id: int
    eos_token_ids: list[int]
    vocab_size: int
    max_model_len: int
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1


class HostedRows(RowEngine):
    """The rows in an engine's process.

    Args:
        process: Of the engine.
        silence_s: Asks for the seconds without a sign of life after which it counts as hung.
    """

    def __init__(self, process: EngineProcess, silence_s: Callable[[], float]) -> None:
        self._process = process
        self._silence_s = silence_s
        self._rows: set[int] = set()
        self._newest = -1
        self._silent: float | None = None  # since when, if it should say something

    @property
    def busy(self) -> bool:
        """Whether the engine decodes."""
        return bool(self._rows)

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        if self._silent is None:
            self._silent = time.monotonic()
        self._rows |= {row.key for row in rows}
        self._newest = max({self._newest} | self._rows)
        self._process.submit(
            [
                Prompt(
                    key=row.key,
                    index=row.index,
                    token_ids=list(row.token_ids),
                    budget=row.budget,
                    seed=row.seed & _SEEDS if row.seeded else None,
                    stop_strings=list(row.stop_strings),
                    sampling=Sampling(
                        row.sampling.greedy,
                        row.sampling.temperature,
                        row.sampling.top_k,
                        row.sampling.top_p,
                        row.sampling.repetition_penalty,
                        list(row.sampling.stop_token_ids),
                    ),
                )
                for row in rows
            ]
        )

    def collect(self) -> list[Completion | FailedRow]:
        """Waits for rows that ended.

        Raises:
            WorkerDiedError: Its process is gone, or gave no sign of life and was ended.
            WorkerError: It failed, and lost all rows in it.
            PluginError: It ended a row that it was never given; it was ended.
        """
        progress = self._process.progress(_COLLECT_S)
        now = time.monotonic()
        if progress is None:
            if self._silent is not None and now - self._silent > self._silence_s():
                raise self._process.given_up(
                    f"decodes and gave no sign of life for {now - self._silent:.0f} s"
                )
            return []
        ended: list[Completion | FailedRow] = []
        for done in progress.rows:
            if done.key > self._newest:
                raise self._process.given_up(f"ended row {done.key}, which it was never given")
            if done.key not in self._rows:  # it was taken back
                continue
            self._rows.discard(done.key)
            if (error := raised(done)) is not None:
                ended.append(FailedRow(done.key, self._process.logged(error)))
            else:
                ended.append(Completion(done.key, done.token_ids, done.logprobs, done.truncated))
        self._silent = now if self._rows else None
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`."""
        self._rows.difference_update(keys)
        with suppress(WorkerDiedError):  # with all rows
            self._process.cancel(keys)

    def interrupt(self) -> None:
        """See :meth:`RowEngine.interrupt`."""
        self._process.interrupt()


class HostedGeneration(GenerationBackend):
    """Generates with an :class:`~rl_hosting.engine.Engine` in a process of its own.

    Args:
        config: The checked configuration of the backend.
        engine: ``"module:Class"``, importable in the engine's process.
        name: How errors call it.
        environment: All variables of its process.
        python: Its interpreter.
        verbose: Print what it prints.
        preload: See :class:`~rl_hosting.process.EngineProcess`.
        sockets: Likewise.
        start_timeout_s: Seconds for it to load the model.

    Raises:
        ConfigError: The interpreter does not run.
        IncompatiblePluginError: Another release of rl-hosting or rl-core is installed there.
        WorkerError: The engine refused the configuration; an instance of what it raised, too.
        WorkerDiedError: Its process ended.
        DeadlineError: It did not start in time.
        PluginError: Its facts are none.
    """

    #: What ``on_sleep`` asks for; an engine may know several ways to sleep.
    sleep_level = 1
    #: Seconds without a sign of life after which an engine that decodes counts as hung.
    silence_s = 300.0
    #: Seconds for calls that wake, sleep, reset or look.
    answer_s = 120.0

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        engine: str,
        name: str,
        environment: Mapping[str, str],
        python: str = sys.executable,
        verbose: bool = False,
        preload: Sequence[str] = (),
        sockets: str = SOCKETS,
        start_timeout_s: float = 600.0,
    ) -> None:
        self._process = EngineProcess(
            name,
            engine,
            environment,
            python=python,
            verbose=verbose,
            preload=preload,
            sockets=sockets,
        )
        self._rows = HostedRows(self._process, lambda: self.silence_s)
        try:
            self.engine_facts: dict[str, Any] = self._process.start(config, start_timeout_s)
            try:
                facts = msgspec.convert(self.engine_facts, _Facts)
            except msgspec.ValidationError as error:
                raise PluginError(
                    f"{name} has no such facts as a driver needs: {error}",
                    fix="report it to the backend's author; rl_hosting.Engine says what they are",
                ) from error
            self.receiver_count = facts.workers
            model = facts.pad_token_id, tuple(facts.eos_token_ids), facts.vocab_size
            super().__init__(config, ModelFacts(*model, facts.max_model_len))
        except BaseException as error:
            if isinstance(error, RLError):
                self._process.logged(error)
            self._process.close()
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._rows

    # -- generation -------------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationBackend.generate`."""
        with self._process.logging():
            return super().generate(data, greedy)

    def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationBackend.generate_async`."""
        accepted: Any = super().generate_async(data, greedy)  # now, and not when it is read

        async def rows() -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
            with self._process.logging():
                async with aclosing(accepted):
                    async for row in accepted:
                        yield row

        return rows()

    def _check_open(self, method: str) -> None:
        self._process.check_owner()
        super()._check_open(method)

    # -- lifecycle --------------------------------------------------------------------------------

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationBackend.prepare_for_generation`."""
        self._process.check_owner()  # before a lock that nobody frees in a forked child
        return super().prepare_for_generation(*args, **kwargs)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationBackend.finish_generation`."""
        self._process.check_owner()
        return super().finish_generation(*args, **kwargs)

    def shutdown(self) -> bool:
        """See :meth:`GenerationBackend.shutdown`; in a forked child nothing happens."""
        return self._process.owned and super().shutdown()

    def on_wake(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_wake`."""
        self._process.call("wake", self.answer_s, tags=sorted(tags))

    def on_sleep(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_sleep`."""
        self._process.call("sleep", self.answer_s, tags=sorted(tags), level=self.sleep_level)

    def on_shutdown(self) -> None:
        """See :meth:`GenerationBackend.on_shutdown`."""
        self._process.close()

    # -- refit ------------------------------------------------------------------------------------

    def make_receiver(self, lock: TurnLock) -> Receiver:
        """The receivers in the engine's workers."""
        self._workers = WorkerReceivers(
            self._process,
            count=self.receiver_count,
            answer_s=self.answer_s,
            lock=lock,
            busy=lambda: self._rows.busy,
            on_commit=self._on_commit,
            wake=lambda: self.wake(frozenset({"weights"})),
        )
        return self._workers

    def weight_sink(self) -> WeightSink:
        """What the engine holds, to be read; refits write in the engine's own processes."""
        return RemoteSink(self._workers)

    def beside_weights(self, function: str, **arguments: Any) -> list[Any]:
        """See :meth:`GenerationBackend.beside_weights`: in the engine's workers."""
        return self._workers.call(function, arguments)

    def invalidate_kv_cache(self) -> bool:
        """Forgets the keys and values of prompts seen so far.

        Raises:
            PluginError: The engine refused.
        """
        if not self._process.call("reset_caches", self.answer_s):
            raise PluginError(
                f"{self._process.name} did not forget its prefix cache",
                fix="wait until nothing is being generated",
            )
        return True
