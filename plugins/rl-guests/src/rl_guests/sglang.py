"""Verified refits of a stock SGLang server: its entry point ``sglang.srt.plugins``.

Frames of a driver come by SGLang's own route ``POST /set_internal_state``, as
``{"server_args": {"rl_refit": 1}, "rid": "<a frame in base64>"}``: of that body SGLang hands only a
``rid`` on that is text. The answer is ``[{"rl_refit": ["<a reply in base64>", ...]}, ...]``: for
each data-parallel replica, the replies of its schedulers in the order of their ranks. A server
without this plugin answers ``[false]``, and so does this one if the frame cannot be read. With 0
instead of 1 and without a frame, the answer says whether somebody paused the server.

SGLang broadcasts such a request to all schedulers of a replica, between two of their steps. The one
that lets a refit write is answered when the refit is over, so that nothing is generated meanwhile.

The schedulers change the label of the weights in that same call, and every part of a row that they
send has the labels of its tokens. What the HTTP server reports of the weights follows with the
answer, and is of no importance for rows.
"""

from __future__ import annotations

import base64
import os
import pkgutil
import sys
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import distributed

from rl_core.errors import CapabilityError, LifecycleError
from rl_hosting.worker_refits import TORN, WorkerRefits

if TYPE_CHECKING:
    from collections.abc import Callable

    from rl_core.interfaces import WeightSink
    from rl_sglang.weights import EngineWeights

__all__ = ["KEY", "register"]

#: What marks our requests and answers on SGLang's route.
KEY = "rl_refit"

_SCHEDULER = "sglang.srt.managers.scheduler"
_STREAMED = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
_TOKENIZER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
#: What is called of SGLang's scheduler: without one of these, nothing is joined.
_CALLED = (
    "pause_generation continue_generation flush_cache abort_request send_abort_output "
    "record_weight_version_change"
)


def register() -> None:
    """Joins SGLang, in each process of a server; nothing changes for others before a refit comes.

    Raises:
        AttributeError: This SGLang lacks what is joined. It logs that, and goes on without.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    hooks: dict[str, Callable[..., Any]] = {}
    if _SCHEDULER in sys.modules:  # a scheduler's process has it before SGLang loads plugins
        hooks[f"{_SCHEDULER}.Scheduler.__init__"] = watch_and_init
        hooks[f"{_SCHEDULER}.Scheduler.set_internal_state"] = answer_in_scheduler
        hooks[f"{_SCHEDULER}.Scheduler._add_request_to_queue"] = add_or_refuse
        hooks[f"{_STREAMED}.accept"] = send_with_labels
        for name in _CALLED.split():
            pkgutil.resolve_name(f"{_SCHEDULER}.Scheduler.{name}")
    if _SCHEDULER not in sys.modules or _TOKENIZER.rpartition(".")[0] in sys.modules:
        hooks[f"{_TOKENIZER}.set_internal_state"] = answer_client
        pkgutil.resolve_name(f"{_TOKENIZER}._update_weight_version_if_provided")
    for target in hooks:
        pkgutil.resolve_name(target)
    for target, hook in hooks.items():
        HookRegistry.register(target, hook, HookType.AROUND)


async def answer_client(set_state: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Returns what the schedulers answered; in the process of the HTTP server."""
    if KEY not in request.server_args:
        return await set_state(manager, request)
    if not request.server_args[KEY]:  # whether somebody paused it, which no route of SGLang says
        return [{KEY: [manager.is_pause]}]
    manager.auto_create_handle_loop()
    replies = await manager.set_internal_state_communicator(request)
    found = [one.rid.split(",") if one.updated else [""] for one in replies]
    labels = {label for label, *_ in found}
    if len(labels) == 1 and (label := labels.pop()):
        manager._update_weight_version_if_provided(label)
    return [{KEY: answers} if answers else False for _, *answers in found]


