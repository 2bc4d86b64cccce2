"""The base class of generation backends with an engine in a separate process."""

from __future__ import annotations

import sys
from contextlib import aclosing
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from rl_backends import GenerationBackend, ModelFacts, RowEngine
from rl_core.errors import CapabilityError, PluginError, RLError
from rl_hosting._engine_host import SOCKETS
from rl_hosting._hosted_rows import HostedRows
from rl_hosting._process import HostedProcess
from rl_hosting._remote_receiver import RemoteReceiver
from rl_hosting._remote_sink import RemoteSink

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rl_backends import Receiver
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import Future, GenerationOutputSpec, WeightSink
    from rl_core.weights.engine_lock import EngineLock

__all__ = ["HostedGeneration"]


class _Facts(msgspec.Struct):
    pad_token_id: int
    eos_token_ids: list[int]
    vocab_size: int
    max_model_len: int
    workers: Annotated[int, msgspec.Meta(ge=1)] = 1


class HostedGeneration(GenerationBackend):
    """Generates with an :class:`~rl_hosting.engine.Engine` in a separate process.

    Args:
        config: The checked configuration of the backend; :meth:`Engine.start` is given it.
        engine: ``"module:Class"``, importable in the engine's process.
        name: How errors call the engine.
        environment: All variables of its process.
        python: The interpreter of its environment. rl-core and rl-hosting must be installed there
            in the versions of this one.
        verbose: Print on standard error what the engine prints.
        preload: Modules that are imported once for all engines with this environment, which are
            forked with them. They may start no threads and use no GPU.
        sockets: A variable of the engine's own that names the directory for its sockets, if it has
            one; the directory is removed with the process.
        start_timeout_s: Seconds for the engine to load the model.
        without_refits: If the engine was built to take no refits: the words for the errors that
            refuse them, such as ``"vllm_cfg.refit False"``.

    Raises:
        ConfigError: The interpreter does not run.
        IncompatiblePluginError: Another release of rl-hosting or rl-core is installed there.
        WorkerError: The engine refused the configuration; an instance of what it raised, too.
        WorkerDiedError: Its process ended.
        DeadlineError: It did not start in time.
        PluginError: ``Engine.facts`` lacks a fact, or one is of another type.
    """

    #: The level that :meth:`Engine.sleep` is given; an engine may know several ways to sleep.
    sleep_level = 1
    #: Seconds without a sign of life after which an engine that decodes counts as hung.
    silence_s = 300.0
    #: Seconds for an answer to calls that neither decode nor refit: wake, sleep, reset, read.
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
        without_refits: str = "",
    ) -> None:
        self._without_refits = without_refits
        self._process = HostedProcess(
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
                    f"{name}: the facts that its start returned are not complete: {error}",
                    fix="report it to the backend's author; rl_hosting.Engine lists them",
                ) from error
            self.receiver_count = facts.workers
            model = facts.pad_token_id, tuple(facts.eos_token_ids), facts.vocab_size
            super().__init__(config, ModelFacts(*model, facts.max_model_len))
        except BaseException as error:
            if isinstance(error, RLError):
                self._process.with_log(error)
            self._process.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._rows

    # -- generation -------------------------------------------------------------------------------

    def generate(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]:
        """See :meth:`GenerationBackend.generate`."""
        with self._process.logs_in_errors():
            return super().generate(data, greedy)

    def generate_async(
        self, data: BatchedDataDict[Any], greedy: bool = False
    ) -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
        """See :meth:`GenerationBackend.generate_async`."""
        # Accepted here and not in rows(), which runs only when the caller takes its first row.
        accepted: Any = super().generate_async(data, greedy)

        async def rows() -> AsyncIterator[tuple[int, BatchedDataDict[GenerationOutputSpec]]]:
            with self._process.logs_in_errors():
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
        # In a forked child a lock that another thread held at the fork is never released.
        self._process.check_owner()
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

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`GenerationInterface.prepare_refit_info`.

        Raises:
            CapabilityError: The engine was built to take no refits.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self._check_takes_refits()
        super().prepare_refit_info(state_dict_info)

    def update_weights_from_collective(
        self, info: dict[str, Any] | None = None, **options: Any
    ) -> list[Future]:
        """See :meth:`GenerationInterface.update_weights_from_collective`."""
        self._check_takes_refits()
        return super().update_weights_from_collective(info, **options)

    def _check_takes_refits(self) -> None:
        if self._without_refits:
            raise CapabilityError(
                f"{self._process.name} takes no refit: it was built with {self._without_refits}",
                fix="build it again without that key",
                capability="refit",
            )

    def weights_dropped(self) -> None:
        """Refuses to generate until a refit, after a sleep that freed the weights for good."""
        self._remote.dropped()

    def make_receiver(self, lock: EngineLock) -> Receiver:
        """The receivers in the engine's workers, as one."""
        self._remote = RemoteReceiver(
            self._process,
            count=self.receiver_count,
            answer_s=self.answer_s,
            lock=lock,
            busy=lambda: self._rows.busy,
            on_commit=self._on_commit,
            wake=lambda: self.wake(frozenset({"weights"})),
        )
        return self._remote

    def weight_sink(self) -> WeightSink:
        """The engine's weights, for checks; refits write to sinks in the engine's processes."""
        return RemoteSink(self._remote)

    def call_in_workers(self, function: str, **arguments: Any) -> list[Any]:
        """See :meth:`GenerationBackend.call_in_workers`: in the engine's workers."""
        return self._remote.call(function, arguments)

    def invalidate_kv_cache(self) -> bool:
        """Forgets the keys and values of prompts seen so far.

        Raises:
            PluginError: The engine refused.
        """
        if not self._process.call("reset_caches", self.answer_s):
            raise PluginError(
                f"{self._process.name} did not clear its prefix cache",
                fix="call it again when no rows are being generated",
            )
        return True
