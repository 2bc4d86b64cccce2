"""The SGLang generation backend: this process's side of an engine in processes of its own."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Self

import torch

from rl_backends import TAGS
from rl_backends.engine.checkpoint import check_checkpoint
from rl_core.config import check_config
from rl_core.create import create_generation
from rl_core.errors import ConfigError
from rl_hosting import HostedGeneration
from rl_sglang.config import SglangConfig
from rl_sglang.engine_args import check_engine_args
from rl_sglang.environment import PRELOAD, SOCKETS, engine_environment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Cluster, WorkerContext

__all__ = ["SglangGeneration"]

_START_S = 600.0
_DUMMY = (
    '; for random weights, which the first refit replaces, set sglang_cfg.load_format to "dummy"'
)
#: SGLang takes the argmax at what is lower.
_COLDEST = 1e-6


class SglangGeneration(HostedGeneration):
    """Generates with SGLang, in processes of its own.

    These have the environment variables that SGLang needs (this one keeps its own), and end with
    this one, however this one ends. SGLang kills all of its processes when one of them fails; this
    one sees that as a :class:`~rl_core.errors.WorkerDiedError` with the end of their log.

    Args:
        cluster: Where to run replicas in workers, such as a ``RayVirtualCluster``; the object is
            then their proxy. None runs one engine beside this process.
        config: A :class:`~rl_sglang.config.SglangConfig`.

    Raises:
        ConfigError: A key or the checkpoint is wrong; keys are checked before anything is loaded.
        IncompatiblePluginError: The installed SGLang is not one that was tested.
        WorkerDiedError: The engine did not start; the end of its log is in the message.
    """

    initially_resident = TAGS

    def __new__(
        cls, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> Any:
        """A proxy if there is a cluster."""
        if cluster is None:
            return super().__new__(cls)
        return create_generation({"backend": "sglang", **(config or {})}, cluster)

    def __init__(
        self, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        del cluster
        given = {"backend": "sglang", **(config or {})}
        checked = _checked(check_config(SglangConfig, given, what=type(self).__name__))
        engine = checked.get("sglang_cfg", {})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        check_engine_args(engine, device)
        load_format = engine.get("load_format", "auto")
        check_checkpoint(checked["model_name"], load_format, without_weights=_DUMMY)
        self.sleep_level = engine.get("sleep_level", 1)
        workers = engine.get("tp_size", 1)
        if device == "cuda" and torch.cuda.device_count() < workers:
            raise ConfigError(
                f"{workers} workers want a GPU each, and this process sees "
                f"{torch.cuda.device_count()}",
                fix="without a cluster, all of a host's GPUs are seen; a bundle of a "
                "RayVirtualCluster has one, so that replicas on it have one worker",
                key="sglang_cfg.tp_size",
            )
        super().__init__(
            checked,
            engine="rl_sglang.engine:SglangEngine",
            name=f"SGLang with {checked['model_name']}",
            environment=engine_environment(device, workers=workers),
            python=engine.get("python", sys.executable),
            verbose=engine.get("verbose", False),
            preload=PRELOAD if device == "cpu" else (),
            sockets=SOCKETS,
            start_timeout_s=engine.get("start_timeout_s", _START_S),
            without_refits="" if engine.get("refit", True) else "sglang_cfg.refit False",
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
        if self.sleep_level == 2 and self._sleeps and "weights" in tags:
            self.weights_dropped()

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return bool(self.engine_facts["fp8_cache"])


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    """What a TypedDict cannot say.

    Raises:
        ConfigError: Two keys that mean the same disagree, or SGLang would do something else.
    """
    engine = config.get("sglang_cfg", {})
    for outside, inside in (("torch_dtype", "dtype"), ("max_model_len", "max_model_len")):
        one, other = config.get(outside), engine.get(inside)
        if None not in (one, other) and one != other:
            raise ConfigError(
                f"{outside} is {one!r} and sglang_cfg.{inside} is {other!r}",
                fix="give one of them",
                key=outside,
            )
    if 0 < config.get("temperature", 1.0) < _COLDEST:
        raise ConfigError(
            f"temperature is {config['temperature']}; below {_COLDEST} SGLang takes the argmax",
            fix="use a higher temperature, or greedy=True",
            key="temperature",
        )
    if config.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigError(
            "repetition_penalty is refused: SGLang penalises what was generated, not the prompt, "
            "so that the same number means something else",
            fix="leave it out, or use another backend",
            key="repetition_penalty",
        )
    inside = engine.get("max_model_len")
    return config if inside is None else {**config, "max_model_len": inside}
