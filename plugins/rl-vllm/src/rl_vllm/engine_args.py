"""Which of vLLM's engine arguments may be given, and why the others may not.

An argument that would change what rl-vllm promises (which model it is, what the log-probs are of,
that a refit reaches all of it) is refused by name. What is in none of these tables is refused, too:
nobody has looked at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_backends.engine.arguments import ArgumentRules, Reason
from rl_core.config import config_keys
from rl_core.errors import ConfigError
from rl_vllm.config import VllmEngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ALLOWED",
    "OWN_KEYS",
    "REFUSED",
    "WITHOUT_REFITS",
    "check_engine_args",
    "check_temperature",
]


#: vLLM raises what is lower to the first, and refuses what is higher than the second.
_TEMPERATURES = 0.01, 2.0


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Arguments that have a key of their own.
OWN_KEYS: dict[str, str] = {key: f"vllm_cfg.{key}" for key in config_keys(VllmEngineConfig)} | {
    "model": "model_name",
    "dtype": "torch_dtype",
    "trust_remote_code": "trust_remote_code",
    "max_model_len": "max_model_len",
    "logprobs_mode": "logprobs_mode",
}

#: How fast, with which kernels, in how much memory: refits do not depend on them.
ALLOWED = _names(
    """
    aggregate_engine_logging all2all_backend async_scheduling attention_backend attention_config
    block_size collect_detailed_traces compilation_config cpu_distributed_timeout_seconds
    cudagraph_capture_sizes cudagraph_metrics custom_histogram_buckets disable_cascade_attn
    disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
    distributed_timeout_seconds enable_bf16x3_router_gemm enable_chunked_prefill
    enable_expert_parallel enable_flashinfer_autotune enable_layerwise_nvtx_tracing
    enable_logging_iteration_details enable_mfu_metrics enable_shm_tensor_arena
    expert_placement_strategy fail_on_environ_validation gdn_prefill_backend jit_monitor_mode
    jit_monitor_verbose kda_decode_backend kda_prefill_backend kernel_config kv_cache_metrics
    kv_cache_metrics_sample language_model_only limit_mm_per_prompt linear_backend log_config_file
    log_level logging_config long_prefill_token_threshold long_prefill_token_threshold_adaptive
    mamba_backend mamba_block_size max_cudagraph_capture_size max_num_active_seqs
    max_num_scheduled_tokens max_parallel_loading_workers mm_processor_cache_gb moe_backend
    num_gpu_blocks_override numa_bind numa_bind_cpus numa_bind_nodes optimization_level
    otlp_traces_endpoint performance_mode prefill_schedule_interval prefix_cache_retention_interval
    prefix_caching_hash_algo profiler_config quantization quantization_config ray_workers_use_nsight
    safetensors_load_strategy safetensors_prefetch_block_size safetensors_prefetch_num_threads
    scheduler_reserve_full_isl scheduling_policy show_hidden_metrics_for_version skip_mm_profiling
    stream_interval use_fp64_gumbel use_tqdm_on_load watermark
    """
)

#: A refit would not reach what these make; without refits they may be given.
WITHOUT_REFITS = _names(
    """
    allow_deprecated_quantization cpu_offload_gb cpu_offload_params enable_elastic_ep
    enable_ep_weight_filter enable_eplb eplb_config kv_offloading_backend kv_offloading_size
    model_loader_extra_config offload_backend offload_group_size offload_num_in_group
    offload_params offload_prefetch_step
    """
)


def _table(groups: list[tuple[Reason, str]]) -> dict[str, Reason]:
    return {name: reason for reason, names in groups for name in names.split()}


REFUSED: dict[str, Reason] = _table(
    [
        (
            Reason("rl-vllm sets it itself, and relies on it", "leave it out"),
            """
            disable_log_stats distributed_executor_backend enable_cumem_allocator
            enable_nccl_comm_suspend enable_sleep_mode generation_config max_logprobs
            shutdown_timeout skip_tokenizer_init sleep_mode_offload_cudagraph
            sleep_preserve_parameter_names weight_transfer_config worker_cls worker_extension_cls
            """,
        ),
        (
            Reason(
                "it would load another model than the trainer has",
                "set model_name to the directory of that model, with its config.json and tokenizer",
            ),
            """
            additional_config code_revision config_format convert engram_config hf_config_path
            hf_overrides ignore_patterns io_processor_plugin model_class_overrides model_impl
            model_weights pooler_config pt_load_map_location revision runner served_model_name
            tokenizer tokenizer_mode tokenizer_revision
            """,
        ),
        (
            Reason(
                "it changes what is generated, so log-probs would differ from the trainer's",
                "leave it out; the keys next to vllm_cfg set sampling (temperature, top_p, top_k, "
                "...)",
            ),
            """
            calculate_kv_scales diffusion_config disable_sliding_window
            enable_mamba_cache_stochastic_rounding kv_cache_dtype_skip_layers
            kv_sharing_fast_prefill logits_processors mamba_cache_dtype mamba_cache_philox_rounds
            mamba_ssm_cache_dtype override_attention_dtype override_generation_config
            reasoning_config reasoning_parser reasoning_parser_plugin spec_method spec_model
            spec_tokens speculative_config structured_outputs_config watermark_config
            """,
        ),
        (
            Reason(
                "rl-vllm sets it for the adapters that refits send",
                "set vllm_cfg.lora; without that key, the trainer sends merged weights",
            ),
            """
            default_mm_loras enable_lora enable_mixed_moe_lora_format enable_moe_shared_loras
            enable_tower_connector_lora fully_sharded_loras lora_dtype lora_target_modules
            max_cpu_loras max_lora_cls_labels max_lora_rank max_loras specialize_active_lora
            """,
        ),
        (
            Reason(
                "keys and values outside of the engine would stay valid after a refit",
                "leave it out; the prefix cache of vllm_cfg.enable_prefix_caching is cleared after "
                "each refit",
            ),
            "ec_manager_config ec_transfer_config kv_events_config kv_transfer_config",
        ),
        (
            Reason(
                "rl-vllm supports only vllm_cfg.tensor_parallel_size and pipeline_parallel_size",
                "use those, or replicas on a RayVirtualCluster",
            ),
            """
            _api_process_count _api_process_rank cp_kv_cache_interleave_size data_parallel_address
            data_parallel_backend data_parallel_external_lb data_parallel_hybrid_lb
            data_parallel_multi_port_external_lb data_parallel_rank data_parallel_rpc_port
            data_parallel_size data_parallel_size_local data_parallel_start_rank
            dbo_decode_token_threshold dbo_prefill_token_threshold dcp_comm_backend
            dcp_kv_cache_interleave_size dcp_q_replicate decode_context_parallel_size device_ids
            disable_nccl_for_dp_synchronization dp_sync_interval elastic_ep_max_dp_size
            enable_batch_sharded_sampling enable_dbo enable_fault_tolerance enable_hc_sp
            fault_tolerance_config master_addr master_port nnodes node_rank
            prefill_context_parallel_size ubatch_size
            """,
        ),
        (
            Reason(
                "rl-vllm uses only token ids and log-probs of vLLM, so it has no effect",
                "leave it out",
            ),
            """
            allowed_local_media_path allowed_media_domains aux_output_config
            enable_log_requests enable_mm_embeds enable_mm_processor_stats enable_prompt_embeds
            enable_return_routed_experts enable_trace_replay interleave_mm_strings
            max_num_queued_reqs max_num_queued_tokens media_io_kwargs mm_device_do_normalize
            mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
            mm_encoder_fp8_scale_save_margin mm_encoder_fp8_scale_save_path mm_encoder_only
            mm_encoder_tp_mode mm_hasher_algorithm mm_ipc_gpu_memory_gb mm_processor_cache_type
            mm_processor_device mm_processor_kwargs mm_shm_cache_max_object_size_mb mm_tensor_ipc
            per_request_spec_decode_metrics renderer_num_workers return_sampling_mask scheduler_cls
            tokens_only video_pruning_method video_pruning_rate
            """,
        ),
        (
            Reason(
                "it would apply to vLLM but not to the tokenizer",
                "set the environment variables HF_HOME and HF_TOKEN",
            ),
            "download_dir hf_token",
        ),
        (
            Reason("it was never tested with refits", "leave it out"),
            """
            enable_mamba_shared_prefix_checkpoint mamba_cache_mode mamba_config mamba_ssu_algorithm
            prefix_match_unit replayssm_buffer_len sparse_indexer_topk_backend swa_bounded_replay
            use_replayssm ir_op_priority
            """,
        ),
    ]
)


_RULES = ArgumentRules(
    backend="rl-vllm",
    key="vllm_cfg.engine_args",
    refit_key="vllm_cfg.refit",
    own_keys=OWN_KEYS,
    allowed=ALLOWED,
    without_refits=WITHOUT_REFITS,
    refused=REFUSED,
)


def check_engine_args(engine: Mapping[str, Any], device: str) -> None:
    """Refuses arguments that would change what rl-vllm promises. Imports no vLLM.

    Args:
        engine: The configuration's ``vllm_cfg``.
        device: Where the engine runs.

    Raises:
        ConfigError: Names the argument, and the key to set instead if there is one.
    """
    given = engine.get("engine_args", {})
    _RULES.check(given, takes_refits=engine.get("refit", True))
    if given.get("enable_chunked_prefill") and device == "cpu":
        at = "vllm_cfg.engine_args.enable_chunked_prefill"
        raise ConfigError(
            f"'{at}' is refused on the CPU: after each chunk of a prompt, vLLM resets the row's "
            "random generator, which CPU generators do not support",
            fix="leave it out",
            key=at,
        )


def check_temperature(config: Mapping[str, Any]) -> None:
    """Refuses temperatures that vLLM would not apply.

    Raises:
        ConfigError: The temperature is out of bounds.
    """
    temperature = config.get("temperature", 1.0)
    if not _TEMPERATURES[0] <= temperature <= _TEMPERATURES[1]:
        raise ConfigError(
            f"temperature is {temperature}; vLLM applies only temperatures from "
            f"{_TEMPERATURES[0]} to {_TEMPERATURES[1]}",
            fix="use a temperature in that range, or greedy=True",
            key="temperature",
        )
