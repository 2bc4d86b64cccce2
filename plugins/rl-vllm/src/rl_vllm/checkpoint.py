"""What can be said of a checkpoint from its files, before an engine is started for it."""

from __future__ import annotations

import json
import os
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError
from rl_core.futures import spawn

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_checkpoint"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
#: Seconds for the hub to answer.
_HUB_S = 10.0
_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
#: Formats whose files are known here.
_FORMATS = ("auto", "hf", "safetensors", "pt")
_LFS = b"version https://git-lfs"
#: Bytes: what safetensors itself takes as a header.
_MOST_HEADER = 100_000_000
_FEW = 3
_INPUT, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_AGAIN = "copy or download it again, or write the checkpoint again with save_pretrained"


def check_checkpoint(config: Mapping[str, Any]) -> None:
    """Makes sure that there is a whole checkpoint, as far as that can be seen without loading it.

    Args:
        config: A :class:`rl_vllm.config.VllmConfig`.

    Raises:
        ConfigError: There is none, or a file of it is missing, cut short or not what its name says.
    """
    name = config["model_name"]
    format_ = config.get("vllm_cfg", {}).get("load_format", "auto")
    if Path(name).is_dir():
        _check_directory(Path(name), format_)
    elif not _HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"the model directory {name} does not exist",
            fix="set model_name to an existing directory, or to a name on the hub",
            key="model_name",
        )
    else:
        _check_hub(name, format_)


def _check_directory(directory: Path, format_: str) -> None:
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory} is not a Hugging Face checkpoint: it has no config.json",
            fix="point model_name at the directory that save_pretrained wrote",
            key="model_name",
        )
    for file in _JSON:
        if (directory / file).exists():
            _object(directory / file)
    if format_ not in _FORMATS:
        return
    names: set[str] = set()
    pickles = sorted({*directory.glob("*.bin"), *directory.glob("*.pt")})
    if format_ != "pt" and (directory / _SAFETENSORS_INDEX).exists():
        names = _check_shards(directory / _SAFETENSORS_INDEX)
    elif format_ != "pt" and (files := sorted(directory.glob("*.safetensors"))):
        names = set().union(*map(_safetensors_names, files))
    elif format_ != "safetensors" and (directory / _PICKLE_INDEX).exists():
        _check_shards(directory / _PICKLE_INDEX)
    elif format_ != "safetensors" and pickles:
        for file_ in pickles:
            _check_pickle(file_)
    else:
        raise ConfigError(
            f"{directory} has no weights: no *.safetensors"
            + ("" if format_ == "safetensors" else ", *.bin or *.pt"),
            fix="point model_name at the directory that save_pretrained wrote; for random weights, "
            'which the first refit replaces, set vllm_cfg.load_format to "dummy"',
            key="model_name",
        )
    tied = _object(directory / "config.json").get("tie_word_embeddings")
    if tied is False and _INPUT in names and _OUTPUT not in names:  # vLLM would make some up
        raise ConfigError(
            f"config.json in {directory} says that the output embeddings are not tied, and the "
            f"weights have no {_OUTPUT}",
            fix=_AGAIN,
            key="model_name",
        )


def _check_shards(index: Path) -> set[str]:
    """The tensors of an index, whose files are there, whole, and have what it says."""
    where = _object(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise _broken(index, "has no weight_map of names to files")
    for file in sorted(set(where.values())):
        shard = index.parent / file
        if not shard.exists():
            count = sum(one == file for one in where.values())
            raise ConfigError(
                f"{index} names {file} for {count} tensors, and there is no such file",
                fix=_AGAIN,
                key="model_name",
            )
        if shard.suffix != ".safetensors":
            _check_pickle(shard)
            continue
        listed = {name for name, one in where.items() if one == file}
        if missing := sorted(listed - _safetensors_names(shard)):
            raise _broken(shard, f"lacks {len(missing)} tensors of the index: {missing[:_FEW]}")
    return set(where)


def _safetensors_names(file: Path) -> set[str]:
    """The tensors of a safetensors file, which has all of their bytes."""
    with _opened(file) as stream:
        head = stream.read(8)
        length, size = int.from_bytes(head, "little"), file.stat().st_size
        if len(head) < 8 or length > _MOST_HEADER or 8 + length > size:
            raise _broken(file, "is cut short, or is no safetensors file")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: one for name, one in header.items() if name != "__metadata__"}
            end = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _broken(file, "is no safetensors file: its header cannot be read") from error
    if size != 8 + length + end:
        raise _broken(file, f"has {size} bytes, and its tensors need {8 + length + end}")
    return set(tensors)


def _check_pickle(file: Path) -> None:
    """Makes sure that a file of torch.save has its end; those of old are not looked into."""
    with _opened(file) as stream:
        head = stream.read(2)
    if not head or (head == b"PK" and not zipfile.is_zipfile(file)):
        raise _broken(file, "is cut short")


def _object(file: Path) -> dict[str, Any]:
    with _opened(file) as stream:
        try:
            found = json.load(stream)
        except ValueError as error:  # also what is not UTF-8
            raise _broken(file, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _broken(file, "is no JSON object")
    return found


def _opened(file: Path) -> Any:
    """The file, at its beginning."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}", fix="look at its rights", key="model_name"
        ) from error
    if stream.read(len(_LFS)) == _LFS:
        stream.close()
        raise ConfigError(
            f"{file} is a pointer of Git LFS, not the file itself",
            fix=f"run git lfs pull in {file.parent}",
            key="model_name",
        )
    stream.seek(0)
    return stream


def _broken(file: Path, what: str) -> ConfigError:
    return ConfigError(f"{file} {what}", fix=_AGAIN, key="model_name")


def _check_hub(name: str, format_: str) -> None:
    """Makes sure that a name is in the cache, or known to a hub that can be reached."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    cached = try_to_load_from_cache(name, "config.json")
    offline = constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE") in ("1", "true")
    if isinstance(cached, str):
        if offline:  # nothing that is missing can be had
            _check_directory(Path(cached).parent, format_)
        return
    here = f"{name} is neither a directory nor in the cache {constants.HF_HUB_CACHE}"
    local = "set model_name to the directory of a checkpoint"
    if offline:
        raise ConfigError(
            f"{here}, and HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) forbids to ask the hub",
            fix=f"{local}, download it before, or unset that variable",
            key="model_name",
        )
    try:
        spawn("ask-hub", lambda: HfApi().model_info(name, timeout=_HUB_S)).result(_HUB_S)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} has no such model, or not for you",
            fix=f"{local}, correct the name, or log in (hf auth login) if the model is private",
            key="model_name",
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} refuses it: {error}",
            fix=f"{local}, or ask for access to the model on its page",
            key="model_name",
        ) from error
    except Exception as error:  # whatever its HTTP client raises, or nothing in time
        raise ConfigError(
            f"{here}, and {constants.ENDPOINT} did not answer ({type(error).__name__})",
            fix=f"{local}, or look at the network and HF_ENDPOINT; the time limit is "
            f"{_HUB_S:.0f} s",
            key="model_name",
        ) from error
