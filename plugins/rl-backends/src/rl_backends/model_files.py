"""A model's directory: what its files show before anything is loaded, and its tokens.

The files are those that ``save_pretrained`` of transformers writes. Nothing here imports it.
"""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_backends.generation.rows import ModelFacts
from rl_core.config import nearest
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "check_files",
    "check_name",
    "check_remote_code",
    "check_stop_strings",
    "config_of",
    "has_tokenizer",
    "model_facts",
    "read_object",
]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_JSON = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
_TOKENIZER = (*_JSON[2:], "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_SAFETENSORS_INDEX = "model.safetensors.index.json"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
#: Formats with files that are known here.
_FORMATS = ("auto", "hf", "safetensors", "pt")
_LFS = b"version https://git-lfs"
#: Bytes: what safetensors itself takes as a header.
_MOST_HEADER = 100_000_000
_FEW = 3
_INPUT, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_AGAIN = "copy or download it again, or write the checkpoint again with save_pretrained"


def check_name(name: str) -> None:
    """Checks that a name is a directory, or may be a model's on a hub.

    A name without a slash, such as ``tinny``, is refused if a model's directory has nearly the same
    name: otherwise the hub would be asked for it, and the error would be about the network.

    Raises:
        ConfigError: It is neither; names a directory that may be meant.
    """
    path = Path(name)
    if path.is_dir():
        return
    is_path = not _HUB_NAME.fullmatch(name) or name.startswith(".")
    beside = path.parent.glob("*") if path.parent.is_dir() and (is_path or "/" not in name) else ()
    there = {str(each): each for each in beside if is_path or (each / "config.json").exists()}
    near = nearest(str(path), (key for key, each in there.items() if each.is_dir()), 0.8)
    if is_path or near:
        where = "" if path.is_absolute() else f" in {Path.cwd()}"
        fix = "set model_name to an existing directory, or to a name on the hub"
        raise ConfigError(
            f"the model directory {name} does not exist{where}",
            fix=f"write {near!r}, or a name on the hub" if near else fix,
            key="model_name",
        )


def config_of(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a model.

    Raises:
        ConfigError: There is none, or it is no JSON object.
    """
    if not (directory / "config.json").exists():
        raise ConfigError(
            f"{directory} is not a Hugging Face checkpoint: it has no config.json",
            fix="point model_name at the directory that save_pretrained wrote",
            key="model_name",
        )
    return read_object(directory / "config.json")


def has_tokenizer(directory: Path) -> bool:
    """Whether any file of a tokenizer, of any kind, lies beside a model."""
    return any((directory / file).exists() for file in _TOKENIZER)


def check_remote_code(name: str, settings: dict[str, Any], *, trust: bool) -> None:
    """Checks that a configuration needs no code that is not trusted.

    Args:
        name: The model's, for the message.
        settings: Of ``config.json`` or ``tokenizer_config.json``.
        trust: Whether code of the checkpoint may run.

    Raises:
        ConfigError: It does, and may not.
    """
    if (auto_map := settings.get("auto_map")) and not trust:
        names = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
        raise ConfigError(
            f"{name} needs Python code of the checkpoint ({', '.join(sorted(map(str, names)))}), "
            "and trust_remote_code is not set",
            fix="read that code; if you trust it, set trust_remote_code to True",
            key="trust_remote_code",
        )


def model_facts(
    config: Mapping[str, Any],
    *,
    vocab_size: int,
    max_model_len: int,
    text: Any,
    generation: Mapping[str, Any],
    tokenizer: Any,
) -> ModelFacts:
    """Limits and special tokens of a model.

    Args:
        config: A :class:`~rl_core.interfaces.GenerationConfig`; its ``pad_token_id`` comes before
            the tokenizer's, the model's and that of ``generation_config.json``.
        vocab_size: Token ids that the model has.
        max_model_len: Its context.
        text: The text part of its configuration, an object.
        generation: Contents of ``generation_config.json``. Its end-of-sequence tokens come before
            the model's and the tokenizer's.
        tokenizer: Or None.

    Raises:
        ConfigError: There is no pad token, or it is none of the model's tokens.
    """

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    eos = first(
        generation.get("eos_token_id"),
        getattr(text, "eos_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
    )
    pad = first(
        config.get("pad_token_id"),
        getattr(tokenizer, "pad_token_id", None),
        getattr(text, "pad_token_id", None),
        generation.get("pad_token_id"),
    )
    name = config.get("model_name", "the model")
    if pad is None:
        raise ConfigError(
            f"neither the tokenizer nor the configuration of {name} has a pad token",
            fix="set pad_token_id, usually to the id of the end-of-sequence token",
            key="pad_token_id",
        )
    if not 0 <= pad < vocab_size:
        raise ConfigError(
            f"the pad token {pad} of {name} is outside its vocabulary of {vocab_size}",
            fix=f"set pad_token_id to an id below {vocab_size}",
            key="pad_token_id",
        )
    several = eos if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return ModelFacts(int(pad), tuple(several), vocab_size, max_model_len)


def check_stop_strings(config: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises a ConfigError where ``stop_strings`` are set and no tokenizer could find them."""
    if config.get("stop_strings") and tokenizer is None:
        raise ConfigError(
            f"stop_strings are set, but {config['model_name']} has no tokenizer",
            fix="save the tokenizer beside the model, or use stop_token_ids",
            key="stop_strings",
        )


def check_files(directory: Path, format_: str = "auto", *, without_weights: str = "") -> None:
    """Checks that a model's files are there and whole, as far as that can be seen unloaded.

    Args:
        directory: The model's.
        format_: Of the weights: ``"auto"``, ``"hf"``, ``"safetensors"`` or ``"pt"``; files of
            others are not looked at.
        without_weights: What else a user can do without weights, for errors.

    Raises:
        ConfigError: A file is missing, cut short or of another format.
    """
    settings = config_of(directory)
    for file in _JSON:
        if (directory / file).exists():
            read_object(directory / file)
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
            fix="point model_name at the directory that save_pretrained wrote" + without_weights,
            key="model_name",
        )
    tied = settings.get("tie_word_embeddings")
    if tied is False and _INPUT in names and _OUTPUT not in names:  # an engine would make some up
        raise ConfigError(
            f"config.json in {directory} does not tie the output embeddings, but the weights have "
            f"no {_OUTPUT}",
            fix=_AGAIN,
            key="model_name",
        )


def _check_shards(index: Path) -> set[str]:
    """The tensors of an index; its files are there, whole, and have these tensors."""
    where = read_object(index).get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
        raise _broken(index, "has no weight_map from tensor names to files")
    for file in sorted(set(where.values())):
        shard = index.parent / file
        if not shard.exists():
            count = sum(one == file for one in where.values())
            raise ConfigError(
                f"{index} names the file {file}, which does not exist (tensors in it: {count})",
                fix=_AGAIN,
                key="model_name",
            )
        if shard.suffix != ".safetensors":
            _check_pickle(shard)
            continue
        listed = {name for name, one in where.items() if one == file}
        if missing := sorted(listed - _safetensors_names(shard)):
            raise _broken(shard, f"lacks tensors of the index ({len(missing)}): {missing[:_FEW]}")
    return set(where)


def _safetensors_names(file: Path) -> set[str]:
    """The tensors of a safetensors file, which has all of their bytes."""
    with _opened(file) as stream:
        head = stream.read(8)
        length, size = int.from_bytes(head, "little"), file.stat().st_size
        if len(head) < 8 or length > _MOST_HEADER or 8 + length > size:
            raise _broken(file, "is cut short, or is not a safetensors file")
        try:
            header = json.loads(stream.read(length))
            tensors = {name: one for name, one in header.items() if name != "__metadata__"}
            end = max((one["data_offsets"][1] for one in tensors.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise _broken(file, "is not a safetensors file: its header cannot be read") from error
    if size != 8 + length + end:
        raise _broken(file, f"has {size} bytes, and its tensors need {8 + length + end}")
    return set(tensors)


def _check_pickle(file: Path) -> None:
    """Makes sure that a file of torch.save has its end; those of old are not looked into."""
    with _opened(file) as stream:
        head = stream.read(2)
    if not head or (head == b"PK" and not zipfile.is_zipfile(file)):
        raise _broken(file, "is cut short")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: It cannot be read, is a pointer of Git LFS, or holds no JSON object.
    """
    with _opened(file) as stream:
        try:
            found = json.load(stream)
        except ValueError as error:  # also what is not UTF-8
            raise _broken(file, f"is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise _broken(file, "is not a JSON object")
    return found


def _opened(file: Path) -> Any:
    """The file, at its beginning."""
    try:
        stream = file.open("rb")
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be read: {error.strerror}",
            fix="correct its permissions",
            key="model_name",
        ) from error
    if stream.read(len(_LFS)) == _LFS:
        stream.close()
        raise ConfigError(
            f"{file} is a Git LFS pointer, not the file itself",
            fix=f"run git lfs pull in {file.parent}",
            key="model_name",
        )
    stream.seek(0)
    return stream


def _broken(file: Path, what: str) -> ConfigError:
    return ConfigError(f"{file} {what}", fix=_AGAIN, key="model_name")
