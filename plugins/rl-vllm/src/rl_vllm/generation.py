"""The vLLM generation backend: this process's side of an engine in a process of its own."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rl_core.backends import Completion, GenerationBackend, ModelFacts
from rl_core.backends.generation import TAGS, tags_of
from rl_core.errors import CapabilityError, ConfigError, DataError, PluginError
from rl_core.plugins.config import check_config
from rl_core.plugins.factory import create_generation
from rl_vllm.config import VllmConfig
from rl_vllm.environment import engine_environment
from rl_vllm.process import EngineProcess
from rl_vllm.receivers import WorkerReceivers
from rl_vllm.remote_sink import RemoteSink
from rl_vllm.wire import Prompt

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rl_core.backends import PromptBatch, SamplingParams
    from rl_core.backends.receivers import Receiver
    from rl_core.cluster import RayVirtualCluster
    from rl_core.interfaces import WeightSink, WorkerContext
    from rl_core.refit.turns import TurnLock

__all__ = ["VllmGeneration"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_START_S = 600.0
_SEEDS = (1 << 63) - 1
#: vLLM raises what is lower to the first, and refuses what is higher than the second.
_TEMPERATURES = 0.01, 2.0
#: Seconds for calls that wake, sleep or reset.
_CALL_S = 120.0


class VllmGeneration(GenerationBackend):
    """Generates with vLLM, in a process of its own.

    That process has the environment variables that vLLM needs (this one keeps its own), and ends
    with this one, however this one ends.

    Args:
        cluster: Where to run replicas as Ray actors; the object is then their proxy. None runs
            one engine beside this process.
        config: A :class:`~rl_vllm.config.VllmConfig`.

    Raises:
        ConfigError: A key or the checkpoint is wrong; keys are checked before anything is loaded.
        IncompatiblePluginError: The installed vLLM is not one that was tested.
        WorkerDiedError: The engine did not start; the end of its log is in the message.
    """

    resident_at_first = TAGS

    def __new__(
        cls, cluster: RayVirtualCluster | None = None, config: Mapping[str, Any] | None = None
    ) -> Any:
        """A proxy if there is a cluster."""
        if cluster is None:
            return super().__new__(cls)
        return create_generation({"backend": "vllm", **(config or {})}, cluster)

    def __init__(
        self, cluster: RayVirtualCluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        del cluster
        given = {"backend": "vllm", **(config or {})}
        checked = _checked(check_config(VllmConfig, given, what=type(self).__name__))
        engine = checked.get("vllm_cfg", {})
        verbose, device = engine.get("verbose", False), _device()
        self._sleep_level = engine.get("sleep_level", 1)
        _check_devices(device, _workers(engine))
        self._process = EngineProcess(
            f"vLLM with {checked['model_name']}",
            engine_environment(device, workers=_workers(engine), verbose=verbose),
            verbose=verbose,
            forked=device == "cpu",
        )
        try:
            facts = self._process.start(checked, engine.get("start_timeout_s", _START_S))
            self.receiver_count = facts["workers"]
            self._sleeps: bool = facts["sleeps"]
            self._has_tokenizer: bool = facts["has_tokenizer"]
            self.engine_version: str = facts["version"]
            self._fp8_cache: bool = facts["fp8_cache"]
            super().__init__(
                checked,
                ModelFacts(
                    facts["pad_token_id"],
                    tuple(facts["eos_token_ids"]),
                    facts["vocab_size"],
                    facts["max_model_len"],
                ),
            )
        except BaseException:
            self._process.close()
            raise

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`GenerationBackend.from_config`."""
        del worker
        made: Self = cls(None, config)
        return made

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    # -- generation -------------------------------------------------------------------------------

    def complete(self, prompts: PromptBatch, sampling: SamplingParams) -> Iterator[Completion]:
        """See :meth:`GenerationBackend.complete`."""
        self._check_stop_strings(prompts)
        # vLLM takes a seed of -1 for none; with its highest bit cleared it is still one of its own.
        seeds: list[int | None] = [None] * len(prompts)
        if prompts.seeded:
            seeds = [seed & _SEEDS for seed in prompts.seeds.tolist()]
        rows = [
            Prompt(prompts.token_ids(row), budget, seed, list(stops))
            for row, (budget, seed, stops) in enumerate(
                zip(prompts.budgets.tolist(), seeds, prompts.stop_strings, strict=True)
            )
        ]
        how = {
            "greedy": sampling.greedy,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop_token_ids": list(sampling.stop_token_ids),
        }
        for done in self._process.stream("generate", prompts=rows, sampling=how):
            yield Completion(done.row, done.token_ids, done.logprobs, done.truncated)

    def _check_stop_strings(self, prompts: PromptBatch) -> None:
        stopped = [row for row, strings in enumerate(prompts.stop_strings) if strings]
        if stopped and not self._has_tokenizer:
            raise DataError(
                f"row {stopped[0]} has stop strings, and {self._process.name} has no tokenizer",
                fix="save the tokenizer beside the model, or use stop_token_ids",
            )

    # -- lifecycle --------------------------------------------------------------------------------

    def on_wake(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_wake`."""
        self._process.call("wake", _CALL_S, tags=sorted(tags))

    def on_sleep(self, tags: frozenset[str]) -> None:
        """See :meth:`GenerationBackend.on_sleep`."""
        self._process.call("sleep", _CALL_S, level=self._sleep_level)
        if self._sleep_level == 2 and self._sleeps:
            self._workers.dropped()

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GenerationInterface.finish_generation`.

        Raises:
            CapabilityError: Only the cache is to sleep; vLLM gives back everything or nothing.
        """
        if not self._sleeps:
            return super().finish_generation(*args, **kwargs)
        if "weights" not in tags_of(args, kwargs):
            raise CapabilityError(
                "vLLM does not put its cache to sleep without its weights",
                fix='give finish_generation the tag "weights", too, or none',
                capability="sleep",
            )
        return super().finish_generation(tags=TAGS)

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

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return self._fp8_cache

    def invalidate_kv_cache(self) -> bool:
        """Forgets the keys and values of prompts seen so far.

        Raises:
            PluginError: vLLM refused.
        """
        if not self._process.call("reset_caches", _CALL_S):
            raise PluginError(
                f"{self._process.name} did not forget its prefix cache",
                fix="wait until nothing is being generated",
            )
        return True


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """What a TypedDict cannot say.

    Raises:
        ConfigError: Two keys that mean the same disagree, or there is no such checkpoint.
    """
    engine = config.get("vllm_cfg", {})
    for outside, inside in (("torch_dtype", "dtype"), ("max_model_len", "max_model_len")):
        one, other = config.get(outside), engine.get(inside)
        if None not in (one, other) and one != other:
            raise ConfigError(
                f"{outside} is {one!r} and vllm_cfg.{inside} is {other!r}",
                fix="give one of them",
                key=outside,
            )
    name = config["model_name"]
    if not Path(name).is_dir() and (not _HUB_NAME.fullmatch(name) or name.startswith(".")):
        raise ConfigError(
            f"the model directory {name} does not exist",
            fix="set model_name to an existing directory, or to a name on the hub",
            key="model_name",
        )
    if Path(name).is_dir() and not (Path(name) / "config.json").exists():
        raise ConfigError(
            f"{name} is not a Hugging Face checkpoint: it has no config.json",
            fix="point model_name at the directory that save_pretrained wrote",
            key="model_name",
        )
    temperature = config.get("temperature", 1.0)
    if 0 < temperature < _TEMPERATURES[0] or temperature > _TEMPERATURES[1]:
        raise ConfigError(
            f"temperature is {temperature}; vLLM samples from {_TEMPERATURES[0]} to "
            f"{_TEMPERATURES[1]} as asked, and otherwise not",
            fix="use a temperature in that range, or greedy=True",
            key="temperature",
        )
    inside = engine.get("max_model_len")
    return config if inside is None else {**config, "max_model_len": inside}


def _workers(engine: Mapping[str, Any]) -> int:
    sizes = (engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
    return math.prod(sizes)


def _check_devices(device: str, workers: int) -> None:
    import torch

    if device == "cuda" and torch.cuda.device_count() < workers:
        raise ConfigError(
            f"{workers} workers want a GPU each, and this process sees {torch.cuda.device_count()}",
            fix="without a cluster, all of a host's GPUs are seen; a bundle of a RayVirtualCluster "
            "has one, so that replicas on it have one worker",
            key="vllm_cfg.tensor_parallel_size",
        )


def _device() -> str:
    """Where vLLM will run: on what torch sees here."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
