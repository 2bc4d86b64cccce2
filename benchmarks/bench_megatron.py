"""Training with megatron-core over ranks of a CPU, next to transformers: steps, refits, memory.

    python benchmarks/bench_megatron.py [--hidden 384] [--layers 10] [--json out.json]

Every policy runs in processes of its own, of one thread each unless the name says otherwise, and
all of them stay alive and take turns with the same rows; the best round counts. A refit goes to an
engine in this process, and is compared with one plain copy of the model's bytes.

Memory is the peak that Linux keeps of a process (VmHWM) in a refit and in an ``export_hf`` of new
processes, above what it had before, in units of the largest tensor. The bound for rank 0 in a refit
is one tensor and two buckets.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from rich.table import Table

from rl_conformance.models import make_tiny_model
from rl_core import create_generation, create_policy
from rl_core.batch import BatchedDataDict
from rl_core.weights import refit
from rl_hosting import LocalCluster
from rl_losses import NLLLossFn


@dataclass
class Policy:
    """One that is measured.

    Attributes:
        backend: Its name.
        ranks: How many.
        options: Of its configuration.
        threads: Of each rank.
        handle: The running policy.
        step_s: The best step.
        refit_s: The best refit.
        loss: Of the first step, before which all have the same weights.
        memory: For a refit and an export, each rank's growth in bytes.
    """

    backend: str
    ranks: int = 1
    options: dict[str, int] = field(default_factory=dict)
    threads: int = 1
    handle: Any = None
    step_s: float = float("inf")
    refit_s: float = float("inf")
    loss: float = 0.0
    memory: dict[str, list[int]] = field(default_factory=dict)

    @property
    def workers(self) -> list[psutil.Process]:
        """The processes of the ranks."""
        return [psutil.Process(process.pid) for process in self.handle._group.processes]


def policies() -> dict[str, Policy]:
    return {
        "hf": Policy("hf"),
        "hf, 2 threads": Policy("hf", threads=2),
        "megatron, 1 rank": Policy("megatron"),
        "megatron, TP2": Policy("megatron", 2, {"tensor_model_parallel_size": 2}),
        "megatron, PP2": Policy("megatron", 2, {"pipeline_model_parallel_size": 2}),
        "megatron, DP2": Policy("megatron", 2),
    }


def start(policy: Policy, path: Path, micro: int, stack: ExitStack) -> None:
    cluster = stack.enter_context(LocalCluster(policy.ranks, threads=policy.threads))
    config = {"backend": policy.backend, "model_name": str(path), "train_micro_batch_size": micro}
    config |= {"optimizer": {"lr": 1e-5}, "torch_dtype": "float32"}
    policy.handle = create_policy({**config, **policy.options}, cluster)
    stack.callback(policy.handle.shutdown)
    policy.handle.prepare_for_training()


def seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


@contextmanager
def growth(workers: list[psutil.Process], found: list[int]) -> Iterator[None]:
    """Appends to ``found`` by how much each process grew at most."""
    for worker in workers:
        Path(f"/proc/{worker.pid}/clear_refs").write_text("5")  # its peak begins anew
    before = [worker.memory_info().rss for worker in workers]
    yield
    for worker, base in zip(workers, before, strict=True):
        status = Path(f"/proc/{worker.pid}/status").read_text()
        found.append((int(status.split("VmHWM:")[1].split()[0]) << 10) - base)


def copier(engine: Any) -> Callable[[], None]:
    """A call that copies to the engine's own tensors, where its loader has put them."""
    names = {spec.name for spec in engine.weight_sink().specs() if spec.alias_of is None}
    targets = [p.tensor for p in engine.weight_sink().pieces() if p.name in names]
    sources = [torch.ones_like(target) for target in targets]

    @torch.no_grad()
    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return copy


def measure(
    running: dict[str, Policy], data: BatchedDataDict[Any], engine: Any, bucket: int, rounds: int
) -> float:
    """Steps, refits and copies by one thread, in turns; seconds of the best copy."""
    loss_fn, how = NLLLossFn(), {"bucket_bytes": bucket, "verify": "none", "deadline_s": 120.0}
    for policy in running.values():
        policy.loss = policy.handle.train(data, loss_fn)["loss"]
        refit(policy.handle, engine, **how)
    losses = [policy.loss for policy in running.values()]
    assert max(losses) - min(losses) < 1e-3, losses
    copy, copies = copier(engine), list[float]()
    for _ in range(rounds):
        for policy in running.values():
            step_s = seconds(lambda p=policy: p.handle.train(data, loss_fn))  # type: ignore[misc]
            policy.step_s = min(policy.step_s, step_s)
        for policy in running.values():
            refit_s = seconds(lambda p=policy: refit(p.handle, engine, **how))  # type: ignore[misc]
            policy.refit_s = min(policy.refit_s, refit_s)
            copies.append(seconds(copy))
    return min(copies)


