"""Everything of vLLM that is touched and not public, and the versions it was seen in.

A release outside the range is refused with this list: these are the places to look at.
"""

from __future__ import annotations

from functools import partial

from rl_hosting.engine_versions import check_tested, installed_version
from rl_vllm.manifest import BACKEND

__all__ = ["PRIVATE", "check_version", "engine_version"]

#: What is touched, and what for. Seen in 0.27.1 and 0.32.0.
PRIVATE: dict[str, str] = {
    "vllm.v1.engine.llm_engine.LLMEngine": "the loop of requests: add_request, step, "
    "abort_request, has_unfinished_requests, collective_rpc, reset_prefix_cache, sleep, wake_up",
    "vllm.v1.engine.async_llm.AsyncLLM": "the same, asynchronously",
    "current_platform.register_triton_kernel_overrides, configure_logging_if_needed": "on the CPU, "
    "called once before engines are forked, where vLLM has them",
    "EngineArgs.worker_extension_cls": "methods of rl-vllm in the engine's workers",
    "Worker.get_model, .vllm_config, .rank": "the model in a worker",
    "Module.load_weights of a model": "which of its parameters a tensor goes to",
    "vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm": "on the CPU, keeps the "
    "weights that vLLM packs for oneDNN, and packs them again after a refit",
    "Worker.model_runner.lora_manager._adapter_manager": "adapters: add_adapter, activate_adapter, "
    "remove_adapter, modules, packed_modules, lora_index_to_id",
    "LoRAModel.from_lora_tensors, PEFTHelper, parse_fine_tuned_lora_name, hf_to_vllm_mapper": "an "
    "adapter of tensors in memory",
    "BaseLinearLayerWithLoRA.slice_lora_a, .slice_lora_b, .lora_a_stacked, .lora_b_stacked, "
    ".n_slices": "which part of an adapter a worker has, to read it back",
    "module.cpu_linear": "on the CPU, marks a module whose weights are packed",
    "CPUUnquantizedExperts.process_weights_after_loading, .apply": "on the CPU, the same for "
    "experts",
    "vllm._custom_ops.rotary_embedding, RotaryEmbedding.forward_cpu, .forward_native": "on the "
    "CPU, replaces a kernel that is wrong",
    "Attention.forward, .num_heads, .num_kv_heads, .head_size": "on the CPU, refuses keys of more "
    "heads than it computes with",
    "VocabParallelEmbedding.org_vocab_size": "rows beyond it are padding",
    "vllm.distributed.parallel_state.get_world_group": "reads sharded tensors back",
    "IncrementalDetokenizer.from_new_request, .update, .token_ids": "where rows end at stop "
    "strings",
    "Worker.execute_model, .model_runner.kv_caches, LogitsProcessor.forward": "NaN in rows, and "
    "the memory of the cache, which is cleared after them",
    "Sampler.forward, SamplingMetadata.no_penalties, LogprobsTensors": "log-probs of greedy rows "
    "with a repetition penalty",
    "OutputProcessor.request_states, .detokenizer": "tokens generated so far, as a sign of life",
    "model_loader.base_loader.initialize_model, .process_weights_after_loading": "the model before "
    "its weights are loaded, and what hooks derive from the weights",
    "vllm.transformers_utils.config.get_config": "the configuration of a checkpoint",
    "vllm.v1.attention.backends.registry.AttentionBackendEnum": "whether there is CPU_MLA",
    "vllm.config.set_current_vllm_config": "set while the model's loader runs, and its hooks",
    "QuantizeMethodBase.process_weights_after_loading, Attention.process_weights_after_loading, "
    "set_default_torch_dtype": "what a refit runs again for layers that vLLM rearranges",
    "online_process_loader": "the name of loaders that wait for the last tensor of a layer",
    "OnlineQuantizationConfig.online_quantization_time": "a number that is not made of weights",
    "Attention.impl.bmm1_scale, .bmm2_scale": "values derived from the scales of an FP8 cache",
    "Attention._k_scale, ._v_scale; their ..._float, ..._cpu": "scales of an FP8 cache",
}

#: The installed vLLM's version, and what refuses one that was not tested.
engine_version = partial(installed_version, BACKEND)
check_version = partial(check_tested, BACKEND, "vLLM", PRIVATE)
