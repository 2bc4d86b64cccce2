"""vLLM itself, behind the few calls that the host makes. Imported in the engine's process only."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import queue
import secrets
import threading
import time
import traceback
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from vllm import EngineArgs, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from rl_core.errors import ConfigError, DeadlineError, PluginError, RLError
from rl_vllm.facts import facts_of, model_config_of, tokenizer_of
from rl_vllm.private import check_version, engine_version
from rl_vllm.wire import Reply, Request, Row, decode, encode, raised

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from vllm.outputs import RequestOutput

    from rl_vllm.wire import Prompt

__all__ = ["Engine", "start"]

#: Keys of ``vllm_cfg`` that are ours.
_OURS = {
    "async_engine",
    "dtype",
    "engine_args",
    "refit",
    "sleep_level",
    "start_timeout_s",
    "verbose",
}
_ON_CPU: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 512 << 20,
    # After a part of a prompt vLLM winds the row's generator back, which CPU generators cannot.
    "enable_chunked_prefill": False,
}
_WAIT_S = 0.5
_PAUSE_S = 0.01
_ABORT_S = 60.0
#: Characters of vLLM's own words in an error.
_LONGEST = 800
_ALL = frozenset({"weights", "kv_cache"})


def start(config: dict[str, Any]) -> tuple[Engine, dict[str, Any]]:
    """Loads a model.

    Args:
        config: A checked :class:`rl_vllm.config.VllmConfig`.

    Returns:
        The engine, and what the backend must know of it.

    Raises:
        ConfigError: vLLM does not know an engine argument, or refuses the configuration.
        IncompatiblePluginError: This vLLM is not one that was tested.
    """
    check_version()
    given = config.get("vllm_cfg", {})
    if current_platform.is_cpu() and given.get("pipeline_parallel_size", 1) > 1:
        raise ConfigError(
            f"vLLM {engine_version()} loses requests in a pipeline on the CPU (a KeyError in its "
            "scheduler)",
            fix="use tensor_parallel_size",
            key="vllm_cfg.pipeline_parallel_size",
        )
    model_config = model_config_of(config)
    tokenizer = tokenizer_of(config)
    arguments = _arguments(config, model_config, with_tokenizer=tokenizer is not None)
    kind: Callable[[dict[str, Any]], Engine]
    kind = _AsyncEngine if given.get("async_engine") else _SyncEngine
    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if unknown := sorted(set(arguments) - known):
        raise ConfigError(
            f"vLLM {engine_version()} has no engine argument {unknown[0]!r}",
            fix="leave it out",
            key=f"vllm_cfg.engine_args.{unknown[0]}",
        )
    try:
        engine = kind(arguments)
    except Exception as error:
        raise _refusal(error, config) from error
    if given.get("refit", True):
        engine.check_refit()
    return engine, facts_of(engine.model_config, tokenizer, config) | {
        "has_tokenizer": tokenizer is not None,
        "sleeps": not current_platform.is_cpu(),
        "workers": engine.workers,
        "fp8_cache": str(arguments.get("kv_cache_dtype", "auto")).startswith("fp8"),
        "version": engine_version(),
    }


def _arguments(
    config: dict[str, Any], model_config: Any, *, with_tokenizer: bool
) -> dict[str, Any]:
    """The engine arguments of vLLM."""
    given = config.get("vllm_cfg", {})
    cpu = current_platform.is_cpu()
    chosen = {
        "model": config["model_name"],
        "dtype": _dtype(config, model_config),
        "trust_remote_code": config.get("trust_remote_code", False),
        "skip_tokenizer_init": not with_tokenizer,
        "generation_config": "vllm",
        "logprobs_mode": f"{config.get('logprobs_mode', 'processed')}_logprobs",
        "worker_extension_cls": "rl_vllm.worker.RefitExtension",
        "disable_log_stats": True,
        "seed": secrets.randbits(31),
        **(_ON_CPU if cpu else {}),
        "max_model_len": config.get("max_model_len"),
        **{key: value for key, value in given.items() if key not in _OURS},
        **given.get("engine_args", {}),
    }
    if not cpu:
        chosen.setdefault("enable_sleep_mode", True)
    return {key: value for key, value in chosen.items() if value is not None}


def _dtype(config: dict[str, Any], model_config: Any) -> str:
    """The dtype of the weights; vLLM's own "auto" would round float32 checkpoints."""
    named = config.get("vllm_cfg", {}).get("dtype") or config.get("torch_dtype") or "auto"
    if named != "auto":
        return str(named)
    text = model_config.get_text_config()
    found = getattr(text, "dtype", None) or getattr(model_config, "dtype", None)
    return "auto" if found is None else str(found).removeprefix("torch.")


