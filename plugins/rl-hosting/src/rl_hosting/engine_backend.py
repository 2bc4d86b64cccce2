"""The base class of hosted backends that have an engine's own keys in their configuration."""

from __future__ import annotations

import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from rl_backends import TAGS
from rl_backends.engine.checkpoint import check_checkpoint
from rl_core.config import check_config
from rl_core.create import create_generation
from rl_core.errors import ConfigError
from rl_hosting._engine_host import SOCKETS
from rl_hosting.generation import HostedGeneration

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_core.interfaces import Cluster, WorkerContext

__all__ = ["EngineBackend"]

#: Keys that an engine's section has, too.
_TWICE = {"torch_dtype": "dtype", "max_model_len": "max_model_len"}


class EngineBackend(HostedGeneration):
    """Generates with an engine in a separate process, which a configuration describes.

    That process has the environment variables that the engine needs (this one keeps its own), and
    ends with this one, however this one ends. Of the section ``NAME_cfg`` this class reads
    ``dtype``, ``load_format``, ``lora``, ``max_model_len``, ``python``, ``refit``, ``sleep_level``,
    ``start_timeout_s`` and ``verbose``.

    Args:
        cluster: Where to run replicas in workers, such as a ``RayVirtualCluster``; the object is
            then their proxy. None runs one engine beside this process.
        config: The configuration, a :attr:`config_type`.

    Attributes:
        backend_name: The backend's name; that of its section begins with it.
        config_type: The TypedDict of its configuration.
        engine_class: ``"module:Class"``, importable in the engine's process.
        engine_title: How the engine's authors write its name.
        preload: Modules to import once for all engines on a CPU.
        sockets: The engine's variable that names a directory for its sockets.
        workers_key: The key of the section for the number of workers of an engine.

    Raises:
        ConfigError: A key or the checkpoint is wrong; keys are checked before anything is loaded.
        IncompatiblePluginError: The installed engine is not one that was tested.
        WorkerDiedError: The engine did not start; the end of its log is in the message.
    """

    backend_name: ClassVar[str]
    config_type: ClassVar[Any]
    engine_class: ClassVar[str]
    engine_title: ClassVar[str]
    preload: ClassVar[tuple[str, ...]] = ()
    sockets: ClassVar[str] = SOCKETS
    workers_key: ClassVar[str]
    initially_resident = TAGS

    def __new__(
        cls, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> Any:
        """A proxy if there is a cluster."""
        if cluster is None:
            return super().__new__(cls)
        return create_generation({"backend": cls.backend_name, **(config or {})}, cluster)

    def __init__(
        self, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        del cluster
        given = {"backend": self.backend_name, **(config or {})}
        checked = check_config(self.config_type, given, what=type(self).__name__)
        section = f"{self.backend_name}_cfg"
        engine: dict[str, Any] = checked.get(section, {})
        for outside, inside in _TWICE.items():
            one, other = checked.get(outside), engine.get(inside)
            if None not in (one, other) and one != other:
                raise ConfigError(
                    f"{outside} is {one!r}, but {section}.{inside} is {other!r}",
                    fix="set only one of them",
                    key=outside,
                )
        if (longest := engine.get("max_model_len")) is not None:
            checked = {**checked, "max_model_len": longest}
        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.check_engine_config(checked, engine, device)
        check_checkpoint(
            checked["model_name"],
            engine.get("load_format", "auto"),
            without_weights="; for random weights, which the first refit replaces, set "
            f'{section}.load_format to "dummy"',
        )
        for key, value in {"load_format": "dummy", "sleep_level": 2, "refit": False}.items():
            if engine.get("lora") is not None and engine.get(key) == value:
                raise ConfigError(
                    f"{section}.{key} is {value!r}, but an engine with {section}.lora must have "
                    "its checkpoint's base weights and take refits, which send only adapters",
                    fix=f"leave {section}.{key} out, or leave {section}.lora out and refit merged "
                    "weights",
                    key=f"{section}.{key}",
                )
        self.sleep_level = engine.get("sleep_level", 1)
        workers = self.worker_count(engine)
        if device == "cuda" and torch.cuda.device_count() < workers:
            raise ConfigError(
                f"{section}.{self.workers_key} is {workers}, but the number of GPUs that this "
                f"process sees is {torch.cuda.device_count()}",
                fix=f"set it to {torch.cuda.device_count()} or less; an engine in a bundle of a "
                "RayVirtualCluster sees one GPU",
                key=f"{section}.{self.workers_key}",
            )
        super().__init__(
            checked,
            engine=self.engine_class,
            name=f"{self.engine_title} with {checked['model_name']}",
            environment=self.engine_environment(engine, device, workers),
            python=engine.get("python", sys.executable),
            verbose=engine.get("verbose", False),
            preload=self.preload if device == "cpu" else (),
            sockets=self.sockets,
            start_timeout_s=engine.get("start_timeout_s", 600.0),
            without_refits="" if engine.get("refit", True) else f"{section}.refit False",
        )
        self._sleeps: bool = self.engine_facts["sleeps"]
        self.engine_version: str = self.engine_facts["version"]

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`GenerationBackend.from_config`."""
        del worker
        made: Self = cls(None, config)
        return made

    # -- what a plugin defines --------------------------------------------------------------------

    @abstractmethod
    def check_engine_config(
        self, config: Mapping[str, Any], engine: Mapping[str, Any], device: str
    ) -> None:
        """Refuses what the engine would not do as configured. Imports no engine.

        Args:
            config: The checked configuration.
            engine: Its section.
            device: Where the engine runs, ``"cpu"`` or ``"cuda"``.

        Raises:
            ConfigError: Names the key.
        """

    @abstractmethod
    def engine_environment(
        self, engine: Mapping[str, Any], device: str, workers: int
    ) -> dict[str, str]:
        """All variables of the engine's process."""

    def worker_count(self, engine: Mapping[str, Any]) -> int:
        """How many workers an engine of that section has."""
        return int(engine.get(self.workers_key, 1))

    # -- lifecycle --------------------------------------------------------------------------------

    def on_sleep(self, tags: frozenset[str]) -> None:
        """See :meth:`HostedGeneration.on_sleep`; at level 2 the weights are dropped."""
        super().on_sleep(tags)
        if self.sleep_level == 2 and self._sleeps and "weights" in tags:
            self.weights_dropped()

    @property
    def requires_kv_scale_sync(self) -> bool:
        """See :attr:`GenerationInterface.requires_kv_scale_sync`."""
        return bool(self.engine_facts["fp8_cache"])
