"""From a checkpoint to a model: loading, and what the rest must know of the result."""

from __future__ import annotations

import importlib.util
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch
import transformers
from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError

from rl_core.backends.model_files import (
    check_name,
    check_remote_code,
    config_of,
    has_tokenizer,
    read_object,
)
from rl_core.backends.model_files import model_facts as facts_of
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from rl_core.backends import ModelFacts

__all__ = ["checkpoint_directory", "load_model", "load_tokenizer", "model_device", "model_facts"]

_HUB_TIMEOUT_S = 5.0
_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.safetensors", "*.txt")


def load_model(config: Mapping[str, Any], *, for_training: bool) -> PreTrainedModel:
    """Loads a checkpoint in evaluation mode onto its device.

    Args:
        config: A checked configuration with the keys of
            :class:`~rl_hf.config.HuggingFaceModelConfig`.
        for_training: Refuses quantised weights; the default dtype is then float32.

    Returns:
        A causal language model, or a sequence classifier if the checkpoint is one.

    Raises:
        ConfigError: The checkpoint is missing, incomplete, or wants code that is not trusted; the
            device is not there; a package that a key needs is not installed.
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
    architectures = settings.get("architectures") or [""]
    auto_class = (
        transformers.AutoModelForSequenceClassification
        if architectures[0].endswith("ForSequenceClassification")
        else transformers.AutoModelForCausalLM
    )
    try:
        with quiet():
            model, info = auto_class.from_pretrained(
                directory, output_loading_info=True, ignore_mismatched_sizes=True, **arguments
            )
    except (OSError, ValueError, KeyError, ImportError, SafetensorError) as error:
        raise ConfigError(
            f"the model {directory} cannot be loaded: {error}",
            fix="check that it is a complete checkpoint, and what device_map and "
            "attn_implementation ask for",
            key="model_name",
        ) from error
    # Weights that a checkpoint lacks would be random numbers.
    wrong = sorted([*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])])
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ConfigError(
            f"the checkpoint {name} lacks weights of its architecture, or has them in another "
            f"shape: {', '.join(wrong[:5])}{more}",
            fix="save the whole model, with the configuration it was made with",
            key="model_name",
        )
    if "device_map" not in arguments:
        model = model.to(device)
    loaded: PreTrainedModel = model.eval()
    return loaded


def load_tokenizer(
    model_name: str, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase | None:
    """Loads the tokenizer that comes with a checkpoint, or None if a directory has none.

    Raises:
        ConfigError: The checkpoint is missing, its tokenizer is broken, or it wants code that is
            not trusted.
    """
    directory = checkpoint_directory(model_name)
    if not has_tokenizer(directory):
        return None
    settings = directory / "tokenizer_config.json"
    if settings.exists():
        check_remote_code(model_name, read_object(settings), trust=trust_remote_code)
    try:
        with quiet():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                directory, trust_remote_code=trust_remote_code
            )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ConfigError(
            f"the tokenizer of {model_name} cannot be loaded: {error}",
            fix="save the tokenizer beside the model again with save_pretrained",
            key="model_name",
        ) from error
    return tokenizer


def model_facts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, config: Mapping[str, Any]
) -> ModelFacts:
    """What the product's frontend must know of a loaded model.

    Args:
        model: Gives vocabulary and context length.
        tokenizer: Gives the pad token, if there is one.
        config: Its ``pad_token_id`` and ``max_model_len`` stand in for what the model lacks.

    Raises:
        ConfigError: There is no pad token or no context length, or the pad token is not a token.
    """
    text = model.config.get_text_config()
    generation = getattr(model, "generation_config", None)
    context = getattr(text, "max_position_embeddings", None)
    if (length := config.get("max_model_len") if context is None else context) is None:
        raise ConfigError(
            f"{type(text).__name__} names no context length (max_position_embeddings)",
            fix="set max_model_len",
            key="max_model_len",
        )
    return facts_of(
        {"model_name": type(model).__name__, **config},
        vocab_size=model.get_input_embeddings().weight.shape[0],
        max_model_len=int(length),
        text=text,
        generation={} if generation is None else generation.to_dict(),
        tokenizer=tokenizer,
    )


def model_device(model: PreTrainedModel) -> torch.device:
    """Where the model takes its token ids."""
    device: torch.device = model.get_input_embeddings().weight.device
    return device


def checkpoint_directory(name: str) -> Path:
    """The directory of a checkpoint: the name itself, or where the hub's copy of it lies.

    Raises:
        ConfigError: There is no such directory, and the hub does not give us such a model.
    """
    check_name(name)
    directory = Path(name) if Path(name).is_dir() else _from_hub(name)
    config_of(directory)
    return directory


def _from_hub(name: str) -> Path:
    """Downloads what is missing; one quick question tells whether the hub is there at all."""
    unreachable: Exception | None = None
    try:
        HfApi().model_info(name, timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, OfflineModeIsEnabled, httpx.HTTPError) as error:
        unreachable = error
    try:
        return Path(
            snapshot_download(
                name, allow_patterns=list(_HUB_FILES), local_files_only=unreachable is not None
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx.HTTPError, OSError) as error:
        cause = unreachable or error
        raise ConfigError(
            f"{name} is neither a directory nor a model that the hub gives us: {cause}",
            fix="check the name, or set model_name to a local directory",
            key="model_name",
        ) from cause


def _device(config: Mapping[str, Any]) -> torch.device:
    wanted = config.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise ConfigError(
            f"{wanted!r} is not a device", fix="set device to cpu, cuda or cuda:N", key="device"
        ) from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"there is no device {wanted}: torch sees {torch.cuda.device_count()} CUDA devices",
            fix="set device to cpu, or install a torch that drives the GPU",
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
    _need("accelerate", "device_map", 'pip install "./plugins/rl-hf[device-map]"')
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
            f"{key}: quantised weights are not trained here, nor refit",
            fix=f"remove {key} from the policy; lora and bfloat16 save memory",
            key=key,
        )
    if device.type != "cuda":
        raise ConfigError(f"{key} needs a CUDA device, not {device}", fix=f"remove {key}", key=key)
    _need("bitsandbytes", key, "pip install bitsandbytes accelerate")
    _need("accelerate", key, 'pip install "./plugins/rl-hf[device-map]"')
    quantisation = transformers.BitsAndBytesConfig(**{key: True})
    placement = {} if config.get("device_map") else {"device_map": {"": device}}
    return {"quantization_config": quantisation, **placement}


def _need(package: str, key: str, command: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{key} needs {package}, which is not installed", fix=command, key=key)


@contextmanager
def quiet() -> Generator[None]:
    """Loading talks on stderr; what matters of it is raised instead."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
