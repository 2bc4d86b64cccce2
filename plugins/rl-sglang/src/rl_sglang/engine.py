"""SGLang itself, behind the few calls that the host makes. Imported in the engine's process."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import signal
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_backends import Completion, FailedRow
from rl_backends.engine.checkpoint import check_positions, check_shapes, load_tokenizer
from rl_backends.engine.weights import CheckpointModel
from rl_backends.model_files import model_facts
from rl_core.errors import ConfigError, PluginError, RLError
from rl_hosting import Engine
from rl_sglang import launch  # stands in for what is missing on a CPU, before SGLang is imported
from rl_sglang.adapters import ADAPTER_NAMES, adapter_reference
from rl_sglang.private import check_version, engine_version
from rl_sglang.scheduler import GREEDY, STOP_STRINGS, SchedulerOptions
from rl_sglang.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Collection, Coroutine, Mapping, Sequence

    from rl_backends import Row

from sglang.srt.managers.io_struct import (
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)

__all__ = ["SglangEngine"]

#: Seconds that a step waits for a row to end.
_WAIT_S = 0.01
#: Seconds for rows that were taken back to be gone, and for SGLang to answer.
_ANSWER_S = 60.0


class SglangEngine(Engine):
    """One SGLang engine: its schedulers are children of this process, which talks to them.

    Args:
        llm: SGLang's engine.
        workers: The receivers of refits in its schedulers.
        loop: Runs SGLang's coroutines, whenever a method here waits.
    """

    def __init__(self, llm: Any, workers: Workers, loop: asyncio.AbstractEventLoop) -> None:
        self._llm = llm
        self._manager = llm.tokenizer_manager
        self._workers = workers
        self._loop = loop
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by the keys of rows
        self._dropped: set[asyncio.Task[None]] = set()
        self._ended: list[Completion | FailedRow] = []
        self._news = asyncio.Event()
        self._asleep: frozenset[str] = frozenset()
        self._adapters = False  # whether refits bring them

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> SglangEngine:
        """Loads a model.

        Args:
            config: A checked :class:`rl_sglang.config.SglangConfig`.

        Raises:
            ConfigError: SGLang does not know an argument, or refuses the configuration; or a part
                of the checkpoint cannot be read, or the model has no pad token.
            IncompatiblePluginError: This SGLang is not one that was tested.
            CapabilityError: A refit would not reach all that it computes with.
        """
        check_version()
        model_config = launch.checkpoint_config(config)
        text = model_config.get_text_config()
        tokenizer = load_tokenizer(config)
        facts = model_facts(
            config,
            vocab_size=int(text.vocab_size),
            max_model_len=launch.longest_row(config, text),
            text=text,
            generation=launch.generation_config(config["model_name"]),
            tokenizer=tokenizer,
        )
        check_positions(text, facts.max_model_len)
        arguments = launch.server_args(config, text, facts.max_model_len)
        takes_refits = config.get("sglang_cfg", {}).get("refit", True)
        if takes_refits and arguments.get("load_format") != "dummy":
            trust = config.get("trust_remote_code", False)
            model = CheckpointModel(config["model_name"], torch.float32, trust=trust)
            check_shapes(config["model_name"], model.specs)
        tempfile.tempdir = None  # looked up again, in the variables of this process
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        tp_size = arguments.get("tp_size", 1)
        workers = Workers(Path(tempfile.gettempdir()), tp_size)
        options = SchedulerOptions(
            address=workers.address,
            raw=config.get("logprobs_mode", "processed") == "raw",
            tokenizer=config["model_name"] if tokenizer is not None else None,
            trust=config.get("trust_remote_code", False),
            takes_refits=takes_refits,
            lora=config.get("sglang_cfg", {}).get("lora"),
        )
        try:
            llm = launch.launch(arguments, options)
        except Exception as error:
            raise launch.refusal(error, workers.failure(), config) from error
        workers.accept()
        cache = int(llm._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"])
        engine = cls(llm, workers, loop)
        engine._start_loop()
        engine._adapters = options.lora is not None
        for number in ADAPTER_NAMES if engine._adapters else ():  # the schedulers load them
            engine._run(engine._manager.lora_registry.register(adapter_reference(number)))
        if cache < arguments["context_length"]:
            engine.shutdown()
            raise ConfigError(
                f"the key/value cache has room for {cache} tokens, but one row of "
                f"{facts.max_model_len} tokens needs {arguments['context_length']}",
                fix="raise sglang_cfg.max_total_tokens (or mem_fraction_static), or lower "
                "max_model_len",
                key="sglang_cfg.max_total_tokens",
            )
        try:
            if takes_refits:
                engine.check_refits()
            if not torch.cuda.is_available():
                engine.check_rows(config["model_name"])
        except RLError:
            engine.shutdown()
            raise
        engine.facts = dataclasses.asdict(facts) | {
            "eos_token_ids": list(facts.eos_token_ids),
            "has_tokenizer": tokenizer is not None,
            "sleeps": torch.cuda.is_available(),
            "workers": tp_size,
            "fp8_cache": str(arguments.get("kv_cache_dtype", "auto")).startswith("fp8"),
            "version": engine_version(),
        }
        return engine

    # -- rows -------------------------------------------------------------------------------------

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`Engine.submit`."""
        adapter = self.serving_adapter()[0] if self._adapters else 0
        for row in rows:
            completing = self._complete(row, ADAPTER_NAMES.get(adapter))
            self._tasks[row.key] = self._loop.create_task(completing)

    async def _complete(self, row: Row, adapter: str | None) -> None:
        sampling, greedy = row.sampling, row.sampling.greedy
        done: Completion | FailedRow
        how = {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            "stop_token_ids": list(sampling.stop_token_ids),
            "max_new_tokens": row.budget,
            "sampling_seed": GREEDY if greedy else row.seed,
            "custom_params": {STOP_STRINGS: row.stop_strings} if row.stop_strings else None,
        }
        try:
            output = await self._llm.async_generate(
                input_ids=row.token_ids,
                sampling_params=how,
                return_logprob=True,
                rid=_name(row.key),
                lora_path=adapter,
            )
            meta = output["meta_info"]
            reason = meta["finish_reason"]
            if reason["type"] == "abort":
                raise PluginError(
                    f"SGLang aborted a row: {reason.get('message')}",
                    fix="look at the end of the engine's log",
                )
            # A log-prob of more than 0 is a rounding error; NaN, or None for it, fails the row.
            given = [entry[0] for entry in meta["output_token_logprobs"]]
            logprobs = [math.nan if value is None else min(value, 0.0) for value in given]
            ids = list(output["output_ids"])
            done = Completion(row.key, ids, logprobs, reason["type"] == "length")
        except Exception as error:  # of this row alone
            done = FailedRow(row.key, error)
        if self._tasks.pop(row.key, None) is not None:  # nobody took it back
            self._ended.append(done)
            self._news.set()

    def step(self) -> Sequence[Completion | FailedRow]:
        """See :meth:`Engine.step`; the schedulers decode meanwhile."""
        if not self._ended:
            self._news.clear()
            self._run(self._news.wait(), _WAIT_S)
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`Engine.cancel`."""
        for key in keys:
            if (task := self._tasks.pop(key, None)) is None:
                continue
            name = _name(key)
            if name in self._manager.rid_to_state:
                self._manager.abort_request(name)
                self._dropped.add(task)
                task.add_done_callback(self._dropped.discard)
            else:  # SGLang has not heard of it
                task.cancel()
        if not self._tasks:
            self._drain()
        elif self._dropped:
            self._run(asyncio.sleep(0))

    def _drain(self) -> None:
        """Waits for rows that were taken back: until then the schedulers compute."""
        if self._dropped and not self._run(asyncio.wait(set(self._dropped)), _ANSWER_S):
            raise PluginError(
                f"SGLang did not abort {len(self._dropped)} row(s) within {_ANSWER_S:.0f} s",
                fix="look at the end of the engine's log",
            )

    def tokens_made(self) -> int:
        """See :meth:`Engine.tokens_made`: schedulers send what they have every few tokens."""
        return int(self._manager.last_receive_tstamp * 1e6)

    # -- all else ---------------------------------------------------------------------------------

    def call_workers(self, frame: bytes) -> list[bytes]:
        """See :meth:`Engine.call_workers`."""
        return self._workers.call(frame)

    def wake(self, tags: Sequence[str]) -> None:
        """See :meth:`Engine.wake`; SGLang itself ends its processes if memory is there twice."""
        if asleep := sorted(self._asleep & set(tags)):
            asked = ResumeMemoryOccupationReqInput(tags=asleep)
            self._answer(self._manager.resume_memory_occupation(asked))
            self._asleep -= set(asleep)

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """See :meth:`Engine.sleep`; on the CPU SGLang would free nothing."""
        del level
        if not torch.cuda.is_available():
            return
        if awake := sorted(set(tags) - self._asleep):
            asked = ReleaseMemoryOccupationReqInput(tags=awake)
            self._answer(self._manager.release_memory_occupation(asked))
            self._asleep |= set(awake)

    def reset_caches(self) -> bool:
        """See :meth:`Engine.reset_caches`."""
        self._drain()
        return bool(self._answer(self._manager.flush_cache()).success)

    def shutdown(self) -> None:
        """See :meth:`Engine.shutdown`; SGLang kills its schedulers."""
        self._workers.close()
        self._llm.shutdown()

    def _start_loop(self) -> None:
        """Has SGLang listen on the loop, and takes back its way to end when a scheduler fails."""

        async def listen() -> None:
            self._manager.auto_create_handle_loop()

        self._run(listen())
        for number in (signal.SIGTERM, signal.SIGQUIT):
            self._loop.remove_signal_handler(number)  # runs only while the loop does
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGQUIT, launch.end_processes)

    def _run(self, found: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> bool:
        """Runs the loop until something is there; whether it was in time."""
        with suppress(TimeoutError):
            self._loop.run_until_complete(asyncio.wait_for(found, timeout_s))
            return True
        return False

    def _answer(self, asked: Coroutine[Any, Any, Any]) -> Any:
        """What SGLang answers.

        Raises:
            PluginError: Nothing.
        """
        try:
            return self._loop.run_until_complete(asyncio.wait_for(asked, _ANSWER_S))
        except TimeoutError as error:
            raise PluginError(
                f"SGLang's scheduler did not answer within {_ANSWER_S:.0f} s",
                fix="look at the end of the engine's log",
            ) from error


def _name(key: int) -> str:
    """A row's name: SGLang aborts all requests whose names begin with the one that is given."""
    return f"row-{key:020d}"