def _refusal(error: Exception, config: dict[str, Any]) -> RLError:
    """What it means that vLLM did not start."""
    name, text = config["model_name"], f"{type(error).__name__}: {error}"[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    if any("model_loader" in frame.filename for frame in frames):
        return ConfigError(
            f"vLLM cannot load the weights of {name}: {text}",
            fix="write config.json and weights again with save_pretrained, so that they are of the "
            "same model",
            key="model_name",
        )
    if isinstance(error, ValueError | NotImplementedError):  # also of vLLM's models of settings
        model = "architecture" in text
        return ConfigError(
            f"vLLM {engine_version()} refuses {name if model else 'this'}: {text}",
            fix="use a model that vLLM has"
            if model
            else "change the key of vllm_cfg that it names",
            key="model_name" if model else "vllm_cfg",
        )
    return PluginError(
        f"vLLM {engine_version()} did not start with {name}: {text}",
        fix="look at the end of the engine's log; vllm_cfg.verbose shows all of it",
    )


def _params(prompt: Prompt, sampling: dict[str, Any]) -> SamplingParams:
    greedy = sampling["greedy"]
    return SamplingParams(
        temperature=0.0 if greedy else sampling["temperature"],
        top_k=0 if greedy else sampling["top_k"],
        top_p=1.0 if greedy else sampling["top_p"],
        repetition_penalty=sampling["repetition_penalty"],
        stop_token_ids=sampling["stop_token_ids"],
        # The end-of-sequence tokens are among the stop tokens.
        ignore_eos=True,
        stop=prompt.stop_strings or None,
        include_stop_str_in_output=bool(prompt.stop_strings),
        detokenize=bool(prompt.stop_strings),
        skip_special_tokens=False,
        max_tokens=prompt.budget,
        seed=None if greedy else prompt.seed,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _row(output: RequestOutput) -> Row:
    done = output.outputs[0]
    ids = list(done.token_ids)
    found = done.logprobs or []
    logprobs = [found[i][token].logprob for i, token in enumerate(ids)]
    row = int(output.request_id.rpartition("-")[2])
    if not all(map(math.isfinite, logprobs)):
        raise PluginError(
            f"vLLM gave row {row} a log-prob that is not finite",
            fix="look at the weights: float16 overflows where bfloat16 and float32 do not",
        )
    # A log-prob of more than 0 is a rounding error.
    return Row(row, ids, [min(0.0, one) for one in logprobs], done.finish_reason == "length")


class Engine(ABC):
    """One vLLM engine.

    Attributes:
        model_config: vLLM's.
        workers: Processes that hold a part of the model.
    """

    model_config: Any
    workers: int
    _engine: Any
    #: What sleeps; vLLM itself says only whether anything does.
    _asleep: frozenset[str] = frozenset()

    @abstractmethod
    def complete(self, prompts: list[Prompt], sampling: dict[str, Any]) -> Iterator[list[Row]]:
        """Generates; after each step, the rows that it completed."""

    @abstractmethod
    def abort(self) -> None:
        """Gives up what is being generated."""

    @abstractmethod
    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker."""

    def check_refit(self) -> None:
        """Makes sure that every worker can be refit.

        Raises:
            CapabilityError: A refit would not reach all that one computes with.
        """
        for answer in self.call_workers("rl_refit", encode(Request("check"))):
            if (error := raised(decode(answer, type=Reply))) is not None:
                self.shutdown()
                raise error

    @abstractmethod
    def put_to_sleep(self, level: int) -> None:
        """Gives all memory back, which vLLM does only if all of it is there."""

    @abstractmethod
    def wake_up(self, tags: list[str]) -> None:
        """Takes memory again, which vLLM does only if none of it is there."""

    def wake(self, tags: list[str]) -> None:
        """Takes memory again, where it sleeps."""
        if asleep := sorted(self._asleep & set(tags)):
            self.wake_up(asleep)
            self._asleep -= set(asleep)

    def sleep(self, level: int) -> None:
        """Gives all memory back; on the CPU, where vLLM frees nothing, nothing happens."""
        if current_platform.is_cpu() or self._asleep == _ALL:
            return
        self.wake(sorted(self._asleep))
        self.put_to_sleep(level)
        self._asleep = _ALL

    @property
    def tokens_made(self) -> int:
        """Of the rows that are not complete; a number that moves while the engine works."""
        states = list(self._engine.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states)

    @abstractmethod
    def reset_caches(self) -> bool:
        """Forgets keys and values of earlier prompts."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all workers."""


class _SyncEngine(Engine):
    """vLLM's engine, stepped by the caller."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self.model_config = self._engine.model_config
        self.workers = self._engine.vllm_config.parallel_config.world_size
        self._running: list[str] = []

    def complete(self, prompts: list[Prompt], sampling: dict[str, Any]) -> Iterator[list[Row]]:
        """See :meth:`Engine.complete`."""
        call = secrets.token_hex(4)
        try:
            for row, prompt in enumerate(prompts):
                name, request = f"{call}-{row}", {"prompt_token_ids": prompt.token_ids}
                given = self._engine.add_request(name, request, _params(prompt, sampling))
                self._running.append(given or name)
            while self._engine.has_unfinished_requests():
                yield [_row(output) for output in self._engine.step() if output.finished]
        except BaseException:  # nothing of this call may be left in the next
            self.abort()
            raise
        self._running.clear()

    def abort(self) -> None:
        """See :meth:`Engine.abort`."""
        running, self._running = self._running, []
        self._engine.abort_request(running, internal=True)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See :meth:`Engine.call_workers`."""
        return list(self._engine.collective_rpc(method, args=args))

    def put_to_sleep(self, level: int) -> None:
        """See :meth:`Engine.put_to_sleep`."""
        self._engine.sleep(level)

    def wake_up(self, tags: list[str]) -> None:
        """See :meth:`Engine.wake_up`."""
        self._engine.wake_up(tags)

    def reset_caches(self) -> bool:
        """See :meth:`Engine.reset_caches`."""
        return bool(self._engine.reset_prefix_cache())

    def shutdown(self) -> None:
        """See :meth:`Engine.shutdown`."""
        self._engine.engine_core.shutdown()


class _AsyncEngine(Engine):
    """vLLM's asynchronous engine, in an event loop of its own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._engine: AsyncLLM = self._wait(self._make(arguments))
        self.model_config = self._engine.model_config
        self.workers = self._engine.vllm_config.parallel_config.world_size
        self._task: asyncio.Future[Any] | Any = None

    async def _make(self, arguments: dict[str, Any]) -> AsyncLLM:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def _wait(self, work: Coroutine[Any, Any, Any] | Awaitable[Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(_as_coroutine(work), self._loop).result()

    def complete(self, prompts: list[Prompt], sampling: dict[str, Any]) -> Iterator[list[Row]]:
        """See :meth:`Engine.complete`."""
        done: queue.Queue[Row | BaseException] = queue.Queue()
        call = secrets.token_hex(4)

        async def one(row: int, prompt: Prompt) -> None:
            request = {"prompt_token_ids": prompt.token_ids}
            name = f"{call}-{row}"
            async for output in self._engine.generate(request, _params(prompt, sampling), name):
                if output.finished:
                    done.put(_row(output))

        async def everything() -> None:
            try:
                async with asyncio.TaskGroup() as group:
                    for row, prompt in enumerate(prompts):
                        group.create_task(one(row, prompt))
            except BaseExceptionGroup as errors:
                done.put(errors.exceptions[0])

        self._task = asyncio.run_coroutine_threadsafe(everything(), self._loop)
        left = len(prompts)
        while left:
            try:
                rows = [done.get(timeout=_WAIT_S)]
            except queue.Empty:
                yield []
                continue
            while not done.empty():
                rows.append(done.get())
            if failed := [row for row in rows if isinstance(row, BaseException)]:
                raise failed[0]
            left -= len(rows)
            yield rows  # type: ignore[misc]

    def abort(self) -> None:
        """See :meth:`Engine.abort`."""
        self._task.cancel()
        give_up = time.monotonic() + _ABORT_S
        while left := len(self._engine.output_processor.request_states):  # they end by themselves
            if time.monotonic() > give_up:
                raise DeadlineError(
                    f"vLLM still runs {left} rows {_ABORT_S:.0f} s after they were given up",
                    fix="shut the engine down and build it anew",
                )
            time.sleep(_PAUSE_S)

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """See :meth:`Engine.call_workers`."""
        return list(self._wait(self._engine.collective_rpc(method, args=args)))

    def put_to_sleep(self, level: int) -> None:
        """See :meth:`Engine.put_to_sleep`."""
        self._wait(self._engine.sleep(level))

    def wake_up(self, tags: list[str]) -> None:
        """See :meth:`Engine.wake_up`."""
        self._wait(self._engine.wake_up(tags))

    def reset_caches(self) -> bool:
        """See :meth:`Engine.reset_caches`."""
        return bool(self._wait(self._engine.reset_prefix_cache()))

    def shutdown(self) -> None:
        """See :meth:`Engine.shutdown`."""
        self._wait(_call(self._engine.shutdown))
        self._loop.call_soon_threadsafe(self._loop.stop)


async def _as_coroutine(work: Awaitable[Any]) -> Any:
    return await work


async def _call(function: Callable[[], Any]) -> None:
    function()
