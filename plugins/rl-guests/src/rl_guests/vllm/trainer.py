"""The backend on the trainer's side of vLLM's weight-transfer API."""

from __future__ import annotations

import base64
import concurrent.futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec
from vllm.distributed.weight_transfer import base
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from rl_core import refit
from rl_core.errors import CapabilityError, ConfigError, RefitAborted, RLError
from rl_core.futures import spawn
from rl_core.interfaces import TensorSpec, WeightSource
from rl_core.weights.options import SendOptions
from rl_core.weights.protocol.timing import DRIVER_GRACE_S
from rl_guests.vllm.plugin import BACKEND

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from rl_core.weights import RefitReport

__all__ = ["RefitTrainerEngine", "TrainerInitInfo"]


@dataclass
class TrainerInitInfo(base.TrainerInitInfo):  # type: ignore[misc]
    """What the trainer's side needs to know.

    The other fields of vLLM's ``NCCLTrainerInitInfo`` and ``IPCTrainerInitInfo`` are taken, so that
    a script changes by its import alone, and have no effect.

    Attributes:
        rank: Of this process among those of the trainer; rank 0 sends.
        receivers: Workers of all engines behind the client, tensor and data parallel ones counted.
            By default what the client's server reports.
        world_size: ``receivers`` and one for the trainer, as for NCCL.
        options: Those of :func:`rl_core.refit`, such as ``verify``, ``retries`` and ``deadline_s``.
    """

    backend: ClassVar[str] = BACKEND

    master_address: str = ""
    master_port: int = 0
    world_size: int | None = None
    packed: bool = True
    packed_buffer_size_bytes: int = 0
    packed_num_buffers: int = 0
    receivers: int | None = field(default=None, kw_only=True)
    options: Mapping[str, Any] = field(default_factory=dict, kw_only=True)


class RefitTrainerEngine(base.TrainerWeightTransferEngine[TrainerInitInfo]):  # type: ignore[misc]
    """Sends the trainer's weights in verified refits.

    Attributes:
        report: Of the last refit that was committed; None before the first.
    """

    init_info_cls = TrainerInitInfo
    report: RefitReport | None = None

    def __init__(
        self, info: TrainerInitInfo, *, client: Any, source: base.WeightSource | None
    ) -> None:
        super().__init__(client=client, source=source, is_sender=info.is_sender)
        if source is None:
            raise ConfigError(
                f"the weight-transfer backend {BACKEND} needs a source of weights",
                fix="pass source=ModuleSource(model) to trainer_init",
                key="source",
            )
        self._options = dict(info.options)
        module = getattr(source, "_module", None) if type(source) is base.ModuleSource else None
        self._sent = _Stream(source) if module is None else module
        if module is None and self._options.get("check_finite", "off") != "off":
            raise ConfigError(
                f"check_finite is only for a ModuleSource: a {type(source).__name__} makes its "
                "tensors while they are sent, together with the other ranks",
                fix="leave check_finite out",
                key="check_finite",
            )
        self._engine: Any = None
        if info.is_sender:
            receivers = info.receivers or (info.world_size or 1) - 1 or count_workers(client)
            self._engine = _Workers(client, receivers, self._options)

    @classmethod
    def trainer_init(
        cls,
        init_info: TrainerInitInfo,
        *,
        client: Any,
        source: base.WeightSource | None = None,
    ) -> Self:
        """Makes the trainer's side, on each of its ranks.

        Raises:
            ConfigError: There is no source, or it is not known how many workers there are.
        """
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Brings the trainer's weights to all engines: all commit, or none.

        Raises:
            RLError: What went wrong. Engines with torn weights stay paused until the next call that
                succeeds; the others go on with the old weights.
        """
        if self._engine is not None:
            try:
                self.report = refit(self._sent, self._engine, **self._options)
            finally:
                self._engine.settle()
        elif isinstance(self._sent, _Stream):
            for _ in self._sent.source:  # what the ranks gather together
                pass
        elif any(hasattr(tensor, "full_tensor") for tensor in self._sent.parameters()):
            self.report = refit(self._sent, None, **self._options)

    def shutdown(self) -> None:
        """Nothing is open that does not close with the module."""


class _Workers:
    """The workers behind a client of vLLM's routes, as the engine of a refit.

    Args:
        client: vLLM's ``VLLMWeightSyncClient``.
        receivers: How many they are.
        options: Of the refits.
    """

    def __init__(self, client: Any, receivers: int, options: Mapping[str, Any]) -> None:
        self.receiver_count = receivers
        self._client = client
        chosen = SendOptions.of({key: it for key, it in options.items() if key != "retries"})
        if chosen.transport != "ipc":
            raise ConfigError(
                f"the weight-transfer backend {BACKEND} does not use transport "
                f"{chosen.transport!r}: vLLM's API does not carry its address",
                fix="leave transport out, and run the trainer on the host of the engines",
                key="transport",
            )
        if chosen.delta:
            raise ConfigError(
                f"the weight-transfer backend {BACKEND} sends no deltas: vLLM may load weights by "
                "other calls, such as reload_weights, which a refit does not see",
                fix="leave delta out",
                key="delta",
            )
        self._deadline_s = chosen.deadline_s
        self._updates: list[concurrent.futures.Future[None]] = []

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`rl_core.interfaces.GenerationInterface.prepare_refit_info`."""
        self.settle()  # before a refit is tried again
        trainer = base64.b64encode(msgspec.msgpack.encode(state_dict_info)).decode()
        with _named():
            self._client.init_weight_transfer_engine(
                {"trainer": trainer, "deadline_s": self._deadline_s}
            )

    def receive_weights(self, **options: Any) -> list[concurrent.futures.Future[None]]:
        """See :meth:`rl_core.interfaces.GenerationInterface.receive_weights`."""
        del options  # they travel with the introduction

        def update() -> None:
            with _named():
                self._client.start_weight_update()
                self._client.update_weights({})
                self._client.finish_weight_update()

        self._updates = [spawn("vllm-update", update)]
        return self._updates

    def settle(self) -> None:
        """Waits until the engines have ended an update, also one that the trainer gave up."""
        concurrent.futures.wait(self._updates, self._deadline_s + DRIVER_GRACE_S)


