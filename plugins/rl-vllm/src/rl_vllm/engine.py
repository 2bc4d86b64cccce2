"""vLLM itself, behind the few calls that the host makes. Imported in the engine's process only."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import queue
import secrets
import threading
import traceback
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from rl_vllm import cpu_torch  # noqa: F401 # isort: skip - before vLLM: what it leaves out
from vllm import EngineArgs, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.config import get_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.llm_engine import LLMEngine

from rl_backends import Completion, FailedRow
from rl_backends.engine.checkpoint import cannot_load, check_positions, load_tokenizer
from rl_backends.model_files import model_facts
from rl_core.errors import ConfigError, PluginError, RLError
from rl_hosting import Engine
from rl_vllm.adapters import lora_arguments
from rl_vllm.private import check_version, engine_version
from rl_vllm.stop_strings import STOP_STRINGS, watch_stop_strings

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

    from vllm.outputs import RequestOutput

    from rl_backends import Row

__all__ = ["VllmEngine"]

#: Keys of ``vllm_cfg`` that are ours.
_OURS = {
    "async_engine",
    "dtype",
    "engine_args",
    "lora",
    "python",
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
#: With AMX vLLM would compute attention over latents with a packed copy of weights, of 16 bits.
_LATENT_ON_CPU = (
    {"attention_backend": "CPU_MLA"} if "CPU_MLA" in AttentionBackendEnum.__members__ else {}
)
#: vLLM's rows and tokens of a step are by default those of its class LLM, for throughput.
_USE = UsageContext.LLM_CLASS
#: Seconds that a step of the asynchronous engine waits for a row.
_WAIT_S = 0.05
#: Characters of vLLM's own words in an error.
_LONGEST = 800
_ALL = frozenset({"weights", "kv_cache"})


class VllmEngine(Engine):
    """One vLLM engine.

    Args:
        arguments: Of vLLM.
    """

    _llm: Any
    #: What sleeps; vLLM itself says only whether anything does.
    _asleep: frozenset[str] = frozenset()
    #: Whether refits bring adapters.
    _adapters = False

    @classmethod
    def start(cls, config: Mapping[str, Any]) -> VllmEngine:
        """Loads a model.

        Args:
            config: A checked :class:`rl_vllm.config.VllmConfig`.

        Raises:
            ConfigError: vLLM does not know an engine argument, or refuses the configuration; or a
                part of the checkpoint cannot be read, or the model has no pad token.
            IncompatiblePluginError: This vLLM is not one that was tested.
            CapabilityError: A refit would not reach all that it computes with.
        """
        check_version()
        given = config.get("vllm_cfg", {})
        if current_platform.is_cpu() and given.get("pipeline_parallel_size", 1) > 1:
            raise ConfigError(
                f"vLLM {engine_version()} loses requests in a pipeline on the CPU (a KeyError in "
                "its scheduler)",
                fix="leave vllm_cfg.pipeline_parallel_size out; tensor_parallel_size works",
                key="vllm_cfg.pipeline_parallel_size",
            )
        try:
            trust = config.get("trust_remote_code", False)
            model_config = get_config(config["model_name"], trust)
        except Exception as error:  # whatever classes of configurations raise
            raise cannot_load("config.json", config, error) from error
        tokenizer = load_tokenizer(config)
        watch_stop_strings(tokenizer)
        arguments = _arguments(config, model_config, with_tokenizer=tokenizer is not None)
        # By default the longest row of vLLM is the longest that has the first positions.
        check_positions(model_config.get_text_config(), arguments.get("max_model_len") or 0)
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        if unknown := sorted(set(arguments) - known):
            raise ConfigError(
                f"vLLM {engine_version()} has no engine argument {unknown[0]!r}",
                fix="leave it out",
                key=f"vllm_cfg.engine_args.{unknown[0]}",
            )
        kind: Callable[[dict[str, Any]], VllmEngine]
        kind = _AsyncEngine if given.get("async_engine") else _SyncEngine
        try:
            if current_platform.is_cpu():
                made = EngineArgs(**arguments).create_model_config()
                if made.is_hybrid:  # vLLM caches their prefixes only where it splits prompts
                    arguments.setdefault("enable_prefix_caching", False)
                if made.use_mla:
                    arguments = {**_LATENT_ON_CPU, **arguments}
            engine = kind(arguments)
        except Exception as error:
            raise _refusal(error, config) from error
        engine._adapters = given.get("lora") is not None
        try:
            if given.get("refit", True):
                engine.check_refits()
            if current_platform.is_cpu():
                engine.check_rows(config["model_name"])
        except RLError:
            engine.shutdown()
            raise
        loaded = engine._llm.model_config
        text = loaded.hf_text_config
        facts = model_facts(
            config,
            vocab_size=int(text.vocab_size),
            max_model_len=int(loaded.max_model_len),
            text=text,
            generation=loaded.try_get_generation_config(),
            tokenizer=tokenizer,
        )
        engine.facts = dataclasses.asdict(facts) | {
            "eos_token_ids": list(facts.eos_token_ids),
            "has_tokenizer": tokenizer is not None,
            "sleeps": not current_platform.is_cpu(),
            "workers": engine._llm.vllm_config.parallel_config.world_size,
            "fp8_cache": str(arguments.get("kv_cache_dtype", "auto")).startswith("fp8"),
            "version": engine_version(),
        }
        return engine

    def call_workers(self, frame: bytes) -> list[bytes]:
        """See :meth:`Engine.call_workers`."""
        return list(self.wait_for(self._llm.collective_rpc("rl_refit", args=(frame,))))

    @abstractmethod
    def wait_for(self, found: Any) -> Any:
        """What a call of vLLM returned, or what it will return if that is awaitable."""

    def wake(self, tags: Sequence[str]) -> None:
        """See :meth:`Engine.wake`; vLLM itself fails if memory that it is to take is there."""
        if asleep := sorted(self._asleep & set(tags)):
            self.wait_for(self._llm.wake_up(asleep))
            self._asleep -= set(asleep)

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """Frees all memory, which vLLM does only if all of it is there; none on the CPU."""
        del tags
        if current_platform.is_cpu() or self._asleep == _ALL:
            return
        self.wake(sorted(self._asleep))
        self.wait_for(self._llm.sleep(level))
        self._asleep = _ALL

    def reset_caches(self) -> bool:
        """See :meth:`Engine.reset_caches`."""
        return bool(self.wait_for(self._llm.reset_prefix_cache()))

    def lora_request(self) -> LoRARequest | None:
        """What a row that begins now is to be decoded with, besides the weights."""
        adapter, version = self.serving_adapter() if self._adapters else (0, 0)
        # vLLM keys its prefix cache by the name, and looks for no file of an adapter that it has.
        return LoRARequest(f"policy@{version}", adapter, "refit") if adapter else None

    def tokens_made(self) -> int:
        """See :meth:`Engine.tokens_made`; of the rows that are not complete."""
        states = list(self._llm.output_processor.request_states.values())
        return sum(state.detokenizer.num_output_tokens() for state in states)


class _SyncEngine(VllmEngine):
    """vLLM's engine, stepped by the host."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._llm = LLMEngine.from_engine_args(EngineArgs(**arguments), usage_context=_USE)
        self._names: dict[int, str] = {}  # vLLM's own, by the keys of rows
        self._refused: list[FailedRow] = []

    def wait_for(self, found: Any) -> Any:
        """See :meth:`VllmEngine.wait_for`: nothing is awaited here."""
        return found

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`Engine.submit`."""
        adapter = self.lora_request()
        for row in rows:
            name, request = str(row.key), {"prompt_token_ids": row.token_ids}
            try:
                given = self._llm.add_request(name, request, _params(row), lora_request=adapter)
            except Exception as error:  # of this row alone
                self._refused.append(FailedRow(row.key, error))
            else:
                self._names[row.key] = given or name

    def step(self) -> list[Completion | FailedRow]:
        """See :meth:`Engine.step`."""
        done: list[Completion | FailedRow] = [*self._refused]
        self._refused.clear()
        if self._llm.has_unfinished_requests():
            done += [_done(output) for output in self._llm.step() if output.finished]
        for one in done:
            self._names.pop(one.row, None)
        return done

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`Engine.cancel`."""
        names = [self._names.pop(key) for key in keys if key in self._names]
        self._llm.abort_request(names, internal=True)
        if not self._names:
            while self._llm.has_unfinished_requests():
                self._llm.step()

    def shutdown(self) -> None:
        """See :meth:`Engine.shutdown`."""
        gc.collect = _nothing  # vLLM collects twice, a second each; this process ends anyway
        self._llm.engine_core.shutdown()


