"""The ranks of a trainer: which process each one is, and what became of it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_core.errors import ConfigError, LifecycleError, RefitPeerError, RLError
from rl_core.futures import as_concurrent, spawn
from rl_core.weights.protocol.session import Phase, repeats_peer_error
from rl_core.weights.protocol.timing import DRIVER_GRACE_S, EXIT_VISIBLE_S

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces import Future


class RankProcess(msgspec.Struct, frozen=True):
    """The process of one rank.

    Attributes:
        rank: Its number.
        size: How many there are.
        pid: Its process; 0 where it is not known.
        host: Distinguishes processes on different hosts that have this pid.
        endpoint: Where rank 0 listens.
        key: With which one is let in there.
    """

    rank: int
    size: int
    pid: int = 0
    host: str = ""
    endpoint: str = ""
    key: str = ""

    @classmethod
    def here(cls, rank: int, size: int, endpoint: str = "", key: str = "") -> RankProcess:
        """This process."""
        return cls(rank, size, os.getpid(), _host(), endpoint, key)

    def __str__(self) -> str:
        process = f" (process {self.pid})" if self.pid else ""
        return f"rank {self.rank} of {self.size}{process}"

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

    def describe_state(self) -> str:
        """What became of it, now that its connection is lost."""
        end = time.monotonic() + EXIT_VISIBLE_S
        while (state := self.state()) == "runs" and time.monotonic() < end:
            time.sleep(0.01)
        return {
            "ended": "has ended",
            "stopped": "does not answer: its process is stopped",
            "runs": "does not answer",
        }.get(state, "has ended or does not answer")

    def lost(self) -> RefitPeerError:
        """The error for its end, now that its connection is lost."""
        return RefitPeerError(
            f"{self} {self.describe_state()}",
            fix="look at that worker's log; if its process has ended, build the policy again",
            peer=f"rank {self.rank}",
            rank=self.rank,
        )


def other_weights(process: RankProcess, state: int, first: int) -> LifecycleError:
    """The error for a rank with weights of another state than rank 0's."""
    return LifecycleError(
        f"{process} is at step or load number {state}, rank 0 at {first}: their weights are not "
        "parts of one model",
        fix="load one checkpoint on all ranks, or build the policy again; then look for a call "
        "that failed on one rank, or that only some ranks made",
        peer=f"rank {process.rank}",
        rank=process.rank,
    )


def exchange(group: Any, mine: RankProcess) -> list[RankProcess]:
    """Everybody's, by rank.

    Args:
        group: A process group of torch that takes tensors of the CPU.
        mine: This rank's.

    Raises:
        ConfigError: It takes none.
    """
    try:
        return msgspec.convert(gather(group, msgspec.to_builtins(mine)), list[RankProcess])
    except RuntimeError as error:
        raise ConfigError(
            f"rank {mine.rank} of {mine.size} could not reach the others: {error}",
            fix="give a process group of all ranks with the gloo backend",
            key="group",
        ) from error


def gather(group: Any, value: Any) -> list[Any]:
    """Everybody's value, by rank; numbers, strings, lists and dicts of them.

    Args:
        group: A process group of torch that takes tensors of the CPU.
        value: This rank's.
    """
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    group.allgather([sizes], [torch.tensor([len(mine)])]).wait()
    width = max(int(size) for size in sizes)
    parts = [torch.zeros(width, dtype=torch.uint8) for _ in sizes]
    padded = torch.nn.functional.pad(mine, (0, width - len(mine)))
    group.allgather([parts], [padded]).wait()
    cut = [part[: int(size)] for part, size in zip(parts, sizes, strict=True)]
    return [json.loads(bytes(text.tolist())) for text in cut]


def _host() -> str:
    """A name that no other host, and no other container with separate pids, has."""
    parts = []
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
    with suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts) or os.uname().nodename


def join_ranks(calls: Sequence[Future]) -> concurrent.futures.Future[Any]:
    """One future of a policy for those of all its ranks.

    Args:
        calls: What each rank's ``send_weights`` returned, in their order.

    Returns:
        A future of rank 0's result, once all ranks have ended. Of several errors it has one that
        names the rank that is the cause, and none that repeats another where there is a choice.
        It has a RefitPeerError that names a rank which does not end after rank 0 has.
    """
    ranks = [as_concurrent(call) for call in calls]
    if len(ranks) == 1:
        return ranks[0]

    def failures() -> list[BaseException]:
        ended = [rank.exception() for rank in ranks if rank.done()]
        return [error for error in ended if error is not None]

    def blame(error: BaseException) -> tuple[bool, bool]:
        if not isinstance(error, RLError):
            return False, True
        return repeats_peer_error(error), "rank" not in error.details

    def join() -> Any:
        while not ranks[0].done() and not failures():
            pending = [rank for rank in ranks if not rank.done()]
            concurrent.futures.wait(pending, None, concurrent.futures.FIRST_COMPLETED)
        end = time.monotonic() + DRIVER_GRACE_S
        while (left := end - time.monotonic()) > 0 and not all(rank.done() for rank in ranks):
            if any(blame(error) == (False, False) for error in failures()):
                break
            pending = [rank for rank in ranks if not rank.done()]
            concurrent.futures.wait(pending, left, concurrent.futures.FIRST_COMPLETED)
        if errors := failures():
            raise min(errors, key=blame)
        for number, rank in enumerate(ranks):
            if not rank.done():
                raise RefitPeerError(
                    f"rank {number} did not confirm the end of a refit that all engines committed",
                    fix="look at that worker's log; the engines serve the new weights",
                    peer=f"rank {number}",
                    rank=number,
                    phase=Phase.COMMITTED,
                )
        return ranks[0].result()

    return spawn("refit-ranks", join)
