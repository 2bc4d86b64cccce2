"""vLLM with experts that its hook packs for good, as it does without rl-vllm: a program.

rl-vllm keeps plain experts on a CPU. This takes that back, so that a refit has to collect them and
have vLLM's own hook pack them. It prints, as JSON, what a refit renewed, and where tensors, tokens
or log-probs are not those of an engine that loads the same weights.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from engines.held import layers, tensors
from transformers import AutoModelForCausalLM

from rl_vllm import cpu_torch  # noqa: F401 # before vLLM
from rl_vllm.cpu_weights import keep_plain_weights
from rl_vllm.loading import watch_loading

if __name__ == "__main__":
    keep_plain_weights()
    watch_loading()

    from vllm import EngineArgs, SamplingParams
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.v1.engine.llm_engine import LLMEngine

    from rl_vllm.weights import EngineWeights, ModelSink

    for name in ("process_weights_after_loading", "apply"):
        setattr(CPUUnquantizedExperts, name, getattr(CPUUnquantizedExperts, name).__wrapped__)

    def start(path: str) -> tuple[LLMEngine, Any]:
        engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=path,
                dtype="float32",
                skip_tokenizer_init=True,
                enforce_eager=True,
                enable_chunked_prefill=False,
                kv_cache_memory_bytes=64 << 20,
                max_model_len=64,
            )
        )
        inner: Any = engine.engine_core
        return engine, inner.engine_core.model_executor.driver_worker.worker

    def generate(engine: LLMEngine) -> tuple[list[int], list[float]]:
        sampling = SamplingParams(
            temperature=0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=0
        )
        engine.add_request("0", {"prompt_token_ids": [5, 6, 7, 8]}, sampling)
        done: list[Any] = []
        while engine.has_unfinished_requests():
            done += [one for one in engine.step() if one.finished]
        [output] = done[0].outputs
        ids = list(output.token_ids)
        return ids, [output.logprobs[i][token].logprob for i, token in enumerate(ids)]

    old, new = sys.argv[1:]
    engine, worker = start(old)
    before = generate(engine)
    weights = EngineWeights(worker)
    sink = ModelSink(weights)
    given = AutoModelForCausalLM.from_pretrained(new, dtype=torch.float32).state_dict()
    sink.begin(1)
    with torch.no_grad():
        for spec in sink.specs():
            if spec.alias_of is None:
                whole = given[spec.name].flatten()
                for begin in range(0, len(whole), 1000):
                    sink.write(spec.name, begin, whole[begin : begin + 1000], of=spec)
    sink.finish(1)
    read = dict(sink.read([spec.name for spec in sink.specs()]))
    fresh, other = start(new)
    got, wanted = tensors(lambda: sink), tensors(lambda: ModelSink(EngineWeights(other)))
    (ids, logprobs), (wanted_ids, wanted_logprobs) = generate(engine), generate(fresh)
    print(
        json.dumps(
            {
                **layers(lambda: sink),
                "compared_by_the_sink": sorted(name for name, one in read.items() if one is None),
                "changed": before[0] != ids,
                "tensors": sorted(
                    k for k in wanted.keys() | got.keys() if got.get(k) != wanted.get(k)
                ),
                "tokens": ids != wanted_ids,
                "logprobs": max(abs(a - b) for a, b in zip(logprobs, wanted_logprobs, strict=True)),
            }
        )
    )
