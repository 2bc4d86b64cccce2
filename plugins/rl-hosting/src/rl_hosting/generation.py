"""A generation backend whose engine runs in a process of its own: this process's side of it."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rl_core.backends import Completion, FailedRow, GenerationBackend, ModelFacts, RowEngine
from rl_core.errors import DeadlineError, PluginError
from rl_hosting.process import EngineProcess
from rl_hosting.receivers import WorkerReceivers
from rl_hosting.remote_sink import RemoteSink
from rl_hosting.wire import Prompt, Sampling, raised

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rl_core.backends import Row
    from rl_core.backends.receivers import Receiver
    from rl_core.interfaces import WeightSink
    from rl_core.refit.turns import TurnLock

__all__ = ["HostedGeneration", "HostedRows"]

#: Seconds without a sign of life after which an engine that decodes counts as hung.
SILENCE_S = 300.0
#: Seconds for calls that wake, sleep or reset.
_CALL_S = 120.0
#: Seconds for which a service waits for rows before it looks at what else there is.
_COLLECT_S = 0.2
#: Engines take seeds of 63 bits.
_SEEDS = (1 << 63) - 1


class HostedRows(RowEngine):
    """The rows in an engine's process.

    Args:
        process: Of the engine.
    """

    def __init__(self, process: EngineProcess) -> None:
        self._process = process
        self._rows: set[int] = set()
        self._heard = 0.0

    @property
    def busy(self) -> bool:
        """Whether the engine decodes."""
        return bool(self._rows)

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`RowEngine.submit`."""
        if not self._rows:
            self._heard = time.monotonic()
        self._rows |= {row.key for row in rows}
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
            DeadlineError: The engine gave no sign of life for minutes; it is ended.
            WorkerDiedError: Its process is gone.
            WorkerError: It failed, and lost all rows in it.
        """
        progress = self._process.progress(_COLLECT_S)
        now = time.monotonic()
        if progress is None:
            if self._rows and now - self._heard > SILENCE_S:
                self._process.close()  # it hangs: nothing more can be asked of it
                raise DeadlineError(
                    f"{self._process.name} decodes and gave no sign of life for "
                    f"{now - self._heard:.0f} s; its process was ended",
                    fix="look at the engine's log (verbose), and build a new backend",
                    seconds=SILENCE_S,
                )
            return []
        self._heard = now
        ended: list[Completion | FailedRow] = []
        for done in progress.rows:
            if done.key not in self._rows:  # it was taken back
                continue
            self._rows.discard(done.key)
            if (error := raised(done)) is not None:
                ended.append(FailedRow(done.key, self._process.logged(error)))
            else:
                ended.append(Completion(done.key, done.token_ids, done.logprobs, done.truncated))
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`RowEngine.cancel`."""
        self._rows.difference_update(keys)
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
    """

    #: What ``on_sleep`` asks for; an engine may know several ways to sleep.
    sleep_level = 1

    def __init__(
        self,
        config: Mapping[str, Any],
        *,
        engine: str,
        name: str,
        environment: Mapping[str, str],
        python: str = sys.executable,
        verbose: bool = False,
        preload: Sequence[str] | None = None,
        sockets: str = "",
        start_timeout_s: float = 600.0,
    ) -> None:
        named = {"sockets": sockets} if sockets else {}
        self._process = EngineProcess(
            name, engine, environment, python=python, verbose=verbose, preload=preload, **named
        )
        self._rows = HostedRows(self._process)
        try:
            self.engine_facts: dict[str, Any] = self._process.start(config, start_timeout_s)
            self.receiver_count = int(self.engine_facts.get("workers", 1))
            super().__init__(
                config,
                ModelFacts(
                    self.engine_facts["pad_token_id"],
                    tuple(self.engine_facts["eos_token_ids"]),
                    self.engine_facts["vocab_size"],
                    self.engine_facts["max_model_len"],
                ),
            )
        except BaseException:
            self._process.close()
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._rows

    # -- lifecycle --------------------------------------------------------------------------------

    def on_wake(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_wake`."""
        self._process.call("wake", _CALL_S, tags=sorted(tags))

    def on_sleep(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_sleep`."""
        self._process.call("sleep", _CALL_S, tags=sorted(tags), level=self.sleep_level)

    def on_shutdown(self) -> None:
        """See :meth:`GenerationBackend.on_shutdown`."""
        self._process.close()

    # -- refit ------------------------------------------------------------------------------------

    def make_receiver(self, lock: TurnLock) -> Receiver:
        """The receivers in the engine's workers."""
        self._workers = WorkerReceivers(
            lambda timeout_s, call: self._process.call("refit", timeout_s, call=call),
            name=self._process.name,
            lock=lock,
            busy=lambda: self._rows.busy,
            on_commit=self._on_commit,
            wake=lambda: self.bring(frozenset({"weights"})),
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
        if not self._process.call("reset_caches", _CALL_S):
            raise PluginError(
                f"{self._process.name} did not forget its prefix cache",
                fix="wait until nothing is being generated",
            )
        return True
