"""Starts the workers of a backend on this host, each in a separate process.

rl-ray's ``RayVirtualCluster`` does so on several hosts, and has the same interface.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
import uuid
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from rl_core.errors import ConfigError, DeadlineError, WorkerDiedError, WorkerError
from rl_core.futures import spawn
from rl_hosting._process import HostedProcess
from rl_hosting._values import decode_result, encode_arguments
from rl_hosting.cluster.cluster import Cluster
from rl_hosting.cluster.launcher import Workers, checked_size

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import AsyncIterator, Mapping, Sequence

    from rl_core.interfaces import Future
    from rl_core.plugins.manifest import BackendManifest, Kind

__all__ = ["LocalCluster", "LocalWorkers"]

#: What the fork server imports, besides the backend, before it forks workers.
PRELOAD = ("torch", "rl_hosting._worker_host", "rl_backends")


class LocalCluster(Cluster):
    """Places for workers on this host.

    ::

        cluster = LocalCluster(2)
        policy = create_policy(config, cluster)  # two ranks of one policy

    Several backends can share it: each gets separate processes on the same devices.

    Args:
        world_size: How many places.
        devices: For each place, the GPU of its workers, or several, as ``CUDA_VISIBLE_DEVICES``
            names them (``["0", "1"]``, ``["0,1", "2,3"]``). None: an equal share of the GPUs that
            this process sees; all of them, if they are fewer than the places.
        threads: OpenMP threads of each worker; an equal share of the cores if None.
        python: The interpreter of the workers, in which rl-hosting and the backend are installed.
        verbose: Print what the workers print.

    Raises:
        ConfigError: There is no place, or not one entry of ``devices`` for each.
    """

    def __init__(
        self,
        world_size: int,
        *,
        devices: Sequence[str | int] | None = None,
        threads: int | None = None,
        python: str = sys.executable,
        verbose: bool = False,
    ) -> None:
        for key, value in (("world_size", world_size), ("threads", threads)):
            if value is not None and value < 1:
                text = f"{key} must be at least 1, got {value}"
                raise ConfigError(text, fix="give 1 or more", key=key)
        if devices is not None and len(devices) != world_size:
            raise ConfigError(
                f"devices has {len(devices)} entries, but world_size is {world_size}",
                fix='give one GPU for each worker, such as ["0", "1"]',
                key="devices",
            )
        self._world_size = world_size
        self.devices = _shares(world_size) if devices is None else [str(one) for one in devices]
        self.threads = threads or max(1, (os.cpu_count() or 1) // world_size)
        self.python = python
        self.verbose = verbose
        self._groups: list[LocalWorkers] = []

    @property
    def world_size(self) -> int:
        """How many places there are."""
        return self._world_size

    def workers(
        self,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        *,
        num_workers: int | None = None,
        call_deadline_s: float = 3600.0,
    ) -> Workers:
        """See :meth:`Cluster.workers`."""
        size = checked_size(num_workers, self.world_size)
        workers = LocalWorkers(self, manifest, kind, config, size, call_deadline_s)
        self._groups.append(workers)
        return workers

    def environment(self, manifest: BackendManifest, place: int) -> dict[str, str]:
        """All variables of a worker."""
        environment = {**os.environ, **manifest.environment, "OMP_NUM_THREADS": str(self.threads)}
        if self.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.devices[place]
        return environment

    def shutdown(self) -> None:
        """Ends all workers that still run. Idempotent."""
        groups, self._groups = self._groups, []
        for group in groups:
            group.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


class LocalWorkers(Workers):
    """Processes of this host, which end with this one.

    Args:
        cluster: Defines how they are started.
        manifest: Names the backend and the variables of its processes.
        kind: ``"generation"`` or ``"policy"``.
        config: The checked configuration of the backend.
        size: How many.
        call_deadline_s: Seconds that any one call may take, loading the model included.
    """

    grace_s = 5.0

    def __init__(
        self,
        cluster: LocalCluster,
        manifest: BackendManifest,
        kind: Kind,
        config: Mapping[str, Any],
        size: int,
        call_deadline_s: float,
    ) -> None:
        name = f"{manifest.name}-{kind}-{uuid.uuid4().hex[:6]}"
        super().__init__(name, size, manifest, kind, call_deadline_s)
        self._line = threading.Lock()
        self._last_sent: dict[int, threading.Event] = {}  # by rank: its last call was sent
        try:
            for rank in self.ranks:
                worker = f"{name}-worker-{rank}"
                process = HostedProcess(
                    worker,
                    worker,
                    cluster.environment(manifest, rank),
                    host="rl_hosting._worker_host:WorkerHost",
                    python=cluster.python,
                    verbose=cluster.verbose,
                    preload=(*PRELOAD, manifest.factories[kind].partition(":")[0]),
                )
                self.processes.append(process)

            def start(process: HostedProcess) -> Any:
                return decode_result(process.start({}, self.start_deadline_s))

            starting = [spawn(f"start-{p.name}", partial(start, p)) for p in self.processes]
            self.build(starting, config)
        except BaseException:
            self.end()
            raise

    def remote(
        self, rank: int, group: str, method: str, *args: Any
    ) -> concurrent.futures.Future[Any]:
        """See :meth:`Workers.remote`."""
        process = self.process(rank)
        call = encode_arguments(list(args))
        end, sent = time.monotonic() + self.call_deadline_s, threading.Event()

        def answer(before: threading.Event | None) -> Any:
            if before is not None:
                before.wait(self.call_deadline_s)
            left = max(0.0, end - time.monotonic())
            try:
                found = process.call(method, left, on_sent=sent.set, group=group, call=call)
            except (WorkerDiedError, DeadlineError) as error:
                if not isinstance(error, WorkerError):  # which may be about another one
                    error.details.setdefault("rank", rank)
                raise
            finally:
                sent.set()
            return decode_result(found)

        with self._line:
            result = spawn(f"{method}-{process.name}", partial(answer, self._last_sent.get(rank)))
            self._last_sent[rank] = sent
        return result

    async def stream(
        self, rank: int, stream_id: str, data: Any, greedy: bool
    ) -> AsyncIterator[Future]:
        """See :meth:`Workers.stream`."""
        import asyncio

        for number in itertools.count():
            batch = None if number else data
            row = self.remote(rank, "generate", "next_row", stream_id, batch, greedy)
            try:
                found = await asyncio.wrap_future(row)
            except Exception:  # the future raises it
                yield row
                return
            if found is None:
                return
            yield row

    def end(self) -> None:
        """See :meth:`Workers.end`."""
        processes, self.processes = self.processes, []
        closing = [spawn(f"end-{process.name}", process.close) for process in processes]
        for future in closing:
            future.result()


def _shares(places: int) -> list[str] | None:
    """An equal share of the GPUs for each place; None if there is no GPU for each."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else [str(index) for index in range(count)]
    each = count // places
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(places)] if each else None
