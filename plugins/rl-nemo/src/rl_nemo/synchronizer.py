"""What NeMo RL's loops call to bring an engine to the trainer's weights: a verified refit."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from rl_core import refit
from rl_core.errors import CapabilityError, LifecycleError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface, Timer
    from rl_core.weights import RefitReport

__all__ = ["RefitSynchronizer", "connect"]

#: Under which the loops measure a refit.
TIMED_AS = "prepare_for_generation/transfer_and_update_weights"
#: Methods of NeMo RL's own engines and policies that these have not, and why.
_BY_THE_SYNCHRONIZER = "every refit is made by the weight_synchronizer that connect gives an engine"
_REFUSED_OF_ENGINES = {
    "attach_fleet_health": "a replica that is lost ends the call with a WorkerDiedError",
    "get_collective_sender_spec": _BY_THE_SYNCHRONIZER,
    "prepare_nccl_reshard_refit_info": _BY_THE_SYNCHRONIZER,
    "nccl_reshard_refit": _BY_THE_SYNCHRONIZER,
}
_REFUSED_OF_POLICIES = {
    "prepare_nccl_reshard_refit_info": _BY_THE_SYNCHRONIZER,
    "nccl_reshard_refit": _BY_THE_SYNCHRONIZER,
    "stream_weights_via_http": "weights do not travel over HTTP",
    "set_rollout_num_gpus_per_engine": "weights do not travel over HTTP",
}


def connect(
    policy: ColocatablePolicyInterface, generation: GenerationInterface, **options: Any
) -> RefitSynchronizer:
    """Makes NeMo RL's loops refit this engine from this policy, in one call before they start.

    Gives the engine what these loops call and no other does: ``weight_synchronizer``, for every
    refit, ``blocks_training`` and ``wake_carries_weight_updates``, and metrics, of which there are
    none. Lets ``generation.cfg`` declare that rollouts may be asynchronous, which the loops look up
    by the backend's name. The policy's ``get_logprobs`` takes a timer as its second argument, too,
    and its ``init_collective`` takes ``nccl_peer``. What NeMo RL's own engines and policies have
    besides raises a CapabilityError that names it, but for the policy's ``offload_to_cpu``.

    Args:
        policy: The trainer, embedded or on a cluster.
        generation: The engine, likewise. For asynchronous loops it must be on a cluster of Ray's:
            they send it to an actor.
        **options: Those of :func:`rl_core.refit`, such as ``verify`` and ``transport``.
    """
    synchronizer = RefitSynchronizer(policy, generation, **options)
    engine: Any = generation
    engine.weight_synchronizer = synchronizer
    # An engine that shares the trainer's devices sleeps before a step; only a refit brings weights.
    colocated = (generation.cfg.get("colocated") or {}).get("enabled") is True
    engine.blocks_training = partial(bool, colocated)
    engine.wake_carries_weight_updates = partial(bool, False)
    engine.get_logger_metrics = engine.clear_logger_metrics = dict
    trainer: Any = policy
    trainer.offload_to_cpu = trainer.finish_training
    trainer.get_logprobs = partial(get_logprobs, trainer.get_logprobs)
    trainer.init_collective = partial(init_collective, trainer.init_collective)
    for side, refused in ((engine, _REFUSED_OF_ENGINES), (trainer, _REFUSED_OF_POLICIES)):
        for method, why in refused.items():
            setattr(side, method, partial(refuse, method, why))
    # The loops know engines by name; of this one they require no key that others do not have.
    generation.cfg = {**generation.cfg, "backend": "megatron"}
    return synchronizer


def refuse(name: str, why: str, *_: Any, **__: Any) -> NoReturn:
    """Raises a CapabilityError that names a method, an argument or a key of NeMo RL's."""
    raise CapabilityError(
        f"{name} is not supported: {why}",
        fix="use a loop or a configuration of NeMo RL that does without it",
        capability=name,
    )


def get_logprobs(of_policy: Callable[..., Any], data: Any, *more: Any, **named: Any) -> Any:
    """A policy's ``get_logprobs``, with a timer also where ``micro_batch_size`` has its place."""
    if more and hasattr(more[0], "time"):
        more = (None, *more)
    return of_policy(data, *more, **named)


def init_collective(
    of_policy: Callable[..., Any], *where: Any, nccl_peer: str = "nemo", **named: Any
) -> Any:
    """A policy's ``init_collective``, for peers that join as NeMo RL's own do."""
    if nccl_peer != "nemo":
        refuse(f"nccl_peer={nccl_peer!r}", _BY_THE_SYNCHRONIZER)
    return of_policy(*where, **named)


class RefitSynchronizer:
    """NeMo RL's ``WeightSynchronizer``, by its methods.

    An engine that shares devices with the policy takes turns with it: the policy's optimizer
    makes room, the engine wakes its weights, takes the refit, and wakes the rest. An engine with
    devices of its own (``colocated.enabled`` False) goes on serving.

    Args:
        policy: See :func:`connect`.
        generation: See :func:`connect`.
        **options: See :func:`connect`.

    Attributes:
        report: Of the last refit.
    """

    def __init__(
        self,
        policy: ColocatablePolicyInterface,
        generation: GenerationInterface,
        **options: Any,
    ) -> None:
        self._policy = policy
        self._generation = generation
        self._options = options
        self.report: RefitReport | None = None

    def sync_weights(
        self, *, timer: Timer | None = None, kv_scales: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Refits, and returns once the new weights serve.

        Args:
            timer: The loop's stopwatch.
            kv_scales: Scales of an FP8 key/value cache, nested or flat; None is none.

        Returns:
            Figures for the loop's log.

        Raises:
            RefitError: The transfer failed; see :func:`rl_core.refit`.
        """
        colocated = (self._generation.cfg.get("colocated") or {}).get("enabled") is not False
        if colocated:
            self._policy.offload_before_refit()
            self._generation.prepare_for_generation(tags=["weights"])
        with nullcontext() if timer is None else timer.time(TIMED_AS):
            self.report = refit(
                self._policy, self._generation, **self._options, kv_scales=kv_scales or {}
            )
        if colocated:
            self._policy.offload_after_refit()
        self._generation.prepare_for_generation()
        return {
            "refit/version": float(self.report.version),
            "refit/seconds": self.report.seconds,
            "refit/gb_per_s": self.report.gb_per_s,
        }

    @property
    def is_stale(self) -> bool:
        """Whether the engine has never had the policy's weights."""
        return self.report is None

    def init_communicator(self) -> None:
        """Nothing: a refit opens its connections itself, and keeps them."""

    def shutdown(self) -> None:
        """Nothing: policy and engine close their own ends when they are shut down."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Elsewhere, ())


class _Elsewhere:
    """A synchronizer in another process than its loop's, which does not refit."""

    is_stale = False

    def sync_weights(self, **_: Any) -> dict[str, float]:
        """Raises LifecycleError."""
        raise LifecycleError(
            "this copy of the engine is in a process that has no trainer to refit it from",
            fix="call sync_weights in the process in which connect was called",
        )