class _AsyncEngine(VllmEngine):
    """vLLM's asynchronous engine, in an event loop of its own."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()

        async def make() -> AsyncLLM:  # which looks for the running loop
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), usage_context=_USE)

        self._llm: AsyncLLM = self.wait_for(make())
        self._ended: queue.SimpleQueue[Completion | FailedRow] = queue.SimpleQueue()
        self._tasks: dict[int, Any] = {}  # by the keys of rows

    def wait_for(self, found: Awaitable[Any]) -> Any:
        """See :meth:`VllmEngine.wait_for`."""

        async def awaited() -> Any:
            return await found

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def submit(self, rows: Sequence[Row]) -> None:
        """See :meth:`Engine.submit`."""
        adapter = self.lora_request()
        for row in rows:
            task = asyncio.run_coroutine_threadsafe(self._complete(row, adapter), self._loop)
            self._tasks[row.key] = task

    async def _complete(self, row: Row, adapter: LoRARequest | None) -> None:
        request, params, name = {"prompt_token_ids": row.token_ids}, _params(row), str(row.key)
        try:
            async for output in self._llm.generate(request, params, name, lora_request=adapter):
                if output.finished:
                    self._ended.put(_done(output))
        except Exception as error:
            self._ended.put(FailedRow(row.key, error))

    def step(self) -> list[Completion | FailedRow]:
        """See :meth:`Engine.step`."""
        found: list[Completion | FailedRow] = []
        try:
            while True:
                one = self._ended.get(timeout=0.0 if found else _WAIT_S)
                self._tasks.pop(one.row, None)
                found.append(one)
        except queue.Empty:
            return found

    def cancel(self, keys: Collection[int]) -> None:
        """See :meth:`Engine.cancel`."""
        for key in keys:
            if key in self._tasks:
                self._tasks.pop(key).cancel()

    def shutdown(self) -> None:
        """See :meth:`Engine.shutdown`."""
        gc.collect = _nothing  # vLLM collects twice, a second each; this process ends anyway

        async def shut_down() -> None:
            self._llm.shutdown()

        self.wait_for(shut_down())
        self._loop.call_soon_threadsafe(self._loop.stop)


def _arguments(
    config: Mapping[str, Any], model_config: Any, *, with_tokenizer: bool
) -> dict[str, Any]:
    """The engine arguments of vLLM."""
    given = config.get("vllm_cfg", {})
    cpu = current_platform.is_cpu()
    dtype = given.get("dtype") or config.get("torch_dtype") or "auto"
    lora, model, trust = (
        given.get("lora"),
        config["model_name"],
        config.get("trust_remote_code", False),
    )
    text = model_config.get_text_config()
    if dtype == "auto":  # vLLM's own "auto" would round float32 checkpoints
        found = getattr(text, "dtype", None) or getattr(model_config, "dtype", "auto")
        dtype = str(found or "auto").removeprefix("torch.")
    chosen = {
        "model": model,
        "dtype": dtype,
        "trust_remote_code": trust,
        "skip_tokenizer_init": not with_tokenizer,
        "generation_config": "vllm",
        "logprobs_mode": f"{config.get('logprobs_mode', 'processed')}_logprobs",
        "worker_extension_cls": "rl_vllm.worker.RefitExtension",
        "disable_log_stats": True,
        # Prompts have text only: vision towers and image processors are not loaded.
        **({} if text is model_config else {"language_model_only": True}),
        "seed": secrets.randbits(31),
        **(_ON_CPU if cpu else {}),
        "max_model_len": config.get("max_model_len"),
        **{key: value for key, value in given.items() if key not in _OURS},
        **(lora_arguments(model, dtype, lora, trust=trust) if lora is not None else {}),
        **given.get("engine_args", {}),
    }
    if not cpu:
        chosen.setdefault("enable_sleep_mode", True)
    return {key: value for key, value in chosen.items() if value is not None}


def _refusal(error: Exception, config: Mapping[str, Any]) -> RLError:
    """What it means that vLLM did not start."""
    if isinstance(error, RLError):
        return error
    name, text = config["model_name"], f"{type(error).__name__}: {error}"[:_LONGEST]
    frames = traceback.extract_tb(error.__traceback__)
    if any("model_loader" in frame.filename for frame in frames):
        return ConfigError(
            f"vLLM cannot load the weights of {name}: {text}",
            fix="if config.json and weights are of different models, write both again with "
            f"save_pretrained; if not, use a model that vLLM {engine_version()} supports",
            key="model_name",
        )
    if isinstance(error, ValueError | NotImplementedError):  # also of vLLM's models of settings
        model = "architecture" in text
        return ConfigError(
            f"vLLM {engine_version()} refuses {'' if model else 'the configuration of '}{name}: "
            f"{text}",
            fix="use a model that vLLM supports"
            if model
            else "correct the key of vllm_cfg that the text names; if it names none, use a model "
            "that vLLM supports",
            key="model_name" if model else "vllm_cfg",
        )
    return PluginError(
        f"vLLM {engine_version()} did not start with {name}: {text}",
        fix="look at the end of the engine's log; vllm_cfg.verbose=True shows all of it",
    )


def _params(row: Row) -> SamplingParams:
    sampling, greedy = row.sampling, row.sampling.greedy
    return SamplingParams(
        temperature=0.0 if greedy else sampling.temperature,
        top_k=0 if greedy else sampling.top_k,
        top_p=1.0 if greedy else sampling.top_p,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=list(sampling.stop_token_ids),
        # The end-of-sequence tokens are among the stop tokens.
        ignore_eos=True,
        extra_args={STOP_STRINGS: row.stop_strings} if row.stop_strings else None,
        detokenize=False,
        max_tokens=row.budget,
        seed=row.seed if row.seeded and not greedy else None,
        logprobs=0,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _done(output: RequestOutput) -> Completion:
    done, key = output.outputs[0], int(output.request_id.partition("-")[0])
    ids = list(done.token_ids)
    found = done.logprobs or []
    logprobs = [found[i][token].logprob for i, token in enumerate(ids)]
    # A log-prob of more than 0 is a rounding error; NaN stays, and fails the row.
    return Completion(key, ids, [min(x, 0.0) for x in logprobs], done.finish_reason == "length")


def _nothing(generation: int = 2) -> int:
    del generation
    return 0
