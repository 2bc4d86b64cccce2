"""The policy and the engine of a run: their placement, refits, and the restart of an engine."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from rl_core import create_generation, create_policy, refit
from rl_core.errors import ConfigError
from rl_core.plugins.discovery import load_object

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Starts a run's policy and, for GRPO, its engine; ends both.

    Args:
        config: Of the run, checked.
        resume_from: The policy's part of a checkpoint to go on from.

    Attributes:
        policy: What trains.
        report: Of the newest refit.
    """

    policy: ColocatablePolicyInterface
    report: RefitReport | None = None

    def __init__(self, config: RunConfig, *, resume_from: str | None = None) -> None:
        self._config = config
        self._stack = ExitStack()
        self._engine = ExitStack()
        self._generation: GenerationInterface | None = None
        colocated = config["generation"].get("colocated") or {"enabled": True}
        #: Whether the two take turns on the same devices.
        self.colocated: bool = colocated["enabled"]
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

    @property
    def generation(self) -> GenerationInterface:
        """The engine; a new object after :meth:`start_engine`."""
        assert self._generation is not None, "only GRPO has an engine"
        return self._generation

    def start_engine(self) -> None:
        """Starts the engine, or another one in the place of one that died."""
        self._engine.close()
        self._generation = create_generation(
            self._config["generation"], self._cluster("generation", self._engine)
        )
        self._engine.callback(self._generation.shutdown)

    def refit(self, version: int) -> RefitReport:
        """Gives the policy's weights to the engine, as the given version."""
        if self.colocated:
            self.policy.offload_before_refit()
        options: dict[str, Any] = {"version": version, **self._config["refit"]}
        self.report = refit(self.policy, self.generation, **options)
        if self.colocated:
            self.policy.offload_after_refit()
        return self.report

    def close(self) -> None:
        """Ends the engine, the policy and their workers. Idempotent."""
        with self._stack:
            self._engine.close()

    def _cluster(self, kind: str, stack: ExitStack) -> Cluster | None:
        placement: Mapping[str, Any] = self._config["placement"]
        place: Mapping[str, Any] = placement.get(kind, {})
        where = place.get("where", "here")
        if where == "here":
            return None
        name, distribution = _CLUSTERS[where]
        try:
            cluster: Any = load_object(name)
        except ImportError:
            raise ConfigError(
                f"placement.{kind}.where is {where!r}, which {distribution} provides",
                fix=f"install {distribution}, or leave placement.{kind} out",
                key=f"placement.{kind}.where",
            ) from None
        workers = place.get("workers", 1)
        if where == "ray":
            workers = workers if isinstance(workers, list) else [workers]
            return stack.enter_context(cluster(workers, name=kind))  # type: ignore[no-any-return]
        if isinstance(workers, list):
            raise ConfigError(
                f"placement.{kind}.workers is {workers}, a list with one number for each node, but "
                "all workers are on this host",
                fix=f"give one number, or set placement.{kind}.where to ray",
                key=f"placement.{kind}.workers",
            )
        return stack.enter_context(  # type: ignore[no-any-return]
            cluster(workers, devices=place.get("devices"))
        )
