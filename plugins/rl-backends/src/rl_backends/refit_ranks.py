"""The ranks of a trainer: how they meet for its refits, and what the calls of all come to."""

from __future__ import annotations

import concurrent.futures
import json
import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from rl_backends.ranks import ConnectedRanks, RankProcess
from rl_core.errors import ConfigError, RefitPeerError, RLError
from rl_core.futures import as_concurrent, spawn
from rl_core.weights.protocol.session import Phase, repeats_peer_error
from rl_core.weights.protocol.timing import DRIVER_GRACE_S
from rl_core.weights.transports.control import ControlServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_core.interfaces import Future

__all__ = ["RefitRanks", "exchange", "gather", "join_ranks", "listen"]


class RefitRanks(ConnectedRanks):
    """The ranks of one trainer in its refits, made by all of them at the same time.

    Args:
        group: A process group of torch over all ranks that takes tensors of the CPU (gloo). It is
            used here, to meet, and never again.
        address: Of rank 0, at which the others reach it. Between hosts, one of a private network.

    Raises:
        ConfigError: The group takes no tensors of the CPU.
        RefitError: The address is not this host's.
    """

    def __init__(self, group: Any, *, address: str = "127.0.0.1") -> None:
        rank, size = group.rank(), group.size()
        server, mine = listen(rank, size, address)
        super().__init__(rank, exchange(group, mine), server)


def listen(rank: int, size: int, address: str) -> tuple[ControlServer | None, RankProcess]:
    """This rank's process; that of rank 0 listens at an address of its own."""
    if rank:
        return None, RankProcess.here(rank, size)
    host = f"[{address}]" if ":" in address else address
    server = ControlServer(f"tcp://{host}:*", encrypted=True)
    token = secrets.token_hex(32)
    return server, RankProcess.here(0, size, server.endpoint, server.key, token)


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
