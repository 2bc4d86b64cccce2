"""Which of SGLang's server arguments may be given, and why the others may not.

An argument that would change what rl-sglang promises (which model it is, what the log-probs are of,
that a refit reaches all of it) is refused by name. What is in none of these tables is refused, too:
nobody has looked at it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_backends.engine.arguments import ArgumentRules, Reason
from rl_core.config import config_keys
from rl_core.errors import ConfigError
from rl_sglang.config import SglangEngineConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ALLOWED",
    "OWN_KEYS",
    "REFUSED",
    "WITHOUT_REFITS",
    "check_engine_args",
    "check_sampling",
]

#: SGLang takes the argmax at lower temperatures.
_COLDEST = 1e-6


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Arguments that have a key of their own.
OWN_KEYS: dict[str, str] = {key: f"sglang_cfg.{key}" for key in config_keys(SglangEngineConfig)} | {
    "model_path": "model_name",
    "dtype": "torch_dtype",
    "trust_remote_code": "trust_remote_code",
    "context_length": "max_model_len",
}

#: How fast, with which kernels, in how much memory: neither results nor refits depend on them.
ALLOWED = _names(
    """
    base_gpu_id batch_notify_size bf16_gemm_backend crash_dump_folder cuda_graph_backend_decode
    cuda_graph_backend_prefill cuda_graph_bs_decode cuda_graph_bs_prefill cuda_graph_config
    cuda_graph_max_bs_decode cuda_graph_max_bs_prefill cuda_graph_max_seq_len_prefill
    cuda_graph_prefill_max_context cuda_graph_tc_compiler decode_attention_backend
    decode_log_interval deepep_config deepep_mode disable_chunked_prefix_cache
    disable_cuda_graph_padding disable_custom_all_reduce disable_decode_cuda_graph
    disable_flashinfer_autotune disable_overlap_schedule disable_prefill_cuda_graph dist_timeout
    enable_cudagraph_gc enable_deterministic_inference enable_dynamic_chunking
    enable_fused_moe_sum_all_reduce enable_metrics enable_mfu_metrics enable_mixed_chunk
    enable_mscclpp enable_nccl_nvls enable_p2p_check enable_prefill_delayer
    enable_profile_cuda_graph enable_request_time_stats_logging enable_symm_mem
    enable_torch_symm_mem flashinfer_autotune_skip_ops flashinfer_mla_disable_ragged
    fp4_gemm_runner_backend fp8_gemm_runner_backend gc_threshold gc_warning_threshold_secs
    gpu_id_step linear_attn_backend linear_attn_decode_backend linear_attn_prefill_backend
    linear_attn_verify_backend mamba_backend mamba_full_memory_ratio max_mamba_cache_size
    min_free_slots_delay moe_a2a_backend moe_runner_backend nccl_port num_continuous_decode_steps
    numa_node page_size pre_warm_nccl prefill_attention_backend prefill_decode_interval
    prefill_decode_interval_min_bs prefill_delayer_forward_passes_buckets
    prefill_delayer_max_delay_ms prefill_delayer_max_delay_passes prefill_delayer_queue_min_ratio
    prefill_delayer_token_usage_low_watermark prefill_delayer_wait_seconds_buckets
    prefill_max_requests radix_eviction_policy radix_eviction_policy_config retraction_policy
    schedule_conservativeness schedule_policy scheduler_recv_interval show_time_cost
    soft_watchdog_timeout stream_interval swa_full_tokens_ratio triton_attention_num_kv_splits
    triton_attention_reduce_in_fp32 triton_attention_split_tile_size watchdog_timeout
    weight_loader_disable_mmap weight_loader_drop_cache_after_load
    weight_loader_prefetch_checkpoints weight_loader_prefetch_num_threads
    """
)

#: A refit would not reach what these make; without refits they may be given.
WITHOUT_REFITS = _names(
    """
    cpu_offload_gb custom_weight_loader disable_shared_experts_fusion elastic_ep_backend
    enable_elastic_expert_backup enable_eplb enable_paged_experts enable_torch_compile
    enable_torch_compile_debug_mode enable_w4a4_mxfp4_megamoe enforce_shared_experts_fusion
    ep_dispatch_algorithm ep_num_redundant_experts eplb_algorithm
    eplb_min_rebalancing_utilization_threshold eplb_rebalance_layers_per_chunk
    eplb_rebalance_num_iterations flashinfer_mxfp4_moe_precision init_expert_location
    model_loader_extra_config modelopt_checkpoint_restore_path modelopt_checkpoint_save_path
    modelopt_export_path modelopt_quant offload_group_size offload_mode offload_num_in_group
    offload_prefetch_step paged_experts_num_resident ple_offload_backend ple_offload_dir
    ple_offload_embedding quantization quantization_param_path quantize_and_serve rl_quant_profile
    startup_weight_load_mode torch_compile_max_bs weight_cache_mode weight_cache_socket
    weight_cache_timeout
    """
)


#: Why the others are refused.
REFUSED: dict[str, Reason] = {
    name: reason
    for reason, names in [
        (
            Reason("rl-sglang sets it itself, and relies on it", "leave it out"),
            """
            _radix_eviction_policy_explicitly_set _speculative_draft_quantization_explicitly_set
            _swa_full_tokens_ratio_explicitly_set allow_auto_truncate
            checkpoint_engine_wait_weights_before_ready custom_sigquit_handler
            delete_ckpt_after_loading detokenizer_worker_num device disable_tokenizer_batch_decode
            download_dir dynamic_batch_tokenizer_batch_size dynamic_batch_tokenizer_batch_timeout
            enable_custom_logit_processor enable_draft_weights_cpu_backup
            enable_dynamic_batch_tokenizer enable_memory_saver enable_tokenizer_batch_encode
            enable_weights_cpu_backup forward_hooks grammar_backend incremental_streaming_output
            log_level log_level_http log_requests log_requests_format log_requests_level
            log_requests_target max_queued_requests mlx_enable_sampling preferred_sampling_params
            sampling_backend sampling_defaults skip_server_warmup skip_tokenizer_init sleep_on_idle
            stat_loggers tokenizer_worker_num use_ray warmups weight_version
            """,
        ),
        (
            Reason(
                "it would load another model than the trainer has",
                "set model_name to the directory of that model, with its config.json and tokenizer",
            ),
            """
            allowed_media_domains asr_max_buffer_seconds asr_max_concurrent_sessions
            decrypted_config_file decrypted_draft_config_file disable_fast_image_processor
            dllm_algorithm dllm_algorithm_config dllm_fdfo enable_adaptive_dispatch_to_encoder
            enable_broadcast_mm_inputs_process enable_decoder_swa_bounded_replay
            enable_encoder_swa_bounded_replay enable_fp32_lm_head enable_mm_global_cache
            enable_multimodal enable_prefix_mm_cache enable_tf32_matmul encoder_bootstrap_port
            encoder_only encoder_register_urls encoder_transfer_backend encoder_urls
            engine_info_bootstrap_port image_processor_backend is_embedding json_model_override_args
            kt_cpuinfer kt_max_deferred_experts_per_token kt_method kt_num_gpu_experts
            kt_threadpool_count kt_weight_path language_model_only language_only
            limit_mm_data_per_request media_url_max_file_size_mb mm_attention_backend
            mm_enable_dp_encoder mm_feature_transport mm_global_cache_backend mm_io_worker_num
            mm_preprocess_cache_size_mb mm_process_config mm_processor_worker_num model_checksum
            model_config_parser model_impl modelexpress_config remote_instance_weight_loader_backend
            remote_instance_weight_loader_seed_instance_ip
            remote_instance_weight_loader_seed_instance_service_port
            remote_instance_weight_loader_send_weights_group_ports
            remote_instance_weight_loader_start_seed_via_transfer_engine revision served_model_name
            tokenizer_backend tokenizer_metrics_allowed_custom_labels
            tokenizer_metrics_custom_labels_header tokenizer_mode tokenizer_path
            trust_mm_content_hashes
            """,
        ),
        (
            Reason(
                "it changes what is generated, so log-probs would differ from the trainer's",
                "leave it out; the keys next to sglang_cfg set sampling (temperature, top_p, "
                "top_k, ...)",
            ),
            """
            constrained_json_disable_any_whitespace constrained_json_max_whitespace_cnt
            constrained_json_whitespace_pattern decoupled_spec_bind_endpoint
            decoupled_spec_connect_endpoints decoupled_spec_rank decoupled_spec_role
            disable_outlines_disk_cache enable_int8_mamba_checkpoint
            enable_mamba_cache_stochastic_rounding enable_mis enable_multi_layer_eagle
            enable_precise_embedding_interpolation enable_strict_thinking enable_watermark
            int8_mamba_ckpt_size kv_canary kv_canary_real_data kv_canary_sweep_interval
            mamba_cache_philox_rounds mamba_ssm_dtype prefill_kv_cache_dequant_dtype
            reasoning_parser rl_on_policy_target sampling_mask_max_tokens spec_trace_dir
            speculative_accept_threshold_acc speculative_accept_threshold_single
            speculative_adaptive speculative_adaptive_config speculative_algorithm
            speculative_attention_mode speculative_boundary_reduction speculative_dflash_block_size
            speculative_domino_candidate_pool_size speculative_draft_attention_backend
            speculative_draft_kv_cache_dtype speculative_draft_load_format
            speculative_draft_model_path speculative_draft_model_quantization
            speculative_draft_model_revision speculative_draft_sink_size
            speculative_draft_window_size speculative_dsa_topk_backend
            speculative_dspark_align_verify_tokens_to_graph_tier speculative_dspark_block_size
            speculative_dspark_confidence_sts_path speculative_dspark_sps_table_path
            speculative_eagle_topk speculative_enable_w4a4_mxfp4_megamoe speculative_moe_a2a_backend
            speculative_moe_runner_backend speculative_ngram_capacity
            speculative_ngram_external_corpus_max_tokens speculative_ngram_external_corpus_path
            speculative_ngram_external_sam_budget speculative_ngram_match_type
            speculative_ngram_max_bfs_breadth speculative_ngram_max_trie_depth
            speculative_ngram_min_bfs_breadth speculative_num_draft_tokens speculative_num_steps
            speculative_skip_dp_mlp_sync speculative_token_map speculative_use_block_verification
            speculative_use_rejection_sampling strip_thinking_cache uno_lora_path watermark_config
            watermark_context_window watermark_default_enabled watermark_enforce_all watermark_key
            watermark_key_b watermark_max_probability watermark_mixing_probability
            """,
        ),
        (
            Reason(
                "rl-sglang sets it for the adapters that refits send",
                "set sglang_cfg.lora; without that key, the trainer sends merged weights",
            ),
            """
            enable_lora enable_lora_overlap_loading experts_shared_outer_loras lora_backend
            lora_drain_wait_threshold lora_eviction_policy lora_paths lora_strict_loading
            lora_target_modules lora_use_virtual_experts max_loaded_loras max_lora_chunk_size
            max_lora_rank max_loras_per_batch
            """,
        ),
        (
            Reason(
                "keys and values outside of the engine would stay valid after a refit",
                "leave it out; SGLang's radix cache is cleared after each refit",
            ),
            """
            disaggregation_bootstrap_port disaggregation_decode_allocation_policy
            disaggregation_decode_enable_offload_kvcache disaggregation_decode_enable_radix_cache
            disaggregation_decode_extra_slots disaggregation_decode_host_receive_threshold
            disaggregation_decode_polling_interval disaggregation_decode_retraction_backup
            disaggregation_enable_kv_checksum disaggregation_ib_device disaggregation_mode
            disaggregation_transfer_backend enable_flexkv enable_hierarchical_cache enable_hisparse
            enable_linker_mla_dedup enable_lmcache enable_pd_role_switch enable_response_store
            enable_session_radix_cache enable_streaming_session enable_unified_cache_external_linker
            flexkv_config_file hicache_host_memory_fraction hicache_host_memory_mode
            hicache_io_backend hicache_mem_layout hicache_ratio hicache_size hicache_storage_backend
            hicache_storage_backend_extra_config hicache_storage_prefetch_policy
            hicache_storage_prefetch_retry_max_attempts hicache_storage_prefetch_retry_poll_interval
            hicache_write_policy hisparse_config kv_events_config lmcache_config_file
            mooncake_ib_device num_reserved_decode_tokens optimistic_prefill_attempts
            prefill_only_disable_kv_cache radix_cache_backend unified_cache_external_linker_backend
            unified_cache_external_linker_config
            """,
        ),
        (
            Reason(
                "rl-sglang supports only sglang_cfg.tp_size",
                "use that, or replicas on a RayVirtualCluster",
            ),
            """
            attn_cp_size attn_dp_size cp_strategy dcp_comm_backend dcp_replicate_q_proj dcp_size
            deepep_dispatcher_output_dtype deepep_v2_mode dist_init_addr dp_size dwdp_size
            elastic_ep_initial_size elastic_ep_scale_timeout enable_cp_decode_attn_tp
            enable_cp_tp_group_sharing enable_dense_mlp_attn_tp enable_dp_attention
            enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_kv_cache_sharding
            enable_pdmux enable_prefill_cp enable_shared_experts_attn_tp enable_single_batch_overlap
            enable_two_batch_overlap enable_waterfill ep_join_mode ep_join_rank_offset ep_size
            flashinfer_a2a_dispatch_type fuseep_mode gated_launch_port load_balance_method
            max_ep_size moe_dense_tp_size moe_dp_size nnodes node_rank pdmux_config_path
            pp_async_batch_depth pp_max_micro_batch_size pp_size shared_experts_tp_size sm_group_num
            tbo_token_distribution_threshold
            """,
        ),
        (
            Reason(
                "rl-sglang uses only token ids and log-probs of SGLang, so it has no effect",
                "leave it out",
            ),
            """
            abort_on_priority_when_disabled admin_api_key api_key aux_hidden_state_capture
            bucket_e2e_request_latency bucket_inter_token_latency bucket_time_to_first_token
            chat_template completion_template debug_cuda_graph debug_tensor_dump_input_file
            debug_tensor_dump_layers debug_tensor_dump_output_folder default_chat_template_kwargs
            default_priority_value disable_priority_preemption enable_cache_report
            enable_forward_pass_metrics enable_http2 enable_http_worker_reuseport
            enable_layerwise_nvtx_marker enable_metrics_for_all_schedulers
            enable_priority_scheduling enable_return_aux_hidden_states enable_return_hidden_states
            enable_return_indexer_topk enable_return_routed_experts enable_ssl_refresh enable_trace
            expert_balancedness_report_mode expert_distribution_recorder_buffer_size
            expert_distribution_recorder_mode export_metrics_to_file export_metrics_to_file_dir
            extra_metric_labels fastapi_root_path file_storage_path forward_pass_metrics_ipc_name
            forward_pass_metrics_worker_id generation_tokens_buckets grpc_mode grpc_port
            grpc_response_timeout_secs grpc_worker_threads hf_chat_template_name host
            http2_initial_connection_window_size http2_max_concurrent_streams load_publish_endpoint
            load_snapshot_publish_interval msprobe_dump_config otlp_service_name
            otlp_traces_endpoint port priority_scheduling_preemption_threshold prompt_tokens_buckets
            return_aux_hidden_state_layer_ids return_hidden_states_mode return_input_ids
            return_output_ids schedule_low_priority_values_first sidecar sidecar_args smg_grpc_mode
            smg_http_sidecar_port ssl_ca_certs ssl_certfile ssl_keyfile ssl_keyfile_password
            stream_response_default_include_usage tool_call_parser tool_server trace_modules
            trust_request_chat_template uvicorn_access_log_exclude_prefixes
            """,
        ),
        (
            Reason("it was never tested with refits", "leave it out"),
            """
            boundary_reduction c128_page_size disable_aiter_allreduce_fusion_in_decode
            disable_aiter_allreduce_fusion_in_prefill disable_attn_tp_gather
            disable_flashinfer_cutlass_moe_fp4_allgather disable_hybrid_swa_memory
            dsa_decode_backend dsa_paged_mqa_logits_backend dsa_prefill_backend dsa_topk_backend
            dsa_triton_union dsv4_attn_backend dsv4_prefill_backend enable_aiter_allreduce_fusion
            enable_amd_monokernel enable_attn_tp_input_scattered enable_deepseek_v4_fp4_indexer
            enable_dsa_cache_layer_split enable_dsa_fused_indexer enable_flashinfer_allreduce_fusion
            enable_fused_qk_norm_rope enable_layernorm_sp enable_lean_attention
            enable_linear_replayssm enable_linear_replayssm_spec enable_megamoe_for_layernorm_sp
            enable_nvidia_megakernel enable_page_major_kv_layout enable_quant_communications
            enable_scattered_sconv enable_tp_lm_head_all_to_all enable_unified_memory
            enforce_disable_flashinfer_allreduce_fusion flashinfer_allreduce_fusion_backend
            linear_replayssm_cache_len mamba_max_states_per_path mamba_radix_cache_strategy
            mamba_track_interval qsa_indexer_dtype swa_prefix_tails uses_mamba_radix_cache
            """,
        ),
    ]
    for name in names.split()
}

_RULES = ArgumentRules(
    backend="rl-sglang",
    key="sglang_cfg.engine_args",
    refit_key="sglang_cfg.refit",
    own_keys=OWN_KEYS,
    allowed=ALLOWED,
    without_refits=WITHOUT_REFITS,
    refused=REFUSED,
)
#: What SGLang can do on the CPU, and how.
_ON_CPU = {
    "attention_backend": ("torch_native", "SGLang's other kernels need a GPU, or a CPU with AMX"),
    "disable_cuda_graph": (True, "there are no CUDA graphs on the CPU"),
    "kv_cache_dtype": ("auto", "there is no FP8 key/value cache on the CPU"),
}


def check_engine_args(engine: Mapping[str, Any], device: str) -> None:
    """Refuses arguments that would change what rl-sglang promises. Imports no SGLang.

    Args:
        engine: The configuration's ``sglang_cfg``.
        device: Where the engine runs.

    Raises:
        ConfigError: Names the argument, and the key to set instead if there is one.
    """
    _RULES.check(engine.get("engine_args", {}), takes_refits=engine.get("refit", True))
    if device != "cpu":
        return
    for key, (only, why) in _ON_CPU.items():
        if engine.get(key, only) != only:
            at = f"sglang_cfg.{key}"
            raise ConfigError(
                f"'{at}' must be {only!r} on the CPU, got {engine[key]!r}: {why}",
                fix=f"set it to {only!r}, or leave it out",
                key=at,
            )


def check_sampling(config: Mapping[str, Any]) -> None:
    """Refuses what SGLang would sample with another effect than other engines.

    Raises:
        ConfigError: The temperature is too low, or there is a repetition penalty.
    """
    if config.get("temperature", 1.0) < _COLDEST:
        raise ConfigError(
            f"temperature is {config['temperature']}, but below {_COLDEST} SGLang takes the argmax",
            fix="use a higher temperature, or greedy=True",
            key="temperature",
        )
    if config.get("repetition_penalty", 1.0) != 1.0:
        raise ConfigError(
            "repetition_penalty is refused: SGLang penalises generated tokens but not the "
            "prompt, so the same number has another effect than in other backends",
            fix="leave it out, or use another backend",
            key="repetition_penalty",
        )
