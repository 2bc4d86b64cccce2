"""What the SGLang backend is configured with, as data: nothing heavy is imported here."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import AlsoCalled, Range

__all__ = ["SglangConfig", "SglangEngineConfig"]


class SglangEngineConfig(TypedDict, total=False):
    """How the engine is started; the keys are SGLang's own unless said otherwise.

    Attributes:
        tp_size: Processes that share every layer. Default 1.
        mem_fraction_static: Fraction of a GPU's memory for weights and key/value cache.
        max_total_tokens: Tokens in the key/value cache, instead of what memory is left for. On the
            CPU, by default what fits into 512 MiB.
        max_running_requests: Rows decoded together; others wait. On the CPU by default 256.
        chunked_prefill_size: Prompt tokens of one step.
        max_prefill_tokens: Prompt tokens that are taken up together.
        max_model_len: As the key of the same name outside (not SGLang's key, which is
            ``context_length``).
        dtype: Of the weights, as ``torch_dtype`` outside.
        kv_cache_dtype: Such as ``"fp8_e4m3"``; the scales then travel with a refit.
        attention_backend: Kernels for attention. On the CPU always ``"torch_native"``.
        disable_cuda_graph: No CUDA graphs.
        disable_radix_cache: Forget keys and values of prompts as soon as a row ends.
        load_format: ``"dummy"`` starts with random weights, for a refit to replace.
        random_seed: Of SGLang itself; rows have seeds of their own. Default: a fresh one.
        refit: Whether weights are going to be sent (not SGLang's key). Default True: a model that
            takes no refit is refused when the engine is built. False is for an engine that only
            generates; it refuses refits.
        sleep_level: What ``finish_generation`` does to the weights (not SGLang's key): 1 moves them
            to host memory, 2 drops them, and generation waits for a refit. Default 1.
        start_timeout_s: Seconds in which the engine must be there (not SGLang's key). Default 600.
        python: The interpreter of another environment, which has SGLang, rl-sglang, and rl-core and
            rl-hosting in the releases of this one (not SGLang's key). Default: this one's.
        verbose: Show what the engine logs (not SGLang's key); otherwise only an error shows the end
            of it. Default False.
        engine_args: Other arguments of ``ServerArgs``, by name; those that results or refits depend
            on are refused.
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
        torch_dtype: Dtype of the weights; ``"auto"``, the default, keeps the checkpoint's.
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
