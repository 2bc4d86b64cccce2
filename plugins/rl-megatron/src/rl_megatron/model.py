"""megatron-core's model of a checkpoint: how it is configured, built and filled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from rl_megatron.attention import Rotary, TorchAttention
from rl_megatron.cpu import without_cuda
from rl_megatron.engine import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    GPTModel,
    TransformerBlockSubmodules,
    TransformerConfig,
    gpt_layer_specs,
    linear_layers,
    moe_utils,
)
from rl_megatron.table import padded_vocabulary

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_megatron.architectures import Architecture
    from rl_megatron.sizes import Coordinates

__all__ = ["Norm", "build_model", "model_device", "uses_transformer_engine"]


class Norm(nn.RMSNorm):
    """Torch's RMSNorm; megatron-core sums its gradient over ranks that share the sequence.

    Args:
        config: Of the model.
        hidden_size: Features.
        eps: Added to the mean square.
        **_: What megatron's builder gives besides.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=model_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def uses_transformer_engine() -> bool:
    """Whether layers are made of transformer-engine's fused modules: where it is, on a GPU."""
    return torch.cuda.is_available() and bool(gpt_layer_specs.HAVE_TE)


def build_model(
    architecture: Architecture, at: Coordinates, config: Mapping[str, Any]
) -> DistributedDataParallel:
    """This rank's part of a model, without weights yet.

    Args:
        architecture: Of the checkpoint.
        at: The rank.
        config: A checked :class:`~rl_megatron.config.MegatronPolicyConfig`.

    Returns:
        Wrapped so that gradients add up in ``main_grad``, in float32, and are then shared out.
    """
    a = architecture
    settings = transformer_config(a, at, config)
    with without_cuda():
        model = GPTModel(
            config=settings,
            transformer_layer_spec=_layers(a, at, settings),
            vocab_size=padded_vocabulary(a.vocabulary, at.sizes.tensor),
            max_sequence_length=a.context,
            pre_process=at.first,
            post_process=at.last,
            parallel_output=True,
            share_embeddings_and_output_weights=a.tied,
            position_embedding_type="rope",
        )
        frequencies, settings.rotary_factor = a.frequencies()
        model.rotary_pos_emb = Rotary(settings, frequencies)
        model = model.to(model_device())
        for parameter in model.parameters():
            # Loading fills them; what is left is padding, which stays 0.
            parameter.data.zero_()
        return DistributedDataParallel(
            config=settings,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=at.sizes.data > 1
            ),
            module=model,
        )


def transformer_config(
    architecture: Architecture, at: Coordinates, config: Mapping[str, Any]
) -> TransformerConfig:
    """megatron-core's settings for a model."""
    a, cuda = architecture, torch.cuda.is_available()
    dtype = getattr(torch, config.get("torch_dtype", "float32"))
    recompute = config.get("activation_recompute", "none")
    settings: dict[str, Any] = {
        "num_layers": a.layers,
        "hidden_size": a.hidden,
        "num_attention_heads": a.heads,
        "num_query_groups": a.groups,
        "ffn_hidden_size": a.ffn,
        "kv_channels": a.head,
        "normalization": "RMSNorm",
        "layernorm_epsilon": a.epsilon,
        "activation_func": nn.functional.silu,
        "gated_linear_unit": True,
        "add_bias_linear": a.linear_bias,
        "add_qkv_bias": a.qkv_bias,
        "qk_layernorm": a.head_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": a.attention_dropout,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": at.sizes.tensor,
        "pipeline_model_parallel_size": at.sizes.pipeline,
        "expert_model_parallel_size": at.sizes.expert,
        "sequence_parallel": config.get("sequence_parallel", False),
        "use_cpu_initialization": not cuda,
        "perform_initialization": False,
        # Shares of a loss are divided before megatron sees them, so that gradients are sums.
        "calculate_per_token_loss": True,
        # Microbatches are as wide as their longest row.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        "batch_p2p_comm": False,
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": cuda and linear_layers._grad_accum_fusion_available,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
        # Its default is one that megatron warns of.
        "cuda_graph_scope": [],
    }
    if recompute != "none":
        settings |= {"recompute_granularity": recompute}
    if recompute == "full":
        settings |= {"recompute_method": "uniform", "recompute_num_layers": 1}
    if a.experts:
        settings |= {
            "num_moe_experts": a.experts,
            "moe_ffn_hidden_size": a.ffn,
            "moe_router_topk": a.experts_per_token,
            "moe_router_pre_softmax": not a.normalised_experts,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "moe_grouped_gemm": uses_transformer_engine(),
        }
    made = TransformerConfig(**settings)
    made.tensor_rank = at.tensor
    return made


def _layers(
    architecture: Architecture, at: Coordinates, settings: TransformerConfig
) -> TransformerBlockSubmodules:
    experts = architecture.experts or None
    if not hasattr(moe_utils, "te_general_gemm"):
        # megatron-core reads this name, and does not define it without transformer-engine.
        moe_utils.te_general_gemm = None
    if uses_transformer_engine():
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=True, qk_layernorm=architecture.head_norm
        )
        norm: Any = gpt_layer_specs.TENorm
    else:
        spec = gpt_layer_specs.get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=architecture.head_norm, normalization="RMSNorm"
        )
        norm = Norm
        spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = norm
        if architecture.head_norm:
            attention = spec.submodules.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = norm
    spec.submodules.self_attention.submodules.core_attention = TorchAttention
    count = settings.num_layers // at.sizes.pipeline
    return TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=norm)


def model_device() -> torch.device:
    """Where this process computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
