"""Generation with a policy's own weights, on all of its ranks at once.

Every rank decodes the same rows in the same steps: those of one copy share the passes, and all get
the same logits. Copies do the same work side by side.
"""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

import torch

from rl_backends.torch.checkpoints import model_facts
from rl_backends.torch.decoding import DEFAULT_MAX_BATCH_SIZE, DecodingEngine
from rl_backends.torch.policy_generation import PolicyGeneration
from rl_backends.torch.slots import SlotDecoder
from rl_core.config import check_config
from rl_core.interfaces import GenerationConfig
from rl_core.interfaces.constraints import Range
from rl_megatron.attention import AttentionRows
from rl_megatron.engine import set_model_to_sequence_parallel

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from rl_backends import PolicyRefits
    from rl_backends.torch.slot_cache import SlotCache
    from rl_megatron.architectures import Architecture
    from rl_megatron.forward import Forward

__all__ = ["SlotPass", "generation_config", "make_generation"]


class MegatronGenerationConfig(GenerationConfig):
    """What ``policy.generate`` samples with.

    Attributes:
        max_batch_size: Rows decoded together. Default 256.
    """

    max_batch_size: NotRequired[Annotated[int, Range(ge=1)]]


def generation_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The checked configuration of the policy's generation.

    Args:
        config: The policy's; its temperature counts unless the key ``generation`` has one.

    Raises:
        ConfigError: A key is unknown or wrong.
    """
    shared = ("model_name", "temperature")
    defaults = {"backend": "megatron", **{key: config[key] for key in shared if key in config}}
    return check_config(
        MegatronGenerationConfig,
        {**defaults, **config.get("generation", {})},
        what="policy backend 'megatron', generation",
    )


class SlotPass:
    """A pass over rows in slots, see :class:`~rl_backends.torch.slots.SlotForward`.

    Args:
        forward: Of the policy.
    """

    def __init__(self, forward: Forward) -> None:
        self._forward = forward

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        past_key_values: SlotCache,
        logits_to_keep: torch.Tensor | int,
    ) -> torch.Tensor:
        """See :meth:`SlotForward.__call__`."""
        packed = isinstance(logits_to_keep, torch.Tensor)
        rows = AttentionRows(
            positions=position_ids.t(),
            lengths=attention_mask.flatten().tolist() if packed else None,
            mask=None if packed else attention_mask,
            cache=past_key_values,
        )
        return self._forward.next_logits(
            input_ids,
            rows,
            logits_to_keep if packed else None,  # type: ignore[arg-type]
        )


def make_generation(
    forward: Forward,
    module: torch.nn.Module,
    architecture: Architecture,
    config: Mapping[str, Any],
    device: torch.device,
    tokenizer: Any,
    policy: PolicyRefits,
) -> PolicyGeneration:
    """What decodes with a policy's model.

    Args:
        forward: Of the policy.
        module: Its model, to be in evaluation mode.
        architecture: Of the checkpoint.
        config: What :func:`generation_config` returned.
        device: Of the model.
        tokenizer: For stop strings; or None.
        policy: Owner of the model.

    Raises:
        ConfigError: The model has no pad token, and ``pad_token_id`` is not set.
    """
    engine = DecodingEngine(
        module,
        partial(SlotDecoder, SlotPass(forward), device),
        vocab_size=architecture.vocabulary,
        device=device,
        tokenizer=tokenizer,
        max_batch_size=config.get("max_batch_size", DEFAULT_MAX_BATCH_SIZE),
    )
    facts = model_facts(
        config, text=architecture.config, vocab_size=architecture.vocabulary, tokenizer=tokenizer
    )
    return PolicyGeneration(engine, config, facts, policy)


@contextmanager
def whole_sequences(module: torch.nn.Module) -> Generator[None]:
    """Every tensor-parallel rank has all tokens: a step has too few to deal out."""
    split: bool = module.config.sequence_parallel  # type: ignore[union-attr, assignment]
    if not split:
        yield
        return
    set_model_to_sequence_parallel(module, set_to=False)
    try:
        yield
    finally:
        set_model_to_sequence_parallel(module, set_to=True)