def measure_memory(policy: Policy, path: Path, engine: Any, bucket: int) -> None:
    """A refit and an export by new processes, which give back what they free."""
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 20)  # or else glibc keeps large tensors
    with ExitStack() as stack:
        start(policy, path, 1, stack)
        refit(policy.handle, engine, bucket_bytes=bucket, verify="none", deadline_s=120.0)
        with growth(policy.workers, policy.memory.setdefault("refit", [])):
            refit(policy.handle, engine, bucket_bytes=bucket, verify="none", deadline_s=120.0)
        with growth(policy.workers, policy.memory.setdefault("export_hf", [])):
            policy.handle._on_all("export_hf", str(path.parent / "exported"))
        shutil.rmtree(path.parent / "exported")
    del os.environ["MALLOC_MMAP_THRESHOLD_"]


def main(
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 384,
    layers: Annotated[int, typer.Option(help="Depth of the model; even.")] = 10,
    vocabulary: Annotated[int, typer.Option(help="Tokens that the model knows.")] = 16384,
    rows: Annotated[int, typer.Option(help="Rows of the global batch.")] = 8,
    tokens: Annotated[int, typer.Option(help="Tokens of a row.")] = 128,
    micro: Annotated[int, typer.Option(help="Rows of a microbatch.")] = 2,
    bucket_mb: Annotated[float, typer.Option(help="Of a refit, in 10^6 bytes.")] = 2.0,
    rounds: Annotated[int, typer.Option(help="The best round counts.")] = 3,
    json_path: Annotated[Path | None, typer.Option("--json", help="Where to write JSON.")] = None,
) -> None:
    """Prints the tables and writes them as JSON."""
    torch.set_num_threads(1)
    bucket = int(bucket_mb * 1e6)
    generator = torch.Generator().manual_seed(0)
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.randint(3, vocabulary, (rows, tokens), generator=generator),
            "input_lengths": torch.full((rows,), tokens),
        }
    )
    running = policies()
    with TemporaryDirectory() as folder, ExitStack() as stack:
        path = make_tiny_model(
            Path(folder) / "model",
            "qwen2",
            hidden_size=hidden,
            num_layers=layers,
            vocab_size=vocabulary,
            max_position_embeddings=tokens,
            weight_scale=1.0,
        )
        engine = create_generation({"backend": "hf", "model_name": str(path), "max_new_tokens": 1})
        stack.callback(engine.shutdown)
        with ExitStack() as measured:
            for policy in running.values():
                start(policy, path, micro, measured)
            copy_s = measure(running, data, engine, bucket, rounds)
        for policy in running.values():
            measure_memory(policy, path, engine, bucket)
        specs = [s for s in engine.weight_sink().specs() if s.alias_of is None]
        sizes = [spec.nbytes for spec in specs]
    largest = max(sizes)
    results = report(running, rows * (tokens - 1), copy_s, sizes, bucket)
    show(results)
    print(
        f"{sum(s.numel for s in specs) / 1e6:.1f} M parameters, {sum(sizes) / 1e6:.1f} MB, the "
        f"largest tensor {largest / 1e6:.1f} MB; {rows} rows of {tokens} tokens"
    )
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        json_path.write_text(json.dumps(results, indent=2) + "\n")


def report(
    running: dict[str, Policy], trained: int, copy_s: float, sizes: list[int], bucket: int
) -> dict[str, Any]:
    """All figures as plain values."""
    largest = max(sizes)
    found: dict[str, Any] = {
        "bytes": sum(sizes),
        "largest_bytes": largest,
        "bucket_bytes": bucket,
        "copy_s": copy_s,
        "bound": 1 + 2 * bucket / largest,
        "policies": {},
    }
    for name, policy in running.items():
        found["policies"][name] = {
            "step_s": policy.step_s,
            "tokens/s": trained / policy.step_s,
            "refit_s": policy.refit_s,
            "copies": policy.refit_s / copy_s,
            "memory": {
                what: [growth / largest for growth in grown]
                for what, grown in policy.memory.items()
            },
        }
    return found


def show(results: dict[str, Any]) -> None:
    """The table of times and the one of memory."""
    times = Table("policy", title="training and refits, best round")
    for column in ("step, s", "trained tokens/s", "of hf", "refit, ms", "plain copies"):
        times.add_column(column, justify="right")
    memory = Table(
        "policy", title=f"growth in largest tensors; bound of a refit {results['bound']:.2f}"
    )
    for column in ("refit, rank 0", "others", "export_hf, rank 0", "others"):
        memory.add_column(column, justify="right")
    base = results["policies"]["hf"]["tokens/s"]
    for name, one in results["policies"].items():
        times.add_row(
            name,
            f"{one['step_s']:.2f}",
            f"{one['tokens/s']:.0f}",
            f"{one['tokens/s'] / base:.2f}",
            f"{one['refit_s'] * 1e3:.0f}",
            f"{one['copies']:.1f}",
        )
        cells = []
        for what in ("refit", "export_hf"):
            first, *others = one["memory"][what]
            cells += [f"{first:.2f}", " ".join(f"{other:.2f}" for other in others) or "-"]
        memory.add_row(name, *cells)
    console = Console()
    console.print(times)
    console.print(memory)


if __name__ == "__main__":
    typer.run(main)
