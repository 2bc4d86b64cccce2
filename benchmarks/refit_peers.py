# ruff: noqa: D102
"""How fast weights go from a trainer's process into an engine's by what people use today.

    python benchmarks/refit_peers.py [--gb 1] [--tensors 200] [--only ray,gloo] [--json FILE]

Every method moves the same named tensors into tensors that the engine has allocated long ago, on
the clock of ``refit_pair.py``. A method that can be used in several ways is measured in each, and
the best counts.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from refit_pair import CONTEXT, TRAINER, Case, Contender, Engine, Link, Method, Tensors, fill
from refit_report import document, show
from rich.console import Console


class RayLink(Link):
    """To an engine that is a Ray actor."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def start(self, call: str, *args: Any) -> None:
        self.future = getattr(self.actor, call).remote(*args)

    def answer(self) -> Any:
        import ray

        return ray.get(self.future)


class RayStore(Method):
    """Ray's object store: put by the trainer, got and copied by an actor."""

    starts_engine = True

    def __init__(self, folder: Path, *, whole: bool, zero_copy: bool) -> None:
        super().__init__(folder)
        self.whole, self.zero_copy = whole, zero_copy

    def _store_bytes(self, case: Case) -> int:
        return (5 * case.total) // 2 + (100 << 20)

    def warmups(self, case: Case) -> int:
        """Until the store has given out all its memory once; it takes it in turns."""
        return min(20, self._store_bytes(case) // case.total + 2)

    def connect(self, pipe: Any, case: Case) -> Link:
        os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = str(int(self.zero_copy))
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
        import ray
        from ray import cloudpickle

        warnings.filterwarnings("ignore", module=r"ray\.")
        warnings.filterwarnings("ignore", message="Zero-copy tensor serialization")
        ray.init(
            address="local",
            num_cpus=1,
            object_store_memory=self._store_bytes(case),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(self.folder),
        )
        for part in (Engine, type(self)):  # the actor's process cannot import these modules
            cloudpickle.register_pickle_by_value(sys.modules[part.__module__])
        return RayLink(ray.remote(Engine).remote(self, case))

    def leave(self) -> None:
        import ray

        ray.shutdown()

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> list[Any]:
        import ray

        parts = [tensors] if self.whole else [{name: one} for name, one in tensors.items()]
        refs = [ray.put(part) for part in parts]
        tell(refs)
        return refs

    def load(self, told: list[Any], targets: Tensors) -> list[Tensors]:
        import ray

        parts = ray.get(told)
        for part in parts:
            fill(targets, part)
        return parts


class TorchSave(Method):
    """A file of ``torch.save`` in memory."""

    def __init__(self, folder: Path, *, mmap: bool) -> None:
        super().__init__(folder)
        self.mmap = mmap

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        path = self.folder / "weights.pt"
        torch.save(tensors, path)
        tell(path)

    def load(self, told: Path, targets: Tensors) -> Tensors:
        return fill(targets, torch.load(told, mmap=self.mmap))


class Safetensors(Method):
    """A safetensors file in memory."""

    def __init__(self, folder: Path, *, whole: bool) -> None:
        super().__init__(folder)
        self.whole = whole

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        from safetensors.torch import save_file

        path = self.folder / "weights.safetensors"
        save_file(tensors, path)
        tell(path)

    def load(self, told: Path, targets: Tensors) -> Any:
        from safetensors import safe_open
        from safetensors.torch import load_file

        if self.whole:
            return fill(targets, load_file(told))
        with safe_open(told, framework="pt") as file:
            for name, target in targets.items():
                target.copy_(file.get_tensor(name))
        return None


class TorchQueue(Method):
    """A queue of ``torch.multiprocessing``, through which tensors go as shared memory."""

    def __init__(self, folder: Path, *, strategy: str, whole: bool, fresh: bool) -> None:
        super().__init__(folder)
        self.strategy, self.whole, self.fresh = strategy, whole, fresh
        self.queue = CONTEXT.Queue()

    def join(self, side: int) -> None:
        mp.set_sharing_strategy(self.strategy)

    def prepare(self, tensors: Tensors) -> Tensors:
        return {name: one.clone() for name, one in tensors.items()} if self.fresh else tensors

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> Tensors:
        parts = [tensors] if self.whole else [{name: one} for name, one in tensors.items()]
        tell(len(parts))
        for part in parts:
            self.queue.put(part)
        return tensors

    def load(self, told: int, targets: Tensors) -> list[Tensors]:
        return [fill(targets, self.queue.get()) for _ in range(told)]


class Gloo(Method):
    """One gloo broadcast per tensor, over the loopback."""

    def __init__(self, folder: Path, *, wait_each: bool) -> None:
        super().__init__(folder)
        self.wait_each = wait_each

    def join(self, side: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = f"file://{self.folder}/store"
        dist.init_process_group("gloo", init_method=store, rank=side, world_size=2)

    def leave(self) -> None:
        dist.destroy_process_group()

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        tell(None)
        self.load(None, tensors)

    def load(self, told: None, targets: Tensors) -> None:
        works = []
        for tensor in targets.values():
            work = dist.broadcast(tensor, src=TRAINER, async_op=True)
            if self.wait_each:
                work.wait()
            works.append(work)
        for work in works:
            work.wait()


class ZmqBuckets(Method):
    """Buckets packed into one shared buffer, each announced over ZeroMQ and waited for."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        super().__init__(folder)
        self.buffer = torch.ones(nbytes, dtype=torch.uint8).share_memory_()

    def join(self, side: int) -> None:
        import zmq

        self.socket = zmq.Context.instance().socket(zmq.REQ if side == TRAINER else zmq.REP)
        address = f"ipc://{self.folder}/socket"
        if side == TRAINER:
            self.socket.bind(address)
        else:
            self.socket.connect(address)

    def leave(self) -> None:
        self.socket.close(linger=0)

    def send(self, tensors: Tensors, tell: Callable[[Any], None]) -> None:
        tell(None)
        offset, bucket = 0, {}
        for name, tensor in tensors.items():
            if offset + tensor.nbytes > self.buffer.nbytes:
                self._announce(bucket, last=False)
                offset, bucket = 0, {}
            self.buffer[offset : offset + tensor.nbytes].copy_(tensor.view(torch.uint8))
            bucket[name] = (offset, tensor.shape, tensor.dtype)
            offset += tensor.nbytes
        self._announce(bucket, last=True)

    def _announce(self, bucket: dict[str, Any], *, last: bool) -> None:
        self.socket.send_pyobj((bucket, last))
        self.socket.recv()

    def load(self, told: None, targets: Tensors) -> None:
        last = False
        while not last:
            bucket, last = self.socket.recv_pyobj()
            for name, (offset, shape, dtype) in bucket.items():
                data = self.buffer[offset : offset + shape.numel() * dtype.itemsize]
                targets[name].copy_(data.view(dtype).view(shape))
            self.socket.send(b"")


def queue(strategy: str, *, fresh: bool) -> dict[str, Callable[[Path, Case], Method]]:
    """The ways of using a queue with one sharing strategy."""

    def maker(whole: bool) -> Callable[[Path, Case], Method]:
        return lambda folder, _: TorchQueue(folder, strategy=strategy, whole=whole, fresh=fresh)

    return {"one put": maker(True), "a put per tensor": maker(False)}


def buckets(nbytes: int) -> Callable[[Path, Case], Method]:
    """A bucket of so many bytes, or of the largest tensor if that is more."""
    return lambda folder, case: ZmqBuckets(folder, max(nbytes, case.total // case.count))


PEERS = {
    "ray": Contender(
        "Ray object store",
        {
            "one put, zero-copy tensors": lambda folder, _: RayStore(
                folder, whole=True, zero_copy=True
            ),
            "a put per tensor, zero-copy tensors": lambda folder, _: RayStore(
                folder, whole=False, zero_copy=True
            ),
            "one put": lambda folder, _: RayStore(folder, whole=True, zero_copy=False),
        },
        "its store may copy large buffers with several threads",
    ),
    "torch_save": Contender(
        "torch.save in /dev/shm",
        {
            "mmap": lambda folder, _: TorchSave(folder, mmap=True),
            "read": lambda folder, _: TorchSave(folder, mmap=False),
        },
    ),
    "safetensors": Contender(
        "safetensors in /dev/shm",
        {
            "load_file": lambda folder, _: Safetensors(folder, whole=True),
            "safe_open": lambda folder, _: Safetensors(folder, whole=False),
        },
    ),
    "mp_fd": Contender(
        "torch queue, file_descriptor",
        queue("file_descriptor", fresh=False),
        "the trainer's own tensors live in shared memory since the first put",
        copies=1,
    ),
    "mp_fs": Contender(
        "torch queue, file_system",
        queue("file_system", fresh=False),
        "the trainer's own tensors live in shared memory since the first put",
        copies=1,
    ),
    "mp_fresh": Contender(
        "torch queue, tensors made anew",
        {
            f"{strategy}, {way}": make
            for strategy in ("file_descriptor", "file_system")
            for way, make in queue(strategy, fresh=True).items()
        },
        "gathered or cast tensors, which the put moves to shared memory",
    ),
    "gloo": Contender(
        "gloo broadcast per tensor",
        {
            "each waited for": lambda folder, _: Gloo(folder, wait_each=True),
            "all under way": lambda folder, _: Gloo(folder, wait_each=False),
        },
    ),
    "zmq": Contender(
        "ZeroMQ and shared buckets",
        {"16 MiB": buckets(16 << 20), "512 MiB": buckets(512 << 20)},
        "one buffer, kept from round to round; pack and load take turns",
    ),
}


def chosen(only: str | None) -> list[Contender]:
    """The peers with these keys.

    Raises:
        BadParameter: There is no such peer.
    """
    keys = only.split(",") if only else list(PEERS)
    unknown = sorted(set(keys) - set(PEERS))
    if unknown:
        raise typer.BadParameter(f"unknown: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [PEERS[key] for key in keys]


def main(
    gb: Annotated[float, typer.Option(help="Bytes of all tensors, in 10^9.")] = 1.0,
    tensors: Annotated[int, typer.Option(help="How many there are.")] = 200,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "bfloat16",
    repeats: Annotated[int, typer.Option(help="Timed rounds of each way.")] = 3,
    only: Annotated[str | None, typer.Option(help="Peers, with commas between.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write figures here.")] = None,
) -> None:
    """Measures what people use today against one copy of the same bytes."""
    case = Case(int(gb * 1e9), tensors, dtype, repeats)
    figures = document(case, chosen(only), said=Console(stderr=True).print)
    show(figures, Console())
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
