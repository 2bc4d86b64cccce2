"""A set of bundles (CPUs and GPUs), reserved in Ray, that worker groups share."""

from __future__ import annotations

import shlex
import shutil
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rl_core.errors import ConfigError, LifecycleError
from rl_hosting.cluster.cluster import Cluster
from rl_hosting.cluster.launcher import checked_size
from rl_ray._runtime import acquire_ray, release_ray
from rl_ray._worker_group import WorkerGroup

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["RayVirtualCluster"]


class RayVirtualCluster(Cluster):
    """Reserves one bundle for each worker, and holds the workers to it.

    ::

        with RayVirtualCluster([4]) as cluster:  # one node, four bundles
            generation = create_generation(config, cluster)

    Several worker groups can share the bundles: each then counts as a fraction of every bundle's
    CPUs and GPU, and they take turns on the device.

    Args:
        bundle_ct_per_node_list: For each node, how many bundles it gives.
        use_gpus: One GPU in each bundle. None: if Ray has any GPU.
        num_gpus_per_node: How many GPUs a node has; asking for more of a node is refused.
        num_cpus_per_bundle: CPUs in each bundle.
        name: A prefix of the names of placement groups.
        max_colocated_worker_groups: Worker groups that share the bundles.
        py_executables: For a backend's name, the Python that its workers run with (that of an
            environment which has the engine), instead of this one.
        deadline_s: Seconds to wait for the resources.
        ray_options: Passed on to ``ray.init`` if Ray does not run yet.

    Raises:
        ConfigError: An argument is out of bounds, or the resources are not there in time; the
            message has what was asked for and what there is.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: Sequence[int],
        *,
        use_gpus: bool | None = None,
        num_gpus_per_node: int | None = None,
        num_cpus_per_bundle: int = 1,
        name: str = "",
        max_colocated_worker_groups: int = 1,
        py_executables: Mapping[str, str] | None = None,
        deadline_s: float = 60.0,
        ray_options: Mapping[str, Any] | None = None,
    ) -> None:
        if not bundle_ct_per_node_list:
            raise ConfigError(
                "bundle_ct_per_node_list is empty",
                fix="give the number of bundles of each node, such as [2] for two on one node",
                key="bundle_ct_per_node_list",
            )
        self._groups: list[Any] = []  # placement groups
        self._claims: list[str] = []
        self._owns_ray = False
        self.bundles = [
            _at_least_one("bundle_ct_per_node_list", count) for count in bundle_ct_per_node_list
        ]
        self.num_cpus_per_bundle = _at_least_one("num_cpus_per_bundle", num_cpus_per_bundle)
        self.max_colocated_worker_groups = _at_least_one(
            "max_colocated_worker_groups", max_colocated_worker_groups
        )
        self.name = name or f"cluster-{uuid.uuid4().hex[:8]}"
        self.py_executables = dict(py_executables or {})
        self._owns_ray = acquire_ray(sum(self.bundles) * num_cpus_per_bundle, ray_options or {})
        try:
            if use_gpus is None:
                use_gpus = bool(ray.cluster_resources().get("GPU", 0))
            self.use_gpus = use_gpus
            if use_gpus and num_gpus_per_node and max(self.bundles) > num_gpus_per_node:
                raise ConfigError(
                    f"bundle_ct_per_node_list wants {max(self.bundles)} bundles with one GPU each "
                    f"on a node, but num_gpus_per_node is {num_gpus_per_node}",
                    fix=f"use at most {num_gpus_per_node} for each node",
                    key="bundle_ct_per_node_list",
                )
            self._reserve(deadline_s)
        except BaseException:
            self.shutdown()
            raise

    @property
    def world_size(self) -> int:
        """How many bundles there are."""
        return sum(self.bundles)

    def workers(
        self,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        call_deadline_s: float = 3600.0,
    ) -> WorkerGroup:
        """Starts one actor for each bundle, or as many as are asked for.

        Raises:
            ConfigError: There is no place on the cluster, or no such Python; and see
                :class:`~rl_hosting.cluster.Workers`.
        """
        size = checked_size(num_workers, self.world_size)
        name = f"{manifest.name}-{kind}-{uuid.uuid4().hex[:6]}"
        self.claim(name)
        try:
            environment: dict[str, Any] = {"env_vars": dict(manifest.environment)}
            if executable := self.py_executables.get(manifest.name):
                # Ray would wait for ever for a Python that is not there; on other nodes only it
                # can tell.
                if len(ray.nodes()) == 1 and not shutil.which(shlex.split(executable)[0]):
                    raise ConfigError(
                        f"the Python for workers of {manifest.name!r} does not exist: {executable}",
                        fix="correct py_executables of the RayVirtualCluster",
                        key="py_executables",
                    )
                environment["py_executable"] = executable
            options = [{"runtime_env": environment, **self.actor_options(n)} for n in range(size)]
            return WorkerGroup(
                name,
                manifest,
                kind,
                config,
                options=options,
                released=partial(self.release, name),
                call_deadline_s=call_deadline_s,
            )
        except BaseException:
            self.release(name)
            raise

    def claim(self, owner: str) -> None:
        """Takes one of the places for worker groups.

        Raises:
            ConfigError: All places are taken.
            LifecycleError: The cluster is shut down.
        """
        if not self._groups:
            raise LifecycleError(
                f"the cluster {self.name} was shut down", fix="build a new RayVirtualCluster"
            )
        if len(self._claims) >= self.max_colocated_worker_groups:
            raise ConfigError(
                f"{owner} does not fit on the cluster {self.name}: it has "
                f"max_colocated_worker_groups={self.max_colocated_worker_groups}, taken by "
                f"{', '.join(self._claims)}",
                fix=f"set max_colocated_worker_groups={len(self._claims) + 1}, "
                "or build a separate cluster for each backend",
                key="max_colocated_worker_groups",
            )
        self._claims.append(owner)

    def release(self, owner: str) -> None:
        """Gives a place back. Idempotent."""
        if owner in self._claims:
            self._claims.remove(owner)

    def actor_options(self, bundle: int) -> dict[str, Any]:
        """Ray's options for the worker that a group puts on the given bundle."""
        places = [(node, i) for node, count in enumerate(self.bundles) for i in range(count)]
        node, index = places[bundle]
        share = 1 / self.max_colocated_worker_groups
        return {
            "num_cpus": self.num_cpus_per_bundle * share,
            "num_gpus": share if self.use_gpus else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._groups[node],
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=True,
            ),
        }

    def shutdown(self) -> None:
        """Gives the bundles back, which ends workers that still run on them. Idempotent."""
        groups, self._groups = self._groups, []
        owns_ray, self._owns_ray = self._owns_ray, False
        if groups and ray.is_initialized():
            for group in groups:
                remove_placement_group(group)
        if owns_ray:
            release_ray()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _reserve(self, deadline_s: float) -> None:
        bundle = {"CPU": float(self.num_cpus_per_bundle)} | ({"GPU": 1.0} if self.use_gpus else {})
        end = time.monotonic() + deadline_s
        for node, count in enumerate(self.bundles):
            group = placement_group(
                [dict(bundle) for _ in range(count)],
                strategy="STRICT_PACK",
                name=f"{self.name}-node{node}",
            )
            self._groups.append(group)
        for node, group in enumerate(self._groups):
            if group.wait(max(0.0, end - time.monotonic())):
                continue
            nodes = [
                {key: entry["Resources"].get(key, 0.0) for key in bundle}
                for entry in ray.nodes()
                if entry["Alive"]
            ]
            free = ray.available_resources()
            raise ConfigError(
                f"the cluster {self.name} was not ready within {deadline_s:g} s. Requested: "
                f"{self.bundles} bundles of {_show(bundle)} each; no node has room for entry "
                f"{node}. Ray's nodes have: {'; '.join(map(_show, nodes))}; "
                f"free now: {_show({key: free.get(key, 0.0) for key in bundle})}",
                fix="request fewer bundles, shut other clusters down, or add nodes",
                key="bundle_ct_per_node_list",
            )


def _at_least_one(key: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{key} must be at least 1, got {value}", fix="give 1 or more", key=key)
    return value


def _show(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {kind}" for kind, count in resources.items())