def watch_and_init(init: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Watches how the scheduler's part of the model is loaded, and what it computes."""
    from rl_sglang.loading import watch_loading
    from rl_sglang.nan_watch import watch_rows

    watch_loading()
    watch_rows()
    scheduler.rl_refits = Refits(scheduler)
    init(scheduler, *args, **kwargs)


def answer_in_scheduler(set_state: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Answers a frame; all schedulers of a replica are in here at the same time."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    if KEY not in request.server_args:
        return set_state(scheduler, request)
    try:
        label, answers = scheduler.rl_refits.answer_together(base64.b64decode(request.rid or ""))
    except (ValueError, msgspec.MsgspecError):  # no frame, which all of them find
        return SetInternalStateReqOutput(updated=False)
    text = ",".join([label, *(base64.b64encode(answer).decode() for answer in answers)])
    return SetInternalStateReqOutput(updated=True, rid=text)


def send_with_labels(accept: Callable[..., None], sent: Any, *, req: Any) -> None:
    """Sends the labels of the weights with every part of a row, not with its last alone."""
    from sglang.srt.utils.weight_versions import compute_weight_version_spans

    before = len(sent.weight_versions)
    accept(sent, req=req)
    if len(sent.weight_versions) > before and sent.weight_versions[-1] is None:
        sent.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events, sent.current_weight_version, len(req.output_ids)
        )


def add_or_refuse(
    add: Callable[..., None], scheduler: Any, request: Any, *args: Any, **kwargs: Any
) -> None:
    """Takes no request while the weights are torn."""
    from sglang.srt.managers.io_struct import AbortReq

    if not (why := scheduler.rl_refits.why_not):
        add(scheduler, request, *args, **kwargs)
        return
    scheduler._release_aborted_request(request)
    scheduler.send_abort_output(AbortReq(rid=request.rid, finished_reason=_finish(why)), request)


def _finish(why: str) -> dict[str, Any]:
    """How SGLang ends a request that it refuses."""
    return {"type": "abort", "status_code": 503, "message": why}


class Refits(WorkerRefits):
    """The receiver of refits in a scheduler, which stands still while one writes.

    Args:
        scheduler: SGLang's.

    Attributes:
        why_not: Why the scheduler takes no request; empty if it does.
    """

    def __init__(self, scheduler: Any) -> None:
        super().__init__(self._make_sink, f"SGLang scheduler (pid {os.getpid()})", shared=True)
        self._scheduler = scheduler
        self._held = self._paused_before = False
        self.why_not = ""

    def answer_together(self, frame: bytes) -> tuple[str, list[bytes]]:
        """Answers a frame, and lets the scheduler go on as the ranks together find their weights.

        Returns:
            The label of the weights, which is empty before the first refit and while they are
            torn, and the answers of all ranks.

        Raises:
            MsgspecError: It is no frame.
        """
        from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput
        from sglang.srt.runtime_context import get_parallel

        with torch.inference_mode(False):  # or tensors made here could not be written elsewhere
            mine = self.answer_frame(frame), self.state()
        group = get_parallel().tp_group.cpu_group
        found: list[Any] = [mine] * distributed.get_world_size(group)
        distributed.all_gather_object(found, mine, group=group)
        labels = {state["label"] for _, state in found}
        changed, why = self._held or self.why_not, ""
        if any(state["torn"] for _, state in found) or len(labels) > 1:
            why = "the last refit failed, and left a part of the weights new"
        elif changed and not self._flush():
            why = "keys and values of the weights before the last refit could not be dropped"
        label = "" if why else labels.pop()
        if label:  # before a row that these weights compute
            self._scheduler.record_weight_version_change(new_version=label)
        self.why_not = (
            why and f"{TORN}SGLang takes no request: {why}. Refit again; no restart is due"
        )
        if why:
            everything = AbortReq(
                abort_all=True, abort_message=self.why_not, finished_reason=_finish(self.why_not)
            )
            self._scheduler.abort_request(everything)
        if self._held and not self._paused_before:
            self._scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self._held = False
        return label, [answer for answer, _ in found]

    def grant(self, key: str) -> None:
        """See :meth:`WorkerRefits.grant`: nothing is computed before it returns."""
        self._check_memory()
        self._hold()
        super().grant(key)

    def _hold(self) -> None:
        """Has running requests wait, as new ones do; their keys and values are computed again."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        self._held, self._paused_before = True, self._scheduler._engine_paused
        self._scheduler.pause_generation(PauseGenerationReqInput(mode="retract"))
        self._scheduler.device_module.synchronize()

    def _flush(self) -> bool:
        """Drops what is cached; requests that wait for a grammar have nothing there."""
        grammars = self._scheduler.grammar_manager
        waiting, grammars.grammar_queue = grammars.grammar_queue, []
        try:
            return bool(self._scheduler.flush_cache())
        finally:
            grammars.grammar_queue = waiting

    def _check_memory(self) -> None:
        """Makes sure that there are weights to write to."""
        if "weights" in self._scheduler.weight_updater.offload_tags:
            raise LifecycleError(
                f"{self.name} has released the memory of its weights",
                fix="call /resume_memory_occupation first",
            )

    @cached_property
    def _weights(self) -> EngineWeights:
        from rl_sglang.probes import find_differences
        from rl_sglang.weights import EngineWeights, checkpoint_of

        runner = self._scheduler.tp_worker.model_runner
        checkpoint = checkpoint_of(runner)
        return EngineWeights(runner, checkpoint, find_differences(runner, checkpoint))

    def _make_sink(self) -> WeightSink:
        from sglang.srt.runtime_context import get_parallel

        from rl_sglang.weights import ModelSink

        self._check_memory()
        if get_parallel().pp_size > 1 or get_parallel().attn_dp_enabled:
            raise CapabilityError(
                "SGLang with pipeline stages, or with data-parallel attention, takes no refit",
                fix="start the server without --pp-size and --enable-dp-attention",
                capability="refit",
            )
        return ModelSink(self._weights)
