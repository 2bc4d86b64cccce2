"""Models of text, alone or with other modalities: which class makes one, and what of it is trained.

Transformers is imported when a function needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel

__all__ = ["auto_class", "freeze_other_modalities", "model_on_meta"]


def auto_class(model_type: str, architectures: Sequence[str] | None) -> Any:
    """The class of transformers that makes the model of a checkpoint, with all of its modalities.

    Args:
        model_type: In ``config.json``.
        architectures: Likewise; the first one counts.
    """
    import transformers
    from transformers.models.auto import modeling_auto as mappings

    name = (architectures or [""])[0]
    if name.endswith("ForSequenceClassification"):
        return transformers.AutoModelForSequenceClassification
    language = mappings.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    whole = mappings.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type)
    if whole is not None and (language is None or name == whole):
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def freeze_other_modalities(model: PreTrainedModel) -> None:
    """Freezes what a model has beside its language model: towers of images, projections of them.

    The language model is transformers' decoder of text with its output layer; a model without
    other modalities is left as it is.
    """
    if model.config.get_text_config() is model.config:
        return
    parts = (model.get_decoder(), model.get_output_embeddings())
    language = {id(each) for part in parts if part is not None for each in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in language)


def model_on_meta(name: str, dtype: torch.dtype, *, trust: bool) -> PreTrainedModel:
    """The model of a checkpoint's ``config.json`` as a trainer has it, without memory for weights.

    Args:
        name: The checkpoint.
        dtype: Of the weights.
        trust: Whether code of the checkpoint may run.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=trust)
    kind = auto_class(config.model_type, config.architectures)
    with torch.device("meta"):
        model: PreTrainedModel = kind.from_config(config, trust_remote_code=trust, dtype=dtype)
    freeze_other_modalities(model)
    return model
