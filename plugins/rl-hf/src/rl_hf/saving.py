"""What a policy's checkpoint holds, and how it goes back into a policy.

The model is a Hugging Face directory; beside it are the optimizer's tensors, and with adapters the
adapters' own weights. All of it is safetensors and JSON.
"""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers.core_model_loading import revert_weight_conversion

from rl_backends.pieces import copy_to_pieces
from rl_backends.policy.checkpoint_directory import check_fit
from rl_backends.tensors import NamedTensorSource, module_tensors, tensor_specs
from rl_backends.torch.checkpoints import quiet
from rl_core.errors import CheckpointError
from rl_hf.forward import base_model
from rl_hf.lora import MergedWeightSource, merged_state

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from torch import nn

    from rl_backends.torch.optimizer import Optimizer
    from rl_hf.sharding import Shards

__all__ = ["read", "save", "write_model"]

TENSORS_FILE = "rl_training/state.safetensors"


def save(
    directory: Path,
    model: nn.Module,
    tokenizer: Any,
    optimizer: Optimizer,
    shards: Shards | None = None,
) -> None:
    """Writes model, tokenizer and optimizer into a directory.

    Args:
        directory: Of the checkpoint; its folder ``rl_training`` is there.
        model: The policy's model.
        tokenizer: Saved beside it, if there is one.
        optimizer: Of the model.
        shards: Those of the model, all of whose ranks call it; rank 0 writes, a layer at a time.
    """
    write_model(directory, model, tokenizer, original_format=False, shards=shards)
    tensors = optimizer.state()
    if _has_adapters(model):
        tensors |= {f"weight.{name}": p for name, p in optimizer.parameters.items()}
    if shards is None:
        save_file({n: t.detach().cpu() for n, t in tensors.items()}, directory / TENSORS_FILE)
        return
    stem = (directory / TENSORS_FILE).with_suffix("")
    _write_layers(stem, tensors, lambda name: shards.whole(tensors[name]), shards)


def read(directory: Path, model: nn.Module, optimizer: Optimizer) -> Callable[[], None]:
    """Reads what :func:`save` wrote, and checks that all of it fits.

    Args:
        directory: Of the checkpoint.
        model: A model of the same shape.
        optimizer: Of the model.

    Returns:
        What puts it into both.

    Raises:
        CheckpointError: A file is missing or broken, or of another model.
    """
    tensors = _read_all(directory / TENSORS_FILE)
    if _has_adapters(model):
        targets: dict[str, torch.Tensor] = dict(optimizer.parameters)
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n[:7] == "weight."}
    else:
        found = _read_all(directory / "model.safetensors")
        own = module_tensors(model)
        specs = tensor_specs(own)
        for spec in specs:  # a file may hold a tied tensor under any of its names
            if spec.alias_of is not None and spec.name in found:
                found.setdefault(spec.alias_of, found[spec.name])
        targets, weights = {s.name: own[s.name] for s in specs if s.alias_of is None}, found
    check_fit(targets, weights, directory)
    check_fit(optimizer.expected_state(tensors), tensors, directory)

    @torch.no_grad()
    def put() -> None:
        for name, target in targets.items():
            copy_to_pieces(target, weights[name])
        optimizer.load_state(tensors)

    return put


def write_model(
    directory: Path,
    model: nn.Module,
    tokenizer: Any,
    *,
    original_format: bool,
    shards: Shards | None = None,
) -> None:
    """Writes the model (adapters merged) and its tokenizer as a Hugging Face directory.

    Args:
        directory: Is there.
        model: The policy's model.
        tokenizer: Saved beside it, if there is one.
        original_format: Use the names and layout that the architecture is published in.
        shards: See :func:`save`.
    """
    base = base_model(model)
    state = merged_state(model) if shards is None and _has_adapters(model) else None
    writing = nullcontext() if shards is None else shards.ranks.all_or_none("writing a checkpoint")
    with writing, quiet():
        if shards is None or shards.ranks.rank == 0:
            # The tensors of shards follow.
            base.save_pretrained(
                directory,
                state_dict=state if shards is None else {},
                save_original_format=original_format,
            )
            if tokenizer is not None:
                tokenizer.save_pretrained(directory)
    if shards is None:
        return
    whole = shards.whole
    merged = MergedWeightSource(model, sharded=True) if _has_adapters(model) else None
    source = merged or NamedTensorSource(module_tensors(model))
    skipped = set(base._keys_to_ignore_on_save or ())
    names = [s.name for s in source.specs() if s.alias_of is None and s.name not in skipped]

    def make(name: str) -> torch.Tensor | None:
        return merged.gathered(name, whole) if merged else whole(source.tensors_by_name[name])

    def published(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = revert_weight_conversion(base, tensors)
        return found

    change = published if original_format else None
    files = _write_layers(directory / "model", names, make, shards, change)
    if files:
        index = {"metadata": {}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _write_layers(
    stem: Path,
    names: Iterable[str],
    make: Callable[[str], torch.Tensor | None],
    shards: Shards,
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None,
) -> dict[str, str]:
    """Writes a file for each layer, which is all that rank 0 then has of the model.

    Args:
        stem: Of the files' path.
        names: Of the tensors, those of a layer one after the other.
        make: Makes one of them on rank 0; called on all ranks.
        shards: Of the model.
        change: Applied to the tensors of a layer, if given.

    Returns:
        The file of each tensor; nothing on ranks other than 0.

    Raises:
        Exception: What failed first on rank 0, such as writing a file. All tensors were exchanged
            nevertheless.
    """
    layers = [[*group] for _, group in groupby(names, _layer_of)]
    files: dict[str, str] = {}
    failed: Exception | None = None
    for number, layer in enumerate(layers, 1):
        file = stem.with_name(f"{stem.name}-{number:05}-of-{len(layers):05}.safetensors")
        made: dict[str, torch.Tensor] = {}
        for name in layer:
            tensor = make(name)
            if tensor is None or failed:
                continue
            try:
                made[name] = tensor.cpu()
                if name == layer[-1]:
                    made = made if change is None else change(made)
                    contiguous = {key: one.contiguous() for key, one in made.items()}
                    save_file(contiguous, file, metadata={"format": "pt"})
                    files |= dict.fromkeys(made, file.name)
            except Exception as error:  # the other ranks send what is left
                failed = error
    if failed is not None:
        raise failed
    return files


def _layer_of(name: str) -> str:
    """The layer that a tensor belongs to, such as ``layers.3``; empty if to none."""
    found = re.search(r"\w+\.\d+(?=\.)", name)
    return found[0] if found else ""


def _read_all(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, or of those with its stem; mapped and not copied."""
    tensors: dict[str, torch.Tensor] = {}
    for part in sorted(file.parent.glob(f"{file.stem}*{file.suffix}")) or [file]:
        try:
            with safe_open(part, framework="pt") as found:
                for name in found.keys():  # noqa: SIM118
                    tensors[name] = found.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{part} cannot be read: {error}", fix="load another checkpoint", file=str(part)
            ) from error
    return tensors


def _has_adapters(model: nn.Module) -> bool:
    return base_model(model) is not model
