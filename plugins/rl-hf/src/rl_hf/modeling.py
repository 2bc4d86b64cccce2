"""From a checkpoint to a model: loading, and what the rest must know of the result."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError

from rl_backends.modalities import auto_class, freeze_other_modalities
from rl_backends.model_files import check_remote_code, config_of
from rl_backends.torch import checkpoints
from rl_backends.torch.checkpoints import checkpoint_directory, quiet
from rl_core.errors import ConfigError
from rl_core.install import install_command
from rl_hf.attention import settle_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_backends import ModelFacts

__all__ = ["load_model", "model_device", "model_facts"]


def load_model(config: Mapping[str, Any], *, for_training: bool) -> PreTrainedModel:
    """Loads a checkpoint in evaluation mode onto its device.

    Args:
        config: A checked configuration with the keys of
            :class:`~rl_hf.config.HuggingFaceModelConfig`.
        for_training: Refuses quantised weights; the default dtype is then float32. Of a model of
            images and text all but its language model is frozen.

    Returns:
        A causal language model, alone or in a model of images and text; or a sequence classifier
        if the checkpoint is one.

    Raises:
        ConfigError: The checkpoint is missing, incomplete, or wants code that is not trusted; the
            device is not there; a package that a key needs is not installed; the attention that
            was asked for is not the model's.
    """
    name, trust = config["model_name"], config.get("trust_remote_code", False)
    directory = checkpoint_directory(name)
    settings = config_of(directory)
    check_remote_code(name, settings, trust=trust)
    device = _device(config)
    dtype = config.get("torch_dtype") or ("float32" if for_training else "auto")
    arguments: dict[str, Any] = {
        "dtype": dtype if dtype == "auto" else getattr(torch, dtype),
        "trust_remote_code": trust,
        **_placement(config),
        **_quantisation(config, device, for_training),
    }
    if config.get("attn_implementation"):
        arguments["attn_implementation"] = config["attn_implementation"]
    loader = auto_class(settings.get("model_type", ""), settings.get("architectures"))
    try:
        with quiet():
            model, info = loader.from_pretrained(
                directory, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"the model {directory} cannot be loaded: {error}",
            fix="check that the checkpoint is complete, and that device_map and "
            "attn_implementation have values that transformers knows",
            key="model_name",
        ) from error
    # Weights that a checkpoint lacks would be random numbers.
    wrong = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(
            f"the checkpoint {name} lacks weights that its config.json requires, or has them in "
            f"another shape: {', '.join(wrong[:5])}{more}",
            fix="save model and configuration again together with save_pretrained",
            key="model_name",
        )
    if "device_map" not in arguments:
        model = model.to(device)
    loaded: PreTrainedModel = model.eval()
    if for_training:
        freeze_other_modalities(loaded)
    settle_attention(loaded, chosen="attn_implementation" in arguments)
    return loaded


def model_facts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: Mapping[str, Any]
) -> ModelFacts:
    """See :func:`rl_backends.torch.checkpoints.model_facts`."""
    return checkpoints.model_facts(
        {"model_name": type(model).__name__, **config},
        text=model.config.get_text_config(),
        vocab_size=model.get_input_embeddings().weight.shape[0],
        generation=getattr(model, "generation_config", None),
        tokenizer=tokenizer,
    )


def model_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def _device(config: Mapping[str, Any]) -> torch.device:
    wanted = config.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"device {wanted!r} does not exist", fix="set it to cpu, cuda or cuda:N", key="device"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {wanted}: the number of CUDA devices that torch sees is "
            f"{torch.cuda.device_count()}",
            fix="set device to one that torch sees, or to cpu; or install a build of torch that "
            "supports the GPU",
            key="device",
        )
    return device


def _placement(config: Mapping[str, Any]) -> dict[str, Any]:
    device_map = config.get("device_map")
    if device_map is None:
        return {}
    if config.get("device"):
        raise ConfigError(
            "device and device_map exclude each other", fix="set one of them", key="device_map"
        )
    _need("accelerate", "device_map", install_command("rl-hf", "device-map"))
    return {"device_map": device_map}


def _quantisation(
    config: Mapping[str, Any], device: torch.device, for_training: bool
) -> dict[str, Any]:
    keys = [key for key in ("load_in_8bit", "load_in_4bit") if config.get(key)]
    if not keys:
        return {}
    key = keys[0]
    if len(keys) > 1:
        raise ConfigError(
            "load_in_8bit and load_in_4bit exclude each other", fix="set one of them", key=key
        )
    if for_training:
        raise ConfigError(
            f"{key}: a policy with quantised weights can be neither trained nor refit from",
            fix=f"remove {key} from the policy; lora and bfloat16 save memory",
            key=key,
        )
    if device.type != "cuda":
        raise ConfigError(f"{key} needs a CUDA device, not {device}", fix=f"remove {key}", key=key)
    _need("bitsandbytes", key, "pip install bitsandbytes accelerate")
    _need("accelerate", key, install_command("rl-hf", "device-map"))
    quantisation = transformers.BitsAndBytesConfig(**{key: True})
    placement = {} if config.get("device_map") else {"device_map": {"": device}}
    return {"quantization_config": quantisation, **placement}


def _need(package: str, key: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{key} needs {package}, which is not installed", fix=command, key=key)
