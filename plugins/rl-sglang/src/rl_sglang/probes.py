"""Compares what a loaded model computes with what the trainer's model computes, on small tensors.

SGLang has its own code for most models, and some of that code leaves something out, without an
error: a bias of the last layer, a cap of attention's scores, another approximation of an
activation. The engine would generate with another model than the one that is trained. So single
operations of the engine run on random tensors when it is built, and are compared with those of
transformers. An operation that cannot be run alone is not compared.
"""

from __future__ import annotations

import logging
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from rl_backends.engine.operations import left_out_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rl_backends.engine.weights import CheckpointModel

__all__ = [
    "compare_activations",
    "compare_attention",
    "compare_head",
    "compare_positions",
    "compare_settings",
    "find_differences",
    "record_attention",
]

#: Tokens of a row, and the window of attention that is compared, whatever the model's is.
_TOKENS, _WINDOW = 12, 8
#: How far results may be apart. Approximations of an activation differ by 5e-4 at most.
_EXACT, _ROUNDED = 1e-4, 5e-2
_log = logging.getLogger(__name__)
_OUR_NAME = "rl_sglang_recorded"
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")


class _Attention(NamedTuple):
    """How a layer of transformers calls its attention, and the widths of keys and of values."""

    module: nn.Module
    how: dict[str, Any]
    widths: tuple[int, int]


@torch.inference_mode()
def find_differences(runner: Any, checkpoint: CheckpointModel) -> list[str]:
    """What a model of SGLang computes differently from the trainer's, in words.

    Args:
        runner: SGLang's, with its model loaded, before it computes.
        checkpoint: The trainer's model.
    """
    found: list[str] = []
    compares = compare_settings, compare_head, compare_activations
    for compare in (*compares, compare_positions, compare_attention):
        try:
            found += compare(runner, checkpoint.model)
        except Exception as error:  # each model has its own code
            _log.info("%s: %s: %s", compare.__name__, type(error).__name__, error)
    return found


def compare_settings(runner: Any, trainer: nn.Module) -> Iterator[str]:
    """What ``config.json`` asks for, the engine's code must look at."""
    return left_out_settings(runner.model, trainer)


def compare_head(runner: Any, trainer: nn.Module) -> Iterator[str]:
    """A bias of the last layer must move logits."""
    del trainer
    head: Any = getattr(runner.model, "lm_head", None)
    if getattr(head, "bias", None) is None:
        return
    compute = runner.model.logits_processor._compute_lm_head
    hidden = torch.ones(1, head.weight.shape[1], dtype=head.weight.dtype, device=runner.device)
    kept, before = head.bias.clone(), compute(hidden, head)
    try:
        head.bias.fill_(1000.0)
        moved = not torch.equal(before, compute(hidden, head))
    finally:
        head.bias.copy_(kept)
    if not moved:
        yield "the bias of the last layer (lm_head.bias) has no effect on logits"


def compare_activations(runner: Any, trainer: nn.Module) -> Iterator[str]:
    """Every activation of the engine must be one of the trainer's."""
    x = torch.linspace(-4, 4, 64, device=runner.device)
    wanted = {
        type(one).__name__: one(x)
        for one in trainer.modules()
        if type(one).__module__ in _ACTIVATIONS and not [*one.parameters(), *one.buffers()]
    }
    engine = {
        type(one).__name__: one
        for one in runner.model.modules()
        if type(one).__module__ == "sglang.srt.layers.activation" and not [*one.parameters()]
    }
    for name, one in engine.items() if wanted else ():
        y = one(torch.cat([x, torch.ones_like(x)])[None])[0, : len(x)]  # gated by ones, or not
        apart = min((y - other).abs().max().item() for other in wanted.values())
        if apart > _EXACT:
            yield f"its activation {name} differs from {', '.join(wanted)} by {apart:.1e}"


def compare_positions(runner: Any, trainer: nn.Module) -> Iterator[str]:
    """The frequencies of rotary positions must be the trainer's; of any of its layers."""
    wanted = []
    for module in {type(one): one for one in trainer.modules() if _frequencies(one)}.values():
        wanted += _frequencies(type(module)(module.config))
    for name, module in runner.model.named_modules():
        table = getattr(module, "cos_sin_cache", None)
        if table is None or len(table) < 2:
            continue
        cos, sin = table[1].float().cpu().chunk(2)
        found = torch.atan2(sin, cos)  # of the position 1
        same = [one for one in wanted if one.shape == found.shape]
        near = _EXACT if table.dtype is torch.float32 else _ROUNDED
        if same and not any(torch.allclose(found, one.float(), near, near**2) for one in same):
            yield f"the frequencies of rotary positions ({name}) are not those of the trainer"
            return


def _frequencies(module: nn.Module) -> list[torch.Tensor]:
    return [
        buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    ]


