"""Everything of SGLang that is touched and not public, and the versions it was seen in.

A release outside the range is refused with this list: these are the places to look at.
"""

from __future__ import annotations

from functools import partial

from rl_hosting.engine_versions import check_tested, installed_version
from rl_sglang.manifest import BACKEND

__all__ = ["PRIVATE", "check_version", "engine_version"]

#: What is touched, and what for. Seen in 0.5.21 and 0.5.23.
PRIVATE: dict[str, str] = {
    "srt.entrypoints.engine.Engine.run_scheduler_process_func, ._launch_detokenizer_subprocesses, "
    "._scheduler_init_result": "a function of rl-sglang in its schedulers, no detokenizer, and the "
    "size of the cache",
    "srt.entrypoints.engine.mp": "on the CPU, schedulers are forked, which is faster",
    "srt.managers.tokenizer_manager.TokenizerManager": "auto_create_handle_loop, abort_request, "
    "rid_to_state, last_receive_tstamp, flush_cache, release_memory_occupation, "
    "resume_memory_occupation",
    "srt.managers.scheduler.Scheduler, run_scheduler_process": "a receiver of refits beside each "
    "part of the model; .model_config.hf_eos_token_id, .tp_worker.model_runner",
    "srt.managers.schedule_batch.Req._check_str_based_finish, FINISH_MATCHED_STR": "stop strings",
    "srt.sampling.sampling_batch_info.SamplingBatchInfo": "from_schedule_batch, sampling_seed, "
    "temperatures, top_ks, top_ps, need_top_k_sampling, need_top_p_sampling, is_all_greedy",
    "srt.layers.sampler.register_sampler_backend, Sampler, multinomial_with_seed": "the sampler",
    "srt.managers.load_snapshot.shm_path_for": "the file of its load, removed with the engine",
    "srt.model_loader.loader._initialize_model, initialize_dummy_weights, DefaultModelLoader"
    ".load_weights_only, .load_model": "the model before its weights are loaded, and what hooks "
    "derive from the weights",
    "ModelRunner.model, .model_config, .server_args": "the part of the model in a scheduler",
    "ModelRunner.lora_manager": "adapters: load_lora_adapter_from_tensors, unload_lora_adapter, "
    "fetch_new_loras, lora_modules, memory_pool.A_buffer, .B_buffer, .uid_to_buffer_id, "
    ".target_modules",
    "srt.lora.lora.LoRAAdapter, .layers, LoRAConfig.from_dict, get_layer_id, "
    "get_target_module_name, module.slice_lora_a_weights, .slice_lora_b_weights": "which part of "
    "an adapter a scheduler has, to read it back",
    "TokenizerManager.lora_registry.register, LoRARef": "how requests name an adapter",
    "Module.load_weights of a model": "which of its parameters a tensor goes to",
    "QuantizeMethodBase.process_weights_after_loading": "what it makes of weights that SGLang "
    "rearranges, again in a refit",
    "Module.post_load_weights of a model": "what it computes of weights, again after a refit",
    "srt.models.deepseek_common.attention_backend_handler, srt.models.afmoe.fused_moe, "
    "srt.models.qwen2_moe.fused_gate_sigmoid_mul_add": "on the CPU, torch in place of Triton",
    "VocabParallelEmbedding.org_vocab_size": "rows beyond it are padding",
    "GemmaRMSNorm.gemma_weight, .refresh_gemma_weight": "weight plus one, renewed after a refit",
    "RadixAttention.k_scale, .v_scale, .k_scale_float, .v_scale_float": "scales of an FP8 cache",
    "srt.utils.hf_transformers_utils.get_context_length": "the context of a model",
    "srt.utils.hf_transformers_utils.get_config, .hf_transformers.common.get_rope_config": "the "
    "positions that SGLang reads",
    "LogitsProcessor._compute_lm_head, modules of srt.layers.activation, cos_sin_cache of rotary "
    "positions": "compared with transformers when an engine is built",
    "ModelRunner.forward, .token_to_kv_pool, KVCache": "NaN in rows, and the memory of the cache, "
    "which is cleared after them",
    "ModelRunner.attn_backend, .req_to_token_pool, .token_to_kv_pool_allocator, ForwardMode, "
    "RadixAttention.sliding_window_size": "attention of torch, compared on a row of random tokens",
}

#: The installed SGLang's version, and what refuses one that was not tested.
engine_version = partial(installed_version, BACKEND)
check_version = partial(check_tested, BACKEND, "SGLang", PRIVATE)
