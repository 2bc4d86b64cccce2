"""The vLLM generation backend: this process's side of an engine in a process of its own."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_backends import TAGS
from rl_backends.engine.checkpoint import check_checkpoint
from rl_core.config import check_config
from rl_core.create import create_generation
from rl_core.errors import CapabilityError, ConfigError
from rl_hosting import HostedGeneration
from rl_vllm.config import VllmConfig
from rl_vllm.engine_args import check_engine_args
from rl_vllm.environment import PRELOAD, SOCKETS, engine_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Cluster, WorkerContext

__all__ = ["VllmGeneration"]

_START_S = 600.0
_DUMMY = '; for random weights, which the first refit replaces, set vllm_cfg.load_format to "dummy"'
#: vLLM raises what is lower to the first, and refuses what is higher than the second.
_TEMPERATURES = 0.01, 2.0


class VllmGeneration(HostedGeneration):
    """Generates with vLLM, in a process of its own.

    That process has the environment variables that vLLM needs (this one keeps its own), and ends
    with this one, however this one ends.

    Args:
        cluster: Where to run replicas in workers, such as a ``RayVirtualCluster``; the object is
            then their proxy. None runs one engine beside this process.
        config: A :class:`~rl_vllm.config.VllmConfig`.

    Raises:
        ConfigError: A key or the checkpoint is wrong; keys are checked before anything is loaded.
        IncompatiblePluginError: The installed vLLM is not one that was tested.
        WorkerDiedError: The engine did not start; the end of its log is in the message.
    """

    initially_resident = TAGS

    def __new__(
        cls, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> Any:
        """A proxy if there is a cluster."""
        if cluster is None:
            return super().__new__(cls)
        return create_generation({"backend": "vllm", **(config or {})}, cluster)

    def __init__(
        self, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        del cluster
        given = {"backend": "vllm", **(config or {})}
        checked = _checked(check_config(VllmConfig, given, what=type(self).__name__))
        engine = checked.get("vllm_cfg", {})
        verbose = engine.get("verbose", False)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        check_engine_args(engine, device)
        load_format = engine.get("load_format", "auto")
        check_checkpoint(checked["model_name"], load_format, without_weights=_DUMMY)
        self.sleep_level = engine.get("sleep_level", 1)
        sizes = (engine.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline"))
        workers = math.prod(sizes)
        if device == "cuda" and torch.cuda.device_count() < workers:
            raise ConfigError(
                f"{workers} workers want a GPU each, and this process sees "
                f"{torch.cuda.device_count()}",
                fix="without a cluster, all of a host's GPUs are seen; a bundle of a "
                "RayVirtualCluster has one, so that replicas on it have one worker",
                key="vllm_cfg.tensor_parallel_size",
            )
        super().__init__(
            checked,
            engine="rl_vllm.engine:VllmEngine",
            name=f"vLLM with {checked['model_name']}",
            environment=engine_environment(device, workers=workers, verbose=verbose),
            python=engine.get("python", sys.executable),
            verbose=verbose,
            preload=PRELOAD if device == "cpu" else (),
            sockets=SOCKETS,
            start_timeout_s=engine.get("start_timeout_s", _START_S),
            without_refits="" if engine.get("refit", True) else "vllm_cfg.refit False",
        )
        self._sleeps: bool = self.engine_facts["sleeps"]
        self.engine_version: str = self.engine_facts["version"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`GenerationBackend.from_config`."""
        del worker
        made: Self = cls(None, config)
        return made

    # -- lifecycle --------------------------------------------------------------------------------

    def on_sleep(self, tags: frozenset[str]) -> None:
        """See :meth:`HostedGeneration.on_sleep`; at level 2 the weights are gone."""
        super().on_sleep(tags)
        if self.sleep_level == 2 and self._sleeps:
            self.weights_dropped()

    def tags_that_sleep_with(self, tags: frozenset[str]) -> frozenset[str]:
        """See :meth:`GenerationBackend.tags_that_sleep_with`.

        Raises:
            CapabilityError: Only the cache is to sleep; vLLM gives back everything or nothing.
        """
        if not self._sleeps:
            return tags
        if "weights" not in tags:
            raise CapabilityError(
                "vLLM does not put its cache to sleep without its weights",
                fix='give finish_generation the tag "weights", too, or none',
                capability="sleep",
            )
        return TAGS

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return bool(self.engine_facts["fp8_cache"])


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """What a TypedDict cannot say.

    Raises:
        ConfigError: Two keys that mean the same disagree, or vLLM would change a temperature.
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
