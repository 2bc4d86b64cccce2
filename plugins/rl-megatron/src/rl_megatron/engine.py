"""megatron-core, as far as it is used here; imported without its advice on what else to install.

Where torch is built for CPUs, its compiler stays out: megatron-core compiles what is fused, of
which nothing runs on a CPU, and importing the compiler takes longer than all the rest. Nothing here
looks for GPUs: CUDA would then fail in processes that are forked later, and workers are forked from
a process that has imported this.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch


def _as_it_is(function: Any = None, **_: Any) -> Any:
    return _as_it_is if function is None else function


_compiler: Any = nullcontext()
if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
    _compiler = mock.patch.object(torch, "compile", _as_it_is)

with warnings.catch_warnings(), _compiler:
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
        param_and_grad_buffer,
    )
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import layers as linear_layers
    from megatron.core.tensor_parallel import mappings as parallel_mappings
    from megatron.core.tensor_parallel import random as parallel_random
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.utils import set_model_to_sequence_parallel

# Torch has other names for these, which megatron-core does not know yet.
warnings.filterwarnings(
    "ignore", r"`torch\.distributed\.(reduce_scatter|all_gather_into)_tensor", FutureWarning
)

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "GPTModel",
    "MegatronModule",
    "RotaryEmbedding",
    "TransformerBlockSubmodules",
    "TransformerConfig",
    "finalize_model_grads",
    "get_forward_backward_func",
    "gpt_layer_specs",
    "linear_layers",
    "moe_utils",
    "param_and_grad_buffer",
    "parallel_mappings",
    "parallel_random",
    "parallel_state",
    "set_model_to_sequence_parallel",
    "tensor_parallel",
    "token_dispatcher",
]
