"""What runs in SGLang's schedulers: the receiver of refits, and what a row is sampled and ended by.

SGLang starts a process for each part of the model, by a function that may be replaced: here it is
:func:`run_scheduler`.
"""

from __future__ import annotations

import os
import tempfile
import threading
import traceback
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from sglang.srt.layers.sampler import register_sampler_backend
from sglang.srt.managers import load_snapshot
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.schedule_batch import FINISH_MATCHED_STR, Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from rl_backends.generation.stop_strings import StopStrings
from rl_hosting import WorkerRefits
from rl_sglang.adapters import SglangAdapters
from rl_sglang.loading import watch_loading
from rl_sglang.nan_watch import watch_rows
from rl_sglang.probes import find_differences
from rl_sglang.sampler import GREEDY, RowSampler, with_seeds
from rl_sglang.weights import EngineWeights, ModelSink, check_same, checkpoint_of
from rl_sglang.workers import SchedulerFailure, connect

if TYPE_CHECKING:
    from rl_core.interfaces import WeightSink

__all__ = [
    "GREEDY",
    "SAMPLER",
    "STOP_STRINGS",
    "SchedulerOptions",
    "keep_files_private",
    "register_sampler",
    "run_scheduler",
]

#: How SGLang calls the sampler that ours replaces: on the CPU it takes this one in any case.
SAMPLER = "pytorch"
#: The custom parameter of a request that has what ends it.
STOP_STRINGS = "rl_stop_strings"


class SchedulerOptions(msgspec.Struct):
    """What a scheduler is told by the engine's process.

    Attributes:
        address: Where to connect; see :class:`rl_sglang.workers.Workers`.
        raw: Log-probs are raw.
        tokenizer: Of the model, if it has one: for stop strings.
        trust: Python that comes with the checkpoint may run.
        takes_refits: The engine is going to be refit.
        lora: The engine's key ``lora``, if refits bring adapters.
    """

    address: str
    raw: bool
    tokenizer: str | None
    trust: bool
    takes_refits: bool
    lora: dict[str, Any] | None = None


def register_sampler(options: SchedulerOptions) -> None:
    """Has SGLang use our sampler, in this process."""
    register_sampler_backend(SAMPLER, partial(RowSampler, raw=options.raw))


def keep_files_private() -> None:
    """Has SGLang keep the file that tells its load with the engine's sockets, in this process.

    It would be in /dev/shm, where nobody removes that of an engine which ends as soon as it began.
    """
    load_snapshot.shm_path_for = lambda name: str(Path(tempfile.gettempdir(), "load"))


def run_scheduler(
    options: SchedulerOptions,
    server_args: Any,
    port_args: Any,
    gpu_id: int,
    tp_rank: int,
    *args: Any,
    **kwargs: Any,
) -> None:
    """SGLang's scheduler, with a receiver of refits beside its part of the model."""
    connection = connect(options.address, tp_rank)
    register_sampler(options)
    keep_files_private()
    watch_loading()
    watch_rows()
    if not torch.cuda.is_available():
        from rl_sglang.cpu_torch import choose_torch, ignore_pinning

        choose_torch()
        if options.lora is not None:
            ignore_pinning()
    _watch_stop_strings(options)
    make = SamplingBatchInfo.from_schedule_batch.__func__
    SamplingBatchInfo.from_schedule_batch = classmethod(with_seeds(make))

    class RefitScheduler(sglang_scheduler.Scheduler):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            try:
                super().__init__(*args, **kwargs)
            except Exception as error:  # SGLang logs it, and ends all processes
                frames = traceback.extract_tb(error.__traceback__)
                loading = any("model_loader" in frame.filename for frame in frames)
                failure = SchedulerFailure(type(error).__name__, str(error), loading)
                connection.send_bytes(msgspec.msgpack.encode(failure))
                raise
            # Rows say themselves what ends them.
            self.model_config.hf_eos_token_id = set()
            runner = self.tp_worker.model_runner
            checkpoint = checkpoint_of(runner)
            # Here, because SGLang's loop counts the places of its cache that are in use.
            different = find_differences(runner, checkpoint) if options.takes_refits else []
            weights = cache(lambda: EngineWeights(runner, checkpoint, different))
            adapters = cache(lambda: SglangAdapters(runner, options.lora or {}, weights))

            def make_sink() -> WeightSink:
                if options.lora is None:
                    return ModelSink(weights())
                check_same(runner.model, different)
                return adapters()

            refits = WorkerRefits(make_sink, f"SGLang scheduler {tp_rank} (pid {os.getpid()})")

            def answer_frames() -> None:
                """Answers the engine's process until it ends."""
                with suppress(EOFError, OSError):
                    while True:
                        connection.send_bytes(refits.answer_frame(connection.recv_bytes()))

            threading.Thread(target=answer_frames, name="refits", daemon=True).start()

    sglang_scheduler.Scheduler = RefitScheduler
    sglang_scheduler.run_scheduler_process(server_args, port_args, gpu_id, tp_rank, *args, **kwargs)


def _watch_stop_strings(options: SchedulerOptions) -> None:
    """Ends a row with the first token that completes one of its own stop strings.

    SGLang decodes as many last tokens as its tokenizer makes of a stop string, and a model may need
    more for it; it cannot tell the rows of a batch from those without a tokenizer; and it takes 32.
    """
    key = "_rl_stop_strings"

    @cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(options.tokenizer, trust_remote_code=options.trust)

    def check(request: Any, new_accepted_len: int = 1) -> bool:
        strings = (request.sampling_params.custom_params or {}).get(STOP_STRINGS)
        if not strings:
            return False
        watcher = vars(request).setdefault(key, None)
        if watcher is None:
            watcher = vars(request)[key] = StopStrings(strings, tokenizer())
        tokens = request.output_ids
        for count in range(len(tokens) - new_accepted_len, len(tokens)):
            if watcher.push(tokens[count]):
                request.finished_reason = FINISH_MATCHED_STR(matched="one of the row's own")
                request.finished_len = count + 1
                return True
        return False

    Req._check_str_based_finish = check