def compare_attention(runner: Any, trainer: nn.Module) -> Iterator[str]:
    """Attention of torch must have the caps and windows that the trainer's attention has."""
    backend = runner.attn_backend
    if type(backend).__name__ != "TorchNativeAttnBackend":
        return  # others take batches that only SGLang's scheduler makes
    calls = record_attention(trainer)
    layers = [one for one in runner.model.modules() if hasattr(one, "logit_cap")]
    layers += getattr(runner.model, "attention_instances", {}).values()
    seen = set()
    for layer in layers:
        call = calls.get(layer.layer_id)
        shape = backend.token_to_kv_pool.get_key_buffer(layer.layer_id).shape[1:]
        if call is None or shape != (layer.tp_k_head_num, layer.qk_head_dim):
            continue
        if call.widths != (layer.qk_head_dim, layer.v_head_dim):
            continue  # over latents, which the trainer's attention never sees
        key = (*shape, layer.tp_q_head_num, layer.sliding_window_size, *map(str, call.how.items()))
        if key in seen:
            continue
        seen.add(key)
        context = int(runner.model_config.context_len)
        for mode in ("extend", "decode"):
            apart = _attention_apart(runner, layer, call, context, mode)
            if apart > (_EXACT if runner.dtype is torch.float32 else _ROUNDED):
                settings = {"softcap", "sliding_window"} & set(call.how)
                how = ", ".join(f"{name}={call.how[name]}" for name in sorted(settings))
                yield (
                    f"attention of layer {layer.layer_id} ({how or 'no settings'}) differs from "
                    f"that of {type(call.module).__name__} by {apart:.1e}"
                )
                return


def record_attention(trainer: Any) -> dict[int, _Attention]:
    """How layers of the trainer's model call attention, in a run that has no contents.

    It ends where experts want contents; the layers before have been recorded.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    found: dict[int, _Attention] = {}

    def record(module: Any, q: Any, k: Any, v: Any, *_: Any, **how: Any) -> Any:
        plain = {name: one for name, one in how.items() if isinstance(one, int | float)}
        found[int(module.layer_idx)] = _Attention(module, plain, (k.shape[-1], v.shape[-1]))
        return q.new_empty(*q.shape[:1], q.shape[2], q.shape[1], v.shape[-1]), None

    ALL_ATTENTION_FUNCTIONS.register(_OUR_NAME, record)
    before = trainer.config._attn_implementation
    trainer.config._attn_implementation = _OUR_NAME
    try:
        trainer(input_ids=torch.zeros(1, 3, dtype=torch.long, device="meta"), use_cache=False)
    except Exception as error:  # experts may want contents; layers before them are compared
        _log.info("attention is compared in part: %s: %s", type(error).__name__, error)
    finally:
        trainer.config._attn_implementation = before
    return found


def _attention_apart(runner: Any, layer: Any, call: _Attention, context: int, mode: str) -> float:
    """How far the attention of a layer is from that of transformers for a row of random tokens."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    window = call.how.get("sliding_window")
    window = window if window and window < context else None
    cap = call.how.get("softcap")
    eager: Callable[..., Any] = sys.modules[type(call.module).__module__].eager_attention_forward
    generator = torch.Generator().manual_seed(0)

    def random(heads: int, width: int) -> torch.Tensor:
        return torch.randn(_TOKENS, heads, width, generator=generator)

    # Scores of a few times the cap, or of a few; q is what SGLang gets of the model.
    scale = 2 * (cap or 1.0) / (layer.scaling * layer.qk_head_dim**0.5)
    q = (random(layer.tp_q_head_num, layer.qk_head_dim) * scale).to(runner.dtype)
    k = random(layer.tp_k_head_num, layer.qk_head_dim).to(runner.dtype)
    v = random(layer.tp_v_head_num, layer.v_head_dim).to(runner.dtype)
    order = torch.arange(_TOKENS)
    apart = order[:, None] - order
    hidden = (apart < 0) | (apart >= (_WINDOW if window else _TOKENS))
    how = {**call.how, "scaling": layer.scaling, "dropout": 0.0}
    mask = torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))[None, None]
    turned = [one.float().transpose(0, 1)[None] for one in (q, k, v)]
    wanted, _ = eager(call.module, *turned, mask, **how)
    with _row(runner) as (places, row), _small_window(layer, window, context):
        lengths = torch.tensor([_TOKENS])
        first = 0 if mode == "extend" else _TOKENS - 1
        batch = SimpleNamespace(
            forward_mode=ForwardMode.EXTEND,
            out_cache_loc=places,
            req_pool_indices=torch.tensor([row]),
            seq_lens=lengths,
            extend_prefix_lens=torch.tensor([0]),
            extend_seq_lens=lengths,
            encoder_lens=None,
        )
        backend = runner.attn_backend
        backend.init_forward_metadata(batch)
        found = backend.forward(q.flatten(1), k, v, layer, batch)
        if mode == "decode":
            batch.forward_mode, batch.out_cache_loc = ForwardMode.DECODE, places[first:]
            backend.init_forward_metadata(batch)
            found = backend.forward(q[first:].flatten(1), k[first:], v[first:], layer, batch)
    return float((found.float() - wanted[0, first:].flatten(1)).abs().max())


@contextmanager
def _row(runner: Any) -> Iterator[tuple[torch.Tensor, int]]:
    """Places in the cache for a row of tokens, and the row of SGLang's table that has them."""
    table, pool = runner.req_to_token_pool.req_to_token, runner.token_to_kv_pool_allocator
    places = pool.alloc(_TOKENS)
    kept = table[0, :_TOKENS].clone()
    table[0, :_TOKENS] = places.to(table.dtype)
    try:
        yield places, 0
    finally:
        table[0, :_TOKENS] = kept
        pool.free(places)


@contextmanager
def _small_window(layer: Any, window: int | None, context: int) -> Iterator[None]:
    """A window of fewer tokens than a row of ours, which begins as far off as the layer's own."""
    own = layer.sliding_window_size
    if own > -1 and (window or own + 1 >= context):
        layer.sliding_window_size = own - window + _WINDOW if window else -1
    try:
        yield
    finally:
        layer.sliding_window_size = own
