"""What vLLM's engine core does for an update: it stands still until all workers have committed.

vLLM calls its workers between two steps of the scheduler. So nothing is generated while they are
written to, but the next step would follow an update that failed half-way. Its executor also reads
one answer too few where several workers raise. Both are decided here, in the one process that
calls all workers of a replica.

Weights that are partly new decode nothing: the rows that vLLM has end with the reason, and so does
each that arrives. vLLM's own outputs have no place for it, so it travels as the stop reason of an
output that ends with an error, and the process of the HTTP server makes a response of it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GracefulHTTPError
from vllm.outputs import RequestOutput
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
from vllm.v1.request import RequestStatus

from rl_core.errors import WeightsTornError
from rl_hosting.cluster.remote_error import decode_error, encode_error
from rl_hosting.worker_refits import TORN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

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
    """Wraps what vLLM's engine core does in updates, pauses and requests, and how a row ends.

    Args:
        backend: The name of the weight-transfer backend of which engines are meant.
    """
    call, resume = EngineCore.collective_rpc, EngineCore.resume_scheduler
    add, accept = EngineCore.add_request, LLMEngine.add_request
    complete, put = RequestState._new_completion_output, RequestOutputCollector.put
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
    def add_request(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        if _hold_of(self).reason:  # told by the thread that updates: no row slips in between
            _end_rows(self, [request])
        else:
            add(self, request, *args, **kwargs)

    @functools.wraps(accept)
    def add_request_here(self: Any, *args: Any, **kwargs: Any) -> Any:
        # A core in this process refuses a request when it is already among those to be answered.
        if isinstance(core := getattr(self.engine_core, "engine_core", None), EngineCore):
            _check_whole(core, "takes no request")
        return accept(self, *args, **kwargs)

    @functools.wraps(complete)
    def complete_with_labels(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = complete(self, *args, **kwargs)  # vLLM labels the last part of a row alone
        output.weight_versions = self._weight_version_spans()
        return output

    @functools.wraps(put)
    def put_or_refuse(self: Any, output: Any) -> None:
        rows = output.outputs if isinstance(output, RequestOutput) else ()
        for why in (str(row.stop_reason) for row in rows if row.finish_reason == "error"):
            if why.startswith(TORN):
                output = GracefulHTTPError(why, HTTPStatus.SERVICE_UNAVAILABLE)
        put(self, output)

    EngineCore.collective_rpc = collective_rpc
    EngineCore.resume_scheduler = resume_scheduler
    EngineCore.add_request = add_request
    LLMEngine.add_request = add_request_here
    RequestState._new_completion_output = complete_with_labels
    RequestOutputCollector.put = put_or_refuse
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
        if isinstance(core, EngineCoreProc):  # one in this process has no row during a call
            _end_rows(core, core.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED))
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


def _end_rows(core: Any, requests: Iterable[Any]) -> None:
    """Ends rows of clients in other processes, with the reason why nothing is decoded."""
    why = f"{TORN}vLLM takes no request: {_hold_of(core).reason}. Refit again; no restart is due"
    for request in requests:
        name = request.request_id
        output = EngineCoreOutput(name, [], finish_reason=FinishReason.ERROR, stop_reason=why)
        outputs = EngineCoreOutputs(finished_requests={name}, outputs=[output])
        core.output_queue.put_nowait((request.client_index, outputs))


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
