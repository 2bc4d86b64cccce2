"""Where vLLM computes rows, and has their keys and values: see :class:`NanWatch`."""

from __future__ import annotations

from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu_worker import Worker

from rl_backends.engine.methods import call_first
from rl_backends.engine.nan_watch import NAN_WATCH

__all__ = ["watch_rows"]


def watch_rows() -> None:
    """Has vLLM, in this process, look for NaN in rows of every client, and clear its cache."""
    call_first(
        LogitsProcessor,
        "forward",
        lambda _, head, hidden_states, *more, **named: NAN_WATCH.look(hidden_states),
    )
    call_first(
        Worker,
        "execute_model",
        lambda worker, *more: NAN_WATCH.clear(worker.model_runner.kv_caches),
    )
