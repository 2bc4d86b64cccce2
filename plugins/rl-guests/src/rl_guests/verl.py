"""The checkpoint engine ``rl_core`` of verl.

verl gives the trainer's weights one after another, and takes them so for its rollouts. A bucket of
them is one refit here: no rollout gets any tensor of it before all have all of it, verified.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import secrets
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator

from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_core.errors import ConfigError, DeadlineError, RefitPeerError
from rl_core.futures import spawn
from rl_core.weights import DEFAULT_DEADLINE_S, RefitReceiver, RefitSender
from rl_core.weights.engine_lock import EngineLock
from rl_core.weights.options import SendOptions

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

__all__ = ["RefitCheckpointEngine"]

#: Instead of an introduction: all weights were sent.
_END = b""


class _Update:
    """What one update has open. It keeps its own, because one that failed may outlive the next."""

    def __init__(self, verify: str, deadline_s: float) -> None:
        self.verify, self.deadline_s = verify, deadline_s
        self.listener: Listener | None = None
        self.lines: list[Connection[Any, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.end: RefitSender | RefitReceiver | None = None

    def close(self) -> None:
        """Ends it, on the other side too. Idempotent."""
        for one in (*self.lines, self.listener, self.end):
            if one is not None:
                one.close()

    def in_time(self, who: str, call: Callable[[], Any]) -> Any:
        """The result of a call that waits for another process.

        Raises:
            DeadlineError: That did not answer in time.
            RefitPeerError: It has closed its connection.
        """
        waiting = spawn("checkpoint-engine", call)
        if not concurrent.futures.wait([waiting], self.deadline_s).done:
            raise DeadlineError(
                f"{who} did not answer within {self.deadline_s:g} s",
                fix="look at its log; or raise engine_kwargs.rl_core.deadline_s",
                seconds=self.deadline_s,
            )
        try:
            return waiting.result()
        except (EOFError, OSError) as error:
            raise RefitPeerError(
                f"{who} closed its connection before all weights were sent",
                fix="look at its log, and update the weights again",
                peer=who,
            ) from error

    def broadcast(self, message: bytes) -> None:
        """Sends a message to all rollout workers."""
        for rank, line in enumerate(self.lines, 1):
            self.in_time(f"rollout worker {rank}", partial(line.send_bytes, message))

    def send(self, tensors: dict[str, torch.Tensor]) -> None:
        """Sends a bucket."""
        assert isinstance(self.end, RefitSender)
        self.tensors = tensors
        info = self.end.prepare()
        self.broadcast(msgspec.msgpack.encode(info))
        how = {"verify": self.verify, "deadline_s": self.deadline_s, "receivers": len(self.lines)}
        self.end.send(number=info["number"], mode="packed", **how).result()

    def take(self) -> dict[str, torch.Tensor] | None:
        """The next bucket; None after the last."""
        assert isinstance(self.end, RefitReceiver)
        message = self.in_time("the trainer", self.lines[0].recv_bytes)
        if message == _END:
            return None
        info = msgspec.msgpack.decode(message)
        self.tensors = {
            one["name"]: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]))
            for one in info["tensors"]
        }
        self.end.prepare(info)
        self.end.receive(number=info["number"], deadline_s=self.deadline_s).result()
        return self.tensors


@CheckpointEngineRegistry.register("rl_core")
class RefitCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """Brings weights from rank 0 of the actor to all rollout workers of this host.

    Args:
        bucket_size: Bytes that travel together: memory for as many is taken on each side.
        is_master: Whether this process sends.
        verify: As of :func:`rl_core.refit`: ``"none"``, ``"wire"`` or ``"installed"``.
        deadline_s: Seconds for a bucket, and for the other side to come.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        verify: str = "wire",
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> None:
        SendOptions.of({"verify": verify, "deadline_s": deadline_s})
        self._bucket_size = bucket_size
        self._is_master = is_master
        self._new_update = partial(_Update, verify, deadline_s)
        self._update = self._new_update()

    def prepare(self) -> dict[str, Any] | None:
        """Where the sender awaits the others; None from these. Ends an update that still runs."""
        self.finalize()  # verl does not after an update that failed
        if not self._is_master:
            return None
        key = secrets.token_bytes(32)
        self._update.listener = listener = Listener(family="AF_UNIX", backlog=1 << 10, authkey=key)
        return {"address": listener.address, "key": key}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the actor is rank 0, its others -1; rollout workers are 1 and so on."""

        def of(its: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": its,
                "world_size": [rollout_world_size + 1] * len(its),
                "master": [metadata[0]] * len(its),
            }

        return of([0] + [-1] * (actor_wg_world_size - 1)), of([*range(1, rollout_world_size + 1)])

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Connects the sender and the others.

        Raises:
            ConfigError: The sender is on another host.
            DeadlineError: A process does not come.
        """
        if rank < 0:
            return
        update = self._update
        if rank > 0:
            who = "the trainer's checkpoint engine"
            try:
                line = update.in_time(who, lambda: Client(master["address"], authkey=master["key"]))
            except RefitPeerError as error:
                raise ConfigError(
                    f"rl_core does not reach the trainer on this host: {error.__cause__}",
                    fix="run both on one host, or use nccl; if they are, look at the trainer's log",
                    key="checkpoint_engine.backend",
                ) from error
            update.lines = [line]
            update.end = RefitReceiver(
                lambda: NamedTensorSink(update.tensors),
                name=f"rollout worker {rank}",
                lock=EngineLock(),
            )
            return
        listener: Any = update.listener
        count = world_size - 1
        update.lines = update.in_time(
            f"one of {count} rollout workers", lambda: [listener.accept() for _ in range(count)]
        )
        update.end = RefitSender(lambda: NamedTensorSource(update.tensors), name="verl's actor")

    def finalize(self) -> None:
        """Closes everything; each update connects anew. Idempotent."""
        self._update.close()
        self._update = self._new_update()

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Sends all weights; the actor's other ranks only take part in making them.

        Raises:
            RLError: A bucket did not arrive everywhere as it was sent.
        """
        del global_steps
        update, found, size = self._update, dict[str, torch.Tensor](), 0
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if update.end is None:
                    continue
                if found and size + tensor.nbytes > self._bucket_size:
                    await asyncio.to_thread(update.send, found)
                    found, size = {}, 0
                found[name] = tensor.detach().clone()  # verl may use its memory again
                size += tensor.nbytes
            if found:
                await asyncio.to_thread(update.send, found)
            update.broadcast(_END)
        except BaseException:
            update.close()  # or else rollouts would wait for more
            raise

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        """Yields all weights, of a bucket when all rollout workers have it.

        Raises:
            RLError: A bucket did not arrive everywhere, or the trainer did not send all.
        """
        del global_steps
        update = self._update
        try:
            while (tensors := await asyncio.to_thread(update.take)) is not None:
                for item in tensors.items():
                    yield item
        except BaseException:
            update.close()  # or else the trainer would wait for a rollout that cannot load them
            raise
