"""What a model is made of, as its ``config.json`` says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from rl_cli.planning.families import FAMILIES, Tensors
from rl_cli.planning.moves import ITEMSIZES
from rl_core.config import nearest
from rl_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["EMBEDDING", "Model", "config_of", "model_of"]

#: The tensor that is the output layer, too, if that is tied.
EMBEDDING = "model.embed_tokens.weight"
#: No size of a model is larger.
_MOST = 10**7


@dataclass(frozen=True)
class Model:
    """What a ``config.json`` says of a model.

    Attributes:
        family: The ``model_type``.
        dtype: Of the tensors that travel.
        layers: Transformer layers.
        tensors: All tensors. A tied output layer is the embedding, which the ranks of the last
            layer have, too.
        tied: Whether it is.
    """

    family: str
    dtype: str
    layers: int
    tensors: tuple[Tensors, ...]
    tied: bool

    @property
    def parameters(self) -> int:
        """Elements of all tensors."""
        return sum(
            prod(each.shape)
            * (each.layers[1] - each.layers[0] if "{}" in each.name else 1)
            * (each.experts or 1)
            for each in self.tensors
        )

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return self.parameters * ITEMSIZES[self.dtype]


def config_of(path: Path) -> dict[str, Any]:
    """Reads a ``config.json``.

    Args:
        path: Of the file, or of the directory in which it is.

    Raises:
        ConfigError: There is none.
    """
    try:
        file = path / "config.json" if path.is_dir() else path
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"--model: {path} cannot be read: {error}",
            fix="give the directory of a checkpoint, or its config.json",
            key="--model",
        ) from error


def model_of(config: Mapping[str, Any], dtype: str | None = None) -> Model:
    """Reads a model.

    Args:
        config: What ``config.json`` has.
        dtype: The dtype in which the weights travel; the configuration's if absent.

    Raises:
        ConfigError: A key is missing, or has a value that is not known here.
    """
    family = str(config.get("model_type"))
    if family not in FAMILIES:
        close = nearest(family, FAMILIES)
        hint = f"; did you mean {close!r}?" if close else ""
        raise ConfigError(
            f"--model: {family!r} is a model_type that the planner does not know{hint}",
            fix=f"use a model of {', '.join(FAMILIES)}",
            key="--model",
        )

    def read(key: str, *default: Any) -> Any:
        if (value := config.get(key)) is None and default:
            return default[0]
        least = 0 if default == (0,) else 1
        if default and type(default[0]) is not int:
            return value
        if type(value) is int and least <= value <= _MOST:
            return value
        has = f"{key} {value!r}, which is no whole number from {least} to {_MOST}"
        raise ConfigError(
            f"--model: config.json has {f'no {key!r}' if value is None else has}",
            fix="give the model's own",
            key="--model",
        )

    found = str(dtype or config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if found not in ITEMSIZES:
        raise ConfigError(
            f"--dtype: {found!r} is not known",
            fix=f"use one of {', '.join(ITEMSIZES)}",
            key="--dtype",
        )
    layers = read("num_hidden_layers")
    vocabulary, hidden = read("vocab_size"), read("hidden_size")
    tied = bool(read("tie_word_embeddings", False))
    ends = [(EMBEDDING, 0), *([] if tied else [("lm_head.weight", layers - 1)])]
    tensors = [
        *(Tensors(name, (vocabulary, hidden), 0, 0, (at, at + 1)) for name, at in ends),
        Tensors("model.norm.weight", (hidden,), None, 1, (layers - 1, layers)),
    ]
    for rule in FAMILIES[family]:
        tensors += (each._replace(name=f"model.layers.{{}}.{each.name}") for each in rule(read))
    used = tuple(each for each in tensors if each.layers[0] < each.layers[1])
    return Model(family, found, layers, used, tied)
