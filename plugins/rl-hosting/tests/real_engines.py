"""What tests of real engines share: prompts, trainers, and what an engine's processes hold."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from examples.additions import Additions, make_model, warm_up
from examples.grpo import grpo_step
from transformers import AutoTokenizer

from rl_core import create_policy
from rl_core.batch import BatchedDataDict
from rl_core.errors import LoopWarning
from rl_core.weights import refit
from rl_hosting import LocalCluster
from rl_losses import NLLLossFn

__all__ = [
    "EVERY_WAY",
    "RANKS",
    "difference",
    "directories_in",
    "grpo",
    "hf_policy",
    "learn",
    "policy_of_ranks",
    "processes_of",
    "prompts",
    "refit_every_way",
    "running",
    "shake",
    "shared_by",
    "sockets_in",
]

#: Ways of the bytes; each but the delta sends all of them.
EVERY_WAY: dict[str, dict[str, Any]] = {
    "ipc": {"verify": "installed"},
    "delta": {"verify": "installed", "delta": True},
    "staged": {"verify": "installed", "isolation": "staged", "bucket_bytes": 20_000},
    "collective": {"verify": "installed", "transport": "collective", "address": "127.0.0.1"},
}
#: Sizes of a policy of several ranks, and how many these are.
RANKS: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2": (2, {}),
    "ep2": (2, {"expert_model_parallel_size": 2}),
}


def prompts(rows: int = 4, width: int = 7) -> BatchedDataDict[Any]:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 260, (rows, width), generator=generator)
    lengths = torch.arange(rows) % width + 1
    ids[torch.arange(width) >= lengths[:, None]] = 0
    return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def hf_policy(path: Path, **config: Any):
    return create_policy(
        {"backend": "hf", "model_name": str(path), "torch_dtype": "float32", **config}
    )


@contextmanager
def policy_of_ranks(path: Path, ranks: str, **config: Any) -> Iterator[Any]:
    """A policy of megatron-core; several ranks get processes of their own."""
    count, sizes = RANKS[ranks]
    given = {"backend": "megatron", "model_name": str(path), "optimizer": {"lr": 1e-2}}
    given |= {"train_micro_batch_size": 2, **sizes, **config}
    if count == 1:
        policy = create_policy(given)
        yield policy
        policy.shutdown()
        return
    with LocalCluster(count) as cluster:
        policy = create_policy(given, cluster)
        yield policy
        policy.shutdown()


def learn(policy: Any) -> None:
    """Other weights, wherever they are."""
    policy.prepare_for_training()
    data = prompts(4) | {"token_mask": torch.ones(4, 7), "sample_mask": torch.ones(4)}
    data["input_lengths"] = torch.full((4,), 7)
    policy.train(data, NLLLossFn())


def refit_every_way(policy: Any, engine: Any, ways: dict[str, Any] = EVERY_WAY) -> None:
    """Other weights each time; the engine then scores as the policy does."""
    for way, options in ways.items():
        learn(policy)
        before = engine.weights_version, engine.weights_origin
        report = refit(policy, engine, deadline_s=60.0, **options)
        assert engine.weights_version == policy.weights_version, way
        assert (engine.weights_version, engine.weights_origin) != before, way
        assert report.receivers == engine.receiver_count, way
        assert difference(policy, engine.generate(prompts(), greedy=True)) < 1e-4, way


def grpo(folder: Path, ranks: str, start: Callable[[Path], Any]) -> None:
    """Steps of the example's loop; engine and policy agree at each, after refits of new weights.

    Args:
        folder: Where the model is made.
        ranks: Of the policy, see :data:`RANKS`.
        start: Starts the engine with a model in float32.
    """
    model = make_model(folder / "model", seed=0, layers=2)
    task = Additions(AutoTokenizer.from_pretrained(model), seed=0)
    warm = warm_up("hf", model, task, folder / "warm", steps=50)
    engine = start(warm)
    sizes = {"train_global_batch_size": 16, "train_micro_batch_size": 8}
    with policy_of_ranks(warm, ranks, optimizer={"lr": 1e-3}, **sizes) as policy:
        before = policy.weights_version
        with warnings.catch_warnings():  # after so few steps, no answer may be right
            warnings.filterwarnings("ignore", "for every prompt, the rewards", LoopWarning)
            steps = [grpo_step(policy, engine, task, problems=16, samples=4) for _ in range(4)]
        assert policy.weights_version == engine.weights_version > before
    engine.shutdown()
    assert max(step["logprob_error"] for step in steps) < 1e-3
    assert max(step["reward"] for step in steps) > 0, "nothing was learned from"


def difference(policy: Any, output: BatchedDataDict[Any]) -> float:
    """Largest |engine - policy| log-prob over generated tokens."""
    scored = policy.get_logprobs(
        BatchedDataDict(
            {
                "input_ids": output["output_ids"],
                "input_lengths": output["unpadded_sequence_lengths"],
            }
        )
    )["logprobs"]
    generated = output["logprobs"] != 0
    assert generated.any()
    return float((scored - output["logprobs"])[generated].abs().max())


def shake(policy: Any, seed: int = 1) -> None:
    """Other weights, as after training."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=generator))


def sockets_in(directory: str) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_socket()]


def directories_in(directory: str) -> list[Path]:
    """Those of engines."""
    return list(Path(directory).glob("rl-engine-*"))


def processes_of(session: int) -> list[int]:
    """All processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            found.append(int(stat.parent.name))
    return found


def shared_by(pids: list[int]) -> set[Path]:
    """The shared memory that processes have mapped, under whatever name."""
    maps = "\n".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    mapped = {int(inode) for inode in re.findall(r"(\d+) +/dev/shm/", maps)}
    return {path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in mapped}


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
