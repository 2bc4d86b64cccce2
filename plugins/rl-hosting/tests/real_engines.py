"""What tests of real engines share: prompts, a trainer, and what an engine's processes hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from rl_core import create_policy
from rl_core.batch import BatchedDataDict

__all__ = [
    "difference",
    "directories_in",
    "hf_policy",
    "processes_of",
    "prompts",
    "running",
    "shake",
    "shared_by",
    "sockets_in",
]


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
