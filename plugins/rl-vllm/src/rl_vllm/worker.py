"""What runs in vLLM's workers: the receiver of refits beside each part of the model.

``RefitExtension`` is mixed into vLLM's worker class (``worker_extension_cls``); its one method is
called by name in every worker. vLLM's own weight-transfer engines would be the other way: they
load tensors as they come, without versions, digests, a way back or several receivers that commit
together, so that all of the refit protocol would have to live beside them anyway, and their
interface is still changing between releases.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from rl_hosting import WorkerRefits
from rl_vllm.adapters import VllmAdapters
from rl_vllm.cpu_rotary import repair_rotary
from rl_vllm.cpu_weights import keep_plain_weights
from rl_vllm.loading import watch_attention, watch_loading
from rl_vllm.nan_watch import watch_rows
from rl_vllm.sampler import keep_greedy_logprobs
from rl_vllm.weights import EngineWeights, ModelSink

__all__ = ["RefitExtension"]

# Before a model is loaded: vLLM imports this first.
keep_plain_weights()
repair_rotary()
watch_loading()
watch_attention()
keep_greedy_logprobs()
watch_rows()


class RefitExtension:
    """Mixed into vLLM's worker; see the module."""

    def rl_refit(self, frame: bytes) -> bytes:
        """Answers one call of a :class:`WorkerRefits` method."""
        refits = self.__dict__.get("rl_refits")
        if refits is None:
            worker: Any = self
            weights = cache(lambda: EngineWeights(worker))
            adapters = cache(lambda: VllmAdapters(worker, weights))
            serves = worker.vllm_config.lora_config is not None
            refits = self.__dict__["rl_refits"] = WorkerRefits(
                lambda: adapters() if serves else ModelSink(weights()),
                f"vLLM worker {worker.rank} (pid {os.getpid()})",
            )
        answer: bytes = refits.answer_frame(frame)
        return answer
