"""What vLLM's engine core does for an update: it stands still until all workers have committed.

vLLM calls its workers between two steps of the scheduler. So nothing is generated while they are
written to, but the next step would follow an update that failed half-way. Its executor also reads
one answer too few where several workers raise. Both are decided here, in the one process that
calls all workers of a replica.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.llm_engine import LLMEngine

from rl_core.errors import WeightsTornError
from rl_hosting.cluster.remote_error import decode_error, encode_error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["call_in_worker", "guard_engine_core"]

#: A call of rl-core's own: the frame of a driver that refits an engine by its URL.
_FRAME = "rl_refit"
#: The calls of the weight-transfer API, and that one.
_CALLS = {
    _FRAME,
    "init_weight_transfer_engine",
    "start_weight_update",
    "start_draft_weight_update",
    "update_weights",
    "finish_weight_update",
    "shutdown_weight_transfer_engine",
}


@dataclass
class _Hold:
    """Why an engine core stands still.

    Attributes:
        before: How the scheduler was paused before, and will be again; None if nothing is held.
        reason: Why the weights cannot be used; empty while an update is under way.
        label: Of the weights that the last refit brought.
    """

    before: PauseState | None = None
    reason: str = ""
    label: str = ""


def guard_engine_core(backend: str) -> None:
    """Wraps what vLLM's engine core does in updates, pauses and requests.

    Args:
        backend: The name of the weight-transfer backend of which engines are meant.
    """
    call, resume = EngineCore.collective_rpc, EngineCore.resume_scheduler
    add, accept = EngineCore.preprocess_add_request, LLMEngine.add_request
    kinds: list[Any] = [EngineCore, EngineCoreProc]
    pauses = [pausing_later(kind.pause_scheduler) for kind in kinds]

    @functools.wraps(call)
    def collective_rpc(
        self: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = self.vllm_config.weight_transfer_config
        ours = given is not None and given.backend == backend
        if not ours or not isinstance(method, str) or method not in _CALLS:
            return call(self, method, timeout, args, kwargs)
        return _update(self, method, functools.partial(call, self), args, kwargs or {})

    @functools.wraps(resume)
    def resume_scheduler(self: Any) -> None:
        _check_whole(self, "does not resume")
        if _hold_of(self).before is not None:  # an update was committed, and not finished
            _release(self)
        resume(self)

    @functools.wraps(add)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        _check_whole(self, "takes no request")
        return add(self, request)

    @functools.wraps(accept)
    def add_request(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A core in this process refuses a request when it is already among those to be answered.
        if isinstance(core := getattr(self.engine_core, "engine_core", None), EngineCore):
            _check_whole(core, "takes no request")
        return accept(self, *args, **kwargs)

    EngineCore.collective_rpc = collective_rpc
    EngineCore.resume_scheduler = resume_scheduler
    EngineCore.preprocess_add_request = preprocess_add_request
    LLMEngine.add_request = add_request
    for kind, pause in zip(kinds, pauses, strict=True):
        kind.pause_scheduler = pause


def pausing_later(pause: Callable[..., Any]) -> Callable[..., Any]:
    """A pause that begins during an update lasts beyond it, and does not end that of the update."""

    @functools.wraps(pause)
    def pause_scheduler(self: Any, mode: Any = "abort", clear_cache: bool = True) -> Any:
        hold = _hold_of(self)
        if hold.before is not None and mode == "wait":
            raise ValueError("nothing ends before the update has: pause with keep or abort")
        found = pause(self, mode, clear_cache)
        if hold.before is not None:
            hold.before = self.scheduler.pause_state
            self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        return found

    return pause_scheduler


def _update(
    core: Any, method: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> list[Any]:
    """Has all workers take part; the scheduler stands still until their weights are whole.

    Raises:
        RLError: A worker failed; of several failures, one that is a cause of the others.
    """
    hold = _hold_of(core)
    if method == "update_weights" and hold.before is None:
        hold.before = core.scheduler.pause_state
        core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    answers: list[_Answer] = call(call_in_worker, None, (method, args, kwargs))
    errors = [decode_error(one.error) for one in answers if one.error]
    error = min(errors, key=lambda it: "cause" in it.details, default=None)
    labels = {one.label for one in answers}
    torn = len(labels) > 1 or any(one.torn for one in answers)
    if torn:
        if hold.before is None:
            hold.before = core.scheduler.pause_state
            core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        if not hold.reason or method == "update_weights":
            why = "" if error is None else f": {error.message}"
            hold.reason = f"the last update failed, and left a part of the weights new{why}"
    else:
        refitted, healed = labels != {hold.label}, bool(hold.reason)
        hold.reason = ""
        if refitted:
            [hold.label] = labels
            core.set_weight_version(hold.label)
        if (
            (method == "finish_weight_update" and error is None)
            or (error is not None and hold.before is not None)
            or (method == _FRAME and (refitted or healed))
        ):
            _release(core)
    if error is not None:
        raise error
    return [one.value for one in answers]


@dataclass
class _Answer:
    """What a worker did.

    Attributes:
        error: That it raised, as :func:`encode_error` has it; or None.
        value: That it returned.
        torn: Its weights are partly old and partly new.
        label: Of its weights; empty before the first refit.
    """

    error: list[Any] | None
    value: Any
    torn: bool
    label: str


def call_in_worker(worker: Any, method: str, args: Any, kwargs: dict[str, Any]) -> _Answer:
    """Calls a method of the weight-transfer API in a worker."""
    worker = getattr(worker, "worker", worker)  # out of vLLM's wrapper
    engine = worker.weight_transfer_engine
    if method == "start_weight_update":
        worker._weight_update_active = False  # an update that was left takes no part in this one
    error = value = None
    try:
        if method == _FRAME:
            value = engine.answer_frame(*args)
        else:
            getattr(worker, method)(*args, **kwargs)
    except Exception as raised:
        if method in ("start_weight_update", "update_weights"):
            worker._weight_update_active = False
        error = encode_error(raised, engine.name)
    return _Answer(error, value, *engine.state())


def _check_whole(core: Any, what: str) -> None:
    if reason := _hold_of(core).reason:
        raise WeightsTornError(
            f"vLLM {what}: {reason}", fix="update the weights again; the engine needs no restart"
        )


def _hold_of(core: Any) -> _Hold:
    found: _Hold = core.__dict__.setdefault("rl_hold", _Hold())
    return found


def _release(core: Any) -> None:
    """Lets the scheduler go on as before the update; what is cached may be of other weights."""
    hold = _hold_of(core)
    core._reset_caches()
    if hold.before is not None:
        core.scheduler.set_pause_state(hold.before)
    hold.before, hold.reason = None, ""
