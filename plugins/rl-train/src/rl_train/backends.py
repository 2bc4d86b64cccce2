"""The policy and the engine of a run: their placement, refits, and the restart of an engine."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from rl_core import create_generation, create_policy, refit
from rl_core.errors import BrokenPluginError, ConfigError
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from rl_core import ColocatablePolicyInterface, GenerationInterface
    from rl_core.interfaces import Cluster
    from rl_core.weights.report import RefitReport
    from rl_train.config import RunConfig

__all__ = ["Backends"]

#: Clusters by the word of the configuration, and the distribution that has each.
_CLUSTERS = {
    "local": ("rl_hosting:LocalCluster", "rl-hosting"),
    "ray": ("rl_ray:RayVirtualCluster", "rl-ray"),
}


class Backends:
    """Starts a run's policy, maybe from a checkpoint, and, for GRPO, its engine; ends both.

    Attributes:
        policy: What trains.
        generation: The engine, for GRPO; a new object after :meth:`start_engine`.
        report: Of the newest refit.
    """

    policy: ColocatablePolicyInterface
    generation: GenerationInterface
    report: RefitReport

    def __init__(self, config: RunConfig, *, resume_from: str | None = None) -> None:
        self._config = config
        self._stack, self._engine = ExitStack(), ExitStack()
        colocated = config["generation"].get("colocated") or {"enabled": True}
        self._colocated: bool = colocated["enabled"]
        with ExitStack() as failed:
            failed.callback(self.close)
            policy = dict(config["policy"])
            if resume_from is not None:
                policy["resume_from"] = resume_from
            self.policy = create_policy(policy, self._cluster("policy", self._stack))
            self._stack.callback(self.policy.shutdown)
            if config["method"] == "grpo":
                self.start_engine()
            failed.pop_all()

    def start_engine(self) -> None:
        """Starts the engine, or another one in the place of one that died."""
        with suppress(Exception):  # one that died may not end in order
            self._engine.close()
        cluster = self._cluster("generation", self._engine)
        self.generation = create_generation(self._config["generation"], cluster)
        self._engine.callback(self.generation.shutdown)

    def refit(self, version: int) -> RefitReport:
        """Gives the policy's weights to the engine, as the given version."""
        if self._colocated:
            self.policy.offload_before_refit()
        options: dict[str, Any] = {"version": version, **self._config["refit"]}
        self.report = refit(self.policy, self.generation, **options)
        if self._colocated:
            self.policy.offload_after_refit()
        return self.report

    def close(self) -> None:
        """Ends the engine, the policy and their workers. Idempotent."""
        with self._stack:
            self._engine.close()

    def _cluster(self, kind: str, stack: ExitStack) -> Cluster | None:
        placement: Any = self._config["placement"]
        place = placement.get(kind, {})
        where, workers = place.get("where", "here"), place.get("workers", 1)
        if where == "here":
            return None
        name, distribution = _CLUSTERS[where]
        key = f"placement.{kind}"
        try:
            cluster: Any = load_object(name)
        except BrokenPluginError as error:
            if not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise ConfigError(
                f"{key}.where is {where!r}, which {distribution} provides",
                fix=f"install {distribution}, or leave {key} out",
                key=f"{key}.where",
            ) from None
        if where == "local" and isinstance(workers, list):
            raise ConfigError(
                f"{key}.workers is {workers}, a list with one number for each node, but all "
                "workers are on this host",
                fix=f"give one number, or set {key}.where to ray",
                key=f"{key}.workers",
            )
        if where == "local":
            made = cluster(workers, devices=place.get("devices"))
        else:
            made = cluster(workers if isinstance(workers, list) else [workers], name=kind)
        entered: Cluster = stack.enter_context(made)
        return entered
