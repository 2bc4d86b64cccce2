"""What the vLLM backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from rl_backends.engine.config import EngineLoraConfig  # noqa: TC001 - read when keys are checked
from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import AlsoCalled, Range

__all__ = ["VllmConfig", "VllmEngineConfig"]


class VllmEngineConfig(TypedDict, total=False):
    """How the engine is started; the keys are vLLM's, unless marked otherwise.

    Attributes:
        tensor_parallel_size: Processes that share every layer. Default 1.
        pipeline_parallel_size: Processes that have some of the layers each. Default 1.
        gpu_memory_utilization: Fraction of a GPU's memory that the engine takes. Default: vLLM's.
        kv_cache_memory_bytes: Size of the key/value cache. Default: the remaining memory; on the
            CPU 512 MiB.
        max_model_len: Same as ``max_model_len`` outside ``vllm_cfg``.
        max_num_seqs: Rows decoded together; others wait.
        max_num_batched_tokens: Tokens of one step.
        dtype: Same as ``torch_dtype`` outside ``vllm_cfg``.
        enforce_eager: No CUDA graphs. Default True on the CPU, False elsewhere.
        async_engine: Use vLLM's asynchronous engine. Default False.
        kv_cache_dtype: Dtype of the cache; with ``"fp8"`` a refit also sends the scales.
        load_format: ``"dummy"`` starts with random weights, which the first refit replaces.
        enable_prefix_caching: Keep the keys and values of prompts between calls. Default: vLLM's
            own; on the CPU False for models with recurrent layers.
        lora: Serve the policy's adapters; a refit then sends only these (not vLLM's key). The
            policy needs ``lora.refit`` ``"adapter"``. See :class:`EngineLoraConfig`. Default:
            refits send all weights.
        refit: Whether the engine takes refits (not vLLM's key). True refuses a model that cannot
            take one, when the engine is created. False is for an engine that only generates.
            Default True.
        seed: Seed of rows without their own seed. Default: a random one.
        sleep_level: What ``finish_generation`` does to the weights (not vLLM's key): 1 moves them
            to host memory, 2 drops them, and generation waits for a refit. Default 1.
        start_timeout_s: Seconds for the engine to start (not vLLM's key). Default 600.
        python: The Python of another environment, which has vLLM, rl-vllm, and rl-core, rl-backends
            and rl-hosting in the same versions (not vLLM's key). Default: this process's.
        verbose: Show the engine's log (not vLLM's key); if False, only errors show its end.
            Default False.
        engine_args: Other engine arguments of vLLM, by name; arguments that change results or
            refits are refused.
    """

    tensor_parallel_size: Annotated[int, Range(ge=1), AlsoCalled("tp_size tp")]
    pipeline_parallel_size: Annotated[int, Range(ge=1)]
    gpu_memory_utilization: Annotated[
        float, Range(gt=0, le=1), AlsoCalled("vllm_gpu_memory_utilization mem_fraction_static")
    ]
    kv_cache_memory_bytes: Annotated[int, Range(ge=1)]
    max_model_len: Annotated[int | None, Range(ge=1)]
    max_num_seqs: Annotated[int, Range(ge=1)]
    max_num_batched_tokens: Annotated[int, Range(ge=1)]
    dtype: Literal["float32", "bfloat16", "float16", "auto"]
    enforce_eager: bool
    async_engine: bool
    kv_cache_dtype: str
    load_format: Literal[
        "auto", "hf", "safetensors", "fastsafetensors", "pt", "npcache", "mistral", "dummy"
    ]
    enable_prefix_caching: bool
    lora: Annotated[EngineLoraConfig | None, AlsoCalled("lora_cfg enable_lora")]
    refit: bool
    seed: int
    sleep_level: Literal[1, 2]
    start_timeout_s: Annotated[float, Range(gt=0)]
    python: str
    verbose: bool
    engine_args: dict[str, Any]


class VllmConfig(GenerationConfig):
    """Configuration of :class:`rl_vllm.generation.VllmGeneration`.

    Attributes:
        vllm_cfg: See :class:`VllmEngineConfig`.
        torch_dtype: Dtype of the weights; ``"auto"`` keeps the checkpoint's. Default ``"auto"``.
        trust_remote_code: Run Python that comes with the checkpoint. Default False.
    """

    vllm_cfg: NotRequired[VllmEngineConfig]
    torch_dtype: NotRequired[
        Annotated[
            Literal["float32", "bfloat16", "float16", "auto"],
            AlsoCalled("dtype precision"),
            AlsoCalled("bf16", "bfloat16"),
        ]
    ]
    trust_remote_code: NotRequired[bool]
