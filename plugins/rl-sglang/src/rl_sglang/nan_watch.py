"""Where SGLang computes rows, and has their keys and values: see :class:`NanWatch`."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from rl_backends.engine.nan_watch import NAN_WATCH

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["watch_rows"]


def watch_rows() -> None:
    """Has SGLang, in this process, look for NaN in rows of every client, and clear its cache."""
    from sglang.srt.model_executor.model_runner import ModelRunner

    compute = ModelRunner.forward

    @wraps(compute)
    def forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        NAN_WATCH.clear(_buffers(runner.token_to_kv_pool))
        found = compute(runner, *args, **kwargs)
        logits = getattr(found.logits_output, "next_token_logits", None)
        if logits is not None:  # or the rows go on in another stage of a pipeline
            NAN_WATCH.look(logits)
        return found

    ModelRunner.forward = forward


def _buffers(pool: Any) -> Iterator[Any]:
    """What a pool of keys and values holds, and the pools that it is made of."""
    from sglang.srt.mem_cache.memory_pool import KVCache

    for one in vars(pool).values():
        if isinstance(one, KVCache):
            yield from _buffers(one)
        else:
            yield one
