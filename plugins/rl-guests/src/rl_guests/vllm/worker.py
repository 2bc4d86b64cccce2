"""The backend in vLLM's workers: the receiver of refits beside each part of the model."""

from __future__ import annotations

import base64
import os
import secrets
import time
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rl_core.errors import DeadlineError, LifecycleError
from rl_hosting import WorkerRefits
from rl_hosting.cluster.remote_error import decode_error
from rl_vllm.weights import EngineWeights, ModelSink

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import torch

    from rl_core.interfaces import TensorSpec

__all__ = ["Introduction", "RefitTransferEngine", "Update"]

#: Seconds of one look at whether a refit has ended.
_LOOK_S = 1.0


@dataclass
class Introduction(WeightTransferInitInfo):  # type: ignore[misc]
    """What the trainer tells each worker before an update.

    Attributes:
        trainer: What its ``prepare_refit_info`` returned, as msgpack in base64.
        deadline_s: Seconds for a whole update.
    """

    trainer: str
    deadline_s: float


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Nothing: what travels is in the refit."""


class _Refits(WorkerRefits):
    """The receiver beside a worker's weights.

    Args:
        weights: Of the worker, once they are needed.
        name: Of the worker.
    """

    def __init__(self, weights: Callable[[], EngineWeights], name: str) -> None:
        super().__init__(lambda: _Sink(weights(), self._named), name, shared=True)
        self._named: Collection[str] | None = None

    def prepare(self, info: bytes) -> None:
        """See :meth:`WorkerRefits.prepare`: for a driver of ours, which names every tensor."""
        self._named = None
        super().prepare(info)

    def prepare_for_names(self, info: bytes) -> None:
        """See :meth:`prepare`, for a trainer that may leave out tensors that are tied to others."""
        self._named = {one["name"] for one in msgspec.msgpack.decode(info)["tensors"]}
        super().prepare(info)


class _Sink(ModelSink):
    """vLLM's weights.

    Args:
        weights: Of the worker.
        named: The only tied tensors that the trainer names; None if it names all.
    """

    def __init__(self, weights: EngineWeights, named: Collection[str] | None) -> None:
        super().__init__(weights)
        self._named = named

    def specs(self) -> list[TensorSpec]:
        """See :meth:`WeightSink.specs`."""
        named, specs = self._named, list(super().specs())
        return [it for it in specs if named is None or it.alias_of is None or it.name in named]


class RefitTransferEngine(WeightTransferEngine[Introduction, Update]):  # type: ignore[misc]
    """Takes one verified refit for each update, in a worker.

    ``start_weight_update`` returns when trainer and workers agree on the tensors and the transfer
    may begin; ``update_weights`` when all workers of all engines have committed.

    Attributes:
        name: Of the worker, for errors.
    """

    init_info_cls = Introduction
    update_info_cls = Update
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        parallel = vllm_config.parallel_config
        rank = f"{parallel.data_parallel_index}.{parallel.rank}"
        self.name = f"vLLM worker {rank} (pid {os.getpid()})"
        worker = SimpleNamespace(vllm_config=vllm_config, get_model=lambda: model)
        weights = cache(lambda: EngineWeights(worker))
        self._refits = _Refits(weights, self.name)
        self._introduction: Introduction | None = None
        self._key = ""  # of the update that was started
        self._committed = False

    def state(self) -> tuple[bool, str]:
        """Whether the weights are partly old and partly new, and the label of a refit's."""
        state = self._refits.state()
        return state["torn"], state["label"]

    def answer_frame(self, frame: str) -> str:
        """Answers a frame of a driver that refits this engine by its URL; both in base64."""
        given = base64.b64decode(frame, validate=True)
        return base64.b64encode(self._refits.answer_frame(given)).decode()

    def init_transfer_engine(self, init_info: Introduction) -> None:
        """Takes the trainer's introduction, and compares its tensors with those of the model."""
        self._refits.prepare_for_names(base64.b64decode(init_info.trainer, validate=True))
        self._introduction = init_info

    def start_weight_update(self) -> None:
        """Begins a refit, and waits until it is to write.

        Raises:
            RLError: What is wrong; no weight was touched.
        """
        given = self._introduction
        if given is None:
            raise LifecycleError(
                f"{self.name} does not know its trainer yet",
                fix="call init_weight_transfer_engine before start_weight_update",
            )
        self._key, self._committed = secrets.token_hex(8), False
        self._refits.receive(self._key, deadline_s=given.deadline_s)
        self._wait(given.deadline_s, until_it_writes=True)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """See :meth:`receive_weights`, which waits for the device itself."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        """Has the refit write, and waits until all workers of all engines have committed.

        Raises:
            RLError: The refit failed.
        """
        del update_info
        if not self._key or self._introduction is None:
            raise LifecycleError(
                f"{self.name} has no update to go on with",
                fix="call start_weight_update first",
            )
        self._refits.grant(self._key)
        self._wait(self._introduction.deadline_s)
        self._committed = True

    def finish_weight_update(self) -> None:
        """Raises unless the update was committed everywhere."""
        if not self._committed:
            raise LifecycleError(
                f"{self.name} has no update that was committed",
                fix="call update_weights before finish_weight_update",
            )
        self._key, self._committed = "", False

    def shutdown(self) -> None:
        """Forgets the trainer; the next one introduces itself."""
        self._introduction = None

    def _wait(self, seconds: float, *, until_it_writes: bool = False) -> None:
        """Waits for the end of the refit, which has a deadline of its own."""
        end = time.monotonic() + seconds + _LOOK_S
        while True:
            state = self._refits.done(self._key, _LOOK_S)
            if error := state.get("error"):
                self._key = ""
                raise decode_error(error)
            if state["done"]:
                return
            if until_it_writes and state["wants_lock"]:
                return
            if time.monotonic() > end:
                raise DeadlineError(
                    f"{self.name}: the refit did not end within {seconds:g} s",
                    fix="look at what the worker does (py-spy dump)",
                    seconds=seconds,
                )