@contextmanager
def _named() -> Iterator[None]:
    """Gives errors of a client a class of ours; the trainer's side of the refit has their cause."""
    try:
        yield
    except RLError:
        raise
    except Exception as error:
        raise RefitAborted(
            f"a call of vLLM's weight-transfer API failed: {type(error).__name__}: {error}",
            fix="look at the engine's log",
            cause=type(error).__name__,
        ) from error


class _Stream(WeightSource):
    """What a source of vLLM's yields, whole and one after another.

    Args:
        source: vLLM's.
    """

    def __init__(self, source: base.WeightSource) -> None:
        self.source = source

    def specs(self) -> Sequence[TensorSpec]:
        """See :meth:`WeightSource.specs`."""
        return [
            TensorSpec(one.name, tuple(one.shape), str(one.dtype).removeprefix("torch."))
            for one in self.source.metadata()
        ]

    def tensors(self, names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`WeightSource.tensors`: all are made, as other ranks make them too."""
        wanted = set(names)
        for name, tensor in self.source:
            if tensor is None:
                raise CapabilityError(
                    f"the source holds no {name} on this rank, and rank 0 sends all weights",
                    fix="pass source=ModuleSource(model): its ranks send what they hold",
                )
            if name in wanted:
                yield name, tensor

    def confirm(self) -> None:
        """Nothing tells whether weights have changed; ``send_weights`` returns before a step."""


def count_workers(client: Any) -> int:
    """How many workers take part in updates through one of vLLM's clients.

    Raises:
        ConfigError: The client has no way to tell.
        RefitAborted: The server does not.
    """
    if (url := getattr(client, "base_url", None)) is not None:
        import requests

        with _named():
            answer = requests.get(f"{url}/get_world_size", timeout=client.timeout)
            answer.raise_for_status()
            return int(answer.json()["world_size"])
    raise ConfigError(
        f"a {type(client).__name__} does not tell how many workers its engines have",
        fix="pass receivers= to TrainerInitInfo: the workers of all engines",
        key="receivers",
    )


WeightTransferTrainerFactory.register_engine(BACKEND, RefitTrainerEngine)
