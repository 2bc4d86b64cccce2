"""One call that brings an engine to a trainer's weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from rl_core.errors import RefitProtocolError
from rl_core.futures import wait
from rl_core.plugins import hookspecs
from rl_core.refit.jobs import DEFAULT_BUCKET_BYTES, DEFAULT_DEADLINE_S

if TYPE_CHECKING:
    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface

__all__ = ["RefitReport", "refit"]

#: Seconds the two sides get, past the deadline, to say themselves which peer missed it.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What a committed refit did.

    Attributes:
        version: The version that serves now.
        bytes: Bytes sent: each tensor once, in the engine's dtype.
        seconds: From the first message to the last commit.
        gb_per_s: ``bytes / seconds / 1e9``.
        phases: Seconds in each phase, as the sender saw them.
        extra_memory_bytes: Size of the shared buffers.
        tensors: Tensors sent, without aliases and empty ones.
        unchanged: How many of them are bit for bit what was sent last; None if not hashed.
        cast: Tensors that were rounded to another dtype for the engine.
        buckets: Buckets sent.
        receivers: Engines that committed.
        verify: How the transfer was verified.
        isolation: Whether engines served meanwhile.
    """

    version: int
    bytes: int
    seconds: float
    gb_per_s: float
    phases: Mapping[str, float]
    extra_memory_bytes: int
    tensors: int
    unchanged: int | None
    cast: int
    buckets: int
    receivers: int
    verify: str
    isolation: str

    @classmethod
    def of(cls, results: list[Any]) -> Self:
        """The report among the results of both sides' futures.

        Raises:
            RefitProtocolError: The policy returned none.
        """
        for result in results:
            if isinstance(result, Mapping) and "phases" in result:
                return cls(**result)
        raise RefitProtocolError(
            "the policy's futures returned no report",
            fix="derive the policy from rl_core.backends.PolicyBackend",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        same = "" if self.unchanged is None else f", {self.unchanged} unchanged"
        return (
            f"refit to version {self.version}: {self.bytes / 1e6:.1f} MB in {self.seconds:.3f} s "
            f"({self.gb_per_s:.2f} GB/s), {self.tensors} tensors{same}, {self.receivers} "
            f"receiver{'s' * (self.receivers > 1)}, verify={self.verify}, "
            f"{self.extra_memory_bytes / 1e6:.1f} MB of buffers"
        )


def refit(
    policy: ColocatablePolicyInterface,
    generation: GenerationInterface,
    *,
    version: int | None = None,
    verify: str = "wire",
    isolation: str = "quiesced",
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    deadline_s: float = DEFAULT_DEADLINE_S,
) -> RefitReport:
    """Gives the policy's weights to the engine, and returns once they serve.

    Args:
        policy: The trainer, embedded or in workers.
        generation: The engine, embedded or in workers; all of its replicas commit or none.
        version: Of the new weights; the policy's last one plus 1 if None.
        verify: ``"none"``, ``"wire"`` or ``"installed"``, see :meth:`RefitSender.stream_ipc`.
        isolation: ``"quiesced"``.
        bucket_bytes: Size of each of the two buffers at most.
        deadline_s: Seconds for the whole refit.

    The hook ``on_event`` of every plugin gets ``"refit_started"``, then ``"refit_committed"`` or
    ``"refit_failed"``, with the facts.

    Raises:
        ManifestMismatchError: The two disagree on the tensors; nothing was touched.
        RefitError: The transfer failed; if the engine is torn, it takes another refit.
        DeadlineError: Neither side said why it is late.
    """
    hookspecs.emit("refit_started", verify=verify, isolation=isolation)
    try:
        info = policy.prepare_refit_info()
        if info is None:
            raise RefitProtocolError("the policy described no tensors", phase="DISCOVER")
        generation.prepare_refit_info(info)
        sending = policy.stream_weights_via_ipc_zmq(
            receivers=getattr(generation, "receiver_count", 1),
            version=version,
            verify=verify,
            isolation=isolation,
            bucket_bytes=bucket_bytes,
            deadline_s=deadline_s,
        )
        receiving = generation.update_weights_via_ipc_zmq(deadline_s=deadline_s)
        report = RefitReport.of(wait([*sending, *receiving], deadline_s + _GRACE_S))
    except Exception as error:
        hookspecs.emit("refit_failed", error=type(error).__name__, message=str(error))
        raise
    hookspecs.emit("refit_committed", **report.as_dict())
    return report
