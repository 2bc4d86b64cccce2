"""What the SGLang backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from rl_backends.engine.config import EngineLoraConfig  # noqa: TC001 - read when keys are checked
from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import AlsoCalled, Range

__all__ = ["SglangConfig", "SglangEngineConfig"]


class SglangEngineConfig(TypedDict, total=False):
    """How the engine is started; the keys are SGLang's, unless marked otherwise.

    Attributes:
        tp_size: Processes that share every layer. Default 1.
        mem_fraction_static: Fraction of a GPU's memory for weights and key/value cache.
        max_total_tokens: Tokens in the key/value cache. Default: as many as fit into the remaining
            memory; on the CPU into 512 MiB.
        max_running_requests: Rows decoded together; others wait. Default: SGLang's; on the CPU 256.
        chunked_prefill_size: Prompt tokens of one step.
        max_prefill_tokens: Prompt tokens of one batch.
        max_model_len: Same as ``max_model_len`` outside ``sglang_cfg`` (not SGLang's key, which is
            ``context_length``).
        dtype: Same as ``torch_dtype`` outside ``sglang_cfg``.
        kv_cache_dtype: Dtype of the cache; with ``"fp8_e4m3"`` a refit also sends the scales.
        attention_backend: Kernels for attention. On the CPU always ``"torch_native"``.
        disable_cuda_graph: No CUDA graphs.
        disable_radix_cache: Drop keys and values of prompts as soon as a row ends.
        load_format: ``"dummy"`` starts with random weights, which the first refit replaces.
        random_seed: SGLang's seed; rows have their own seeds. Default: a random one.
        lora: Serve the policy's adapters; a refit then sends only these (not SGLang's key). The
            policy needs ``lora.refit`` ``"adapter"``. See :class:`EngineLoraConfig`. Default:
            refits send all weights.
        refit: Whether the engine takes refits (not SGLang's key). True refuses a model that cannot
            take one, when the engine is created. False is for an engine that only generates.
            Default True.
        sleep_level: What ``finish_generation`` does to the weights (not SGLang's key): 1 moves them
            to host memory, 2 drops them, and generation waits for a refit. Default 1.
        start_timeout_s: Seconds for the engine to start (not SGLang's key). Default 600.
        python: The Python of another environment, which has SGLang, rl-sglang, and rl-core,
            rl-backends and rl-hosting in the same versions (not SGLang's key). Default: this
            process's.
        verbose: Show the engine's log (not SGLang's key); if False, only errors show its end.
            Default False.
        engine_args: Other arguments of ``ServerArgs``, by name; arguments that change results or
            refits are refused.
    """

    tp_size: Annotated[int, Range(ge=1), AlsoCalled("tensor_parallel_size tp")]
    mem_fraction_static: Annotated[float, Range(gt=0, le=1), AlsoCalled("gpu_memory_utilization")]
    max_total_tokens: Annotated[int, Range(ge=1)]
    max_running_requests: Annotated[int, Range(ge=1)]
    chunked_prefill_size: int
    max_prefill_tokens: Annotated[int, Range(ge=1)]
    max_model_len: Annotated[int | None, Range(ge=1)]
    dtype: Literal["float32", "bfloat16", "float16", "auto"]
    kv_cache_dtype: str
    attention_backend: str
    disable_cuda_graph: bool
    disable_radix_cache: bool
    load_format: Literal["auto", "safetensors", "pt", "npcache", "dummy"]
    random_seed: int
    lora: Annotated[EngineLoraConfig | None, AlsoCalled("lora_cfg enable_lora")]
    refit: bool
    sleep_level: Literal[1, 2]
    start_timeout_s: Annotated[float, Range(gt=0)]
    python: str
    verbose: bool
    engine_args: dict[str, Any]


class SglangConfig(GenerationConfig):
    """Configuration of :class:`rl_sglang.generation.SglangGeneration`.

    Attributes:
        sglang_cfg: See :class:`SglangEngineConfig`.
        torch_dtype: Dtype of the weights; ``"auto"`` keeps the checkpoint's. Default ``"auto"``.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
    """

    sglang_cfg: NotRequired[SglangEngineConfig]
    torch_dtype: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16", "auto"],
            AlsoCalled("dtype precision"),
            AlsoCalled("bf16", "bfloat16"),
        ]
    ]
    trust_remote_code: NotRequired[bool]
