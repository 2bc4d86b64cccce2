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
        self._how = {"verify": verify, "deadline_s": deadline_s}
        self._deadline_s = deadline_s
        self._listener: Listener | None = None
        self._lines: list[Connection[Any, Any]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self._end: RefitSender | RefitReceiver | None = None

    def prepare(self) -> dict[str, Any] | None:
        """Where the sender awaits the others; None from these."""
        if not self._is_master:
            return None
        key = secrets.token_bytes(32)
        self._listener = Listener(family="AF_UNIX", backlog=1 << 10, authkey=key)
        return {"address": self._listener.address, "key": key}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Rank 0 of the actor is rank 0, its others -1; rollout workers are 1 and so on."""
        ranks = [0] + [-1] * (actor_wg_world_size - 1)
        rollout = list(range(1, rollout_world_size + 1))

        def of(its: list[int]) -> dict[str, list[Any]]:
            return {
                "rank": its,
                "world_size": [rollout_world_size + 1] * len(its),
                "master": [metadata[0]] * len(its),
            }

        return of(ranks), of(rollout)

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        """Connects the sender and the others.

        Raises:
            ConfigError: The sender is on another host.
            DeadlineError: Somebody does not come.
        """
        if rank < 0:
            return
        if rank > 0:
            who = "the trainer's checkpoint engine"
            try:
                line = self._in_time(who, lambda: Client(master["address"], authkey=master["key"]))
            except DeadlineError:
                raise
            except OSError as error:
                raise ConfigError(
                    "the checkpoint engine rl_core does not reach the trainer on this host: "
                    f"{error}",
                    fix="run trainer and rollouts on one host, or use the backend nccl; if they "
                    "are, look at the trainer's log",
                    key="checkpoint_engine.backend",
                ) from error
            self._lines = [line]
            self._end = RefitReceiver(
                lambda: NamedTensorSink(self._tensors),
                name=f"rollout worker {rank}",
                lock=EngineLock(),
            )
            return
        listener: Any = self._listener
        count = world_size - 1
        self._lines = self._in_time(
            f"one of {count} rollout workers", lambda: [listener.accept() for _ in range(count)]
        )
        self._end = RefitSender(lambda: NamedTensorSource(self._tensors), name="verl's actor")

    def finalize(self) -> None:
        """Closes everything; each update connects anew. Idempotent."""
        for line in self._lines:
            line.close()
        if self._listener is not None:
            self._listener.close()
        if self._end is not None:
            self._end.close()
        self._lines, self._listener, self._end, self._tensors = [], None, None, {}

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """Sends all weights; the actor's other ranks only take part in making them.

        Raises:
            RLError: A bucket did not arrive everywhere as it was sent.
        """
        del global_steps
        found, size = dict[str, torch.Tensor](), 0
        try:
            async for name, tensor in ensure_async_iterator(weights):
                if self._end is None:
                    continue
                if found and size + tensor.nbytes > self._bucket_size:
                    await asyncio.to_thread(self._send, found)
                    found, size = {}, 0
                found[name] = tensor.detach().clone()  # verl may use its memory again
                size += tensor.nbytes
            if self._end is not None:
                if found:
                    await asyncio.to_thread(self._send, found)
                self._tell(_END)
        except BaseException:
            self.finalize()  # or else rollouts would wait for more
            raise

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor]]:
        """Yields all weights, of a bucket when all rollout workers have it.

        Raises:
            RLError: A bucket did not arrive everywhere, or the trainer did not send all.
        """
        del global_steps
        while (tensors := await asyncio.to_thread(self._take)) is not None:
            for item in tensors.items():
                yield item

    def _send(self, tensors: dict[str, torch.Tensor]) -> None:
        sender = self._end
        assert isinstance(sender, RefitSender)
        self._tensors = tensors
        info = sender.prepare()
        self._tell(msgspec.msgpack.encode(info))
        how = {"number": info["number"], "receivers": len(self._lines), "mode": "packed"}
        sender.send(**how, **self._how).result()

    def _tell(self, message: bytes) -> None:
        for rank, line in enumerate(self._lines, 1):
            try:
                self._in_time(f"rollout worker {rank}", partial(line.send_bytes, message))
            except DeadlineError:
                raise
            except OSError as error:
                raise _lost(f"rollout worker {rank}") from error

    def _in_time(self, who: str, call: Callable[[], Any]) -> Any:
        """The result of a call that waits for another process.

        Raises:
            DeadlineError: That did not answer in time.
        """
        waiting = spawn("checkpoint-engine", call)
        if not concurrent.futures.wait([waiting], self._deadline_s).done:
            raise DeadlineError(
                f"{who} did not answer within {self._deadline_s:g} s",
                fix="look at its log; or raise engine_kwargs.rl_core.deadline_s",
                seconds=self._deadline_s,
            )
        return waiting.result()

    def _take(self) -> dict[str, torch.Tensor] | None:
        """The next bucket; None after the last."""
        [line], receiver = self._lines, self._end
        assert isinstance(receiver, RefitReceiver)
        try:
            message = self._in_time("the trainer", line.recv_bytes)
        except DeadlineError:
            raise
        except (EOFError, OSError) as error:
            raise _lost("the trainer") from error
        if message == _END:
            return None
        info = msgspec.msgpack.decode(message)
        self._tensors = {
            one["name"]: torch.empty(one["shape"], dtype=getattr(torch, one["dtype"]))
            for one in info["tensors"]
        }
        receiver.prepare(info)
        receiver.receive(number=info["number"], deadline_s=self._deadline_s).result()
        return self._tensors


def _lost(who: str) -> RefitPeerError:
    return RefitPeerError(
        f"{who} closed its connection before all weights were sent",
        fix="look at its log, and update the weights again",
        peer=who,
    )
