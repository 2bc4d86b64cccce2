"""The ranks of a trainer: which process each one is, and what became of it."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import torch

from rl_core.errors import ConfigError, RefitPeerError
from rl_core.refit.timing import DYING_S

_MESSAGE_BYTES = 1024


class RankProcess(msgspec.Struct, frozen=True):
    """The process of one rank.

    Attributes:
        rank: Its number.
        size: How many there are.
        pid: Its process.
        host: Tells the processes that have this pid apart.
        endpoint: Where rank 0 listens.
        key: With which one is let in there.
    """

    rank: int
    size: int
    pid: int
    host: str
    endpoint: str = ""
    key: str = ""

    @classmethod
    def here(cls, rank: int, size: int, endpoint: str = "", key: str = "") -> RankProcess:
        """This process."""
        return cls(rank, size, os.getpid(), _host(), endpoint, key)

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.size} (process {self.pid})"

    def state(self) -> str:
        """``"ended"``, ``"stopped"`` or ``"runs"``; empty if it is on another host."""
        if self.host != _host():
            return ""
        try:
            text = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:
            return "ended"
        letter = text.rpartition(")")[2].split()[0]
        return {"Z": "ended", "X": "ended", "T": "stopped", "t": "stopped"}.get(letter, "runs")

    def fate(self) -> str:
        """What became of it, now that its connection is lost."""
        end = time.monotonic() + DYING_S
        while (state := self.state()) == "runs" and time.monotonic() < end:
            time.sleep(0.01)
        return {
            "ended": "died",
            "stopped": "does not answer: its process is stopped",
            "runs": "does not answer",
        }.get(state, "died or does not answer")

    def lost(self) -> RefitPeerError:
        """The error for its end, now that its connection is lost."""
        return RefitPeerError(
            f"{self} {self.fate()}",
            fix="look at that worker's log; if its process has ended, build the policy again",
            peer=f"rank {self.rank}",
            rank=self.rank,
        )


def exchange(group: Any, mine: RankProcess) -> list[RankProcess]:
    """Everybody's, by rank.

    Args:
        group: A process group of torch that takes tensors of the CPU.
        mine: This rank's.

    Raises:
        ConfigError: It takes none.
    """
    text = msgspec.json.encode(mine)
    sent = torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8)
    sent[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    parts = [torch.zeros_like(sent) for _ in range(mine.size)]
    try:
        group.allgather([parts], [sent]).wait()
    except RuntimeError as error:
        raise ConfigError(
            f"rank {mine.rank} of {mine.size} could not meet the others: {error}",
            fix="give a group of all ranks with the gloo backend",
            key="group",
        ) from error
    texts = [bytes(part.tolist()).rstrip(b"\0") for part in parts]
    return [msgspec.json.decode(text, type=RankProcess) for text in texts]


def _host() -> str:
    """A name that no other host, and no other container with pids of its own, has."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or os.uname().nodename
