"""What a policy's checkpoint holds, and how it goes back into a policy."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file

from rl_core.backends.tensors import module_tensors, tensor_specs
from rl_hf.checkpoint import (
    STATE_FILE,
    TENSORS_FILE,
    check_fit,
    model_weights,
    read_checkpoint,
    write_directory,
)
from rl_hf.forward import base_model
from rl_hf.lora import merged_state
from rl_hf.modeling import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from rl_hf.modes import RandomStream
    from rl_hf.optimizer import Optimizer
    from rl_hf.parallel import DataParallel

__all__ = ["export", "load", "save"]


def export(path: str | Path, model: nn.Module, tokenizer: Any) -> None:
    """Writes the model (adapters merged) and its tokenizer as a Hugging Face directory."""
    with write_directory(path) as directory:
        _write_model(directory, model, tokenizer, original_format=True)


def save(
    path: str | Path,
    model: nn.Module,
    tokenizer: Any,
    optimizer: Optimizer,
    group: DataParallel,
    random: RandomStream,
) -> None:
    """Writes a checkpoint; every rank calls it, rank 0 writes.

    Args:
        path: A checkpoint that is replaced, or nothing.
        model: The policy's model.
        tokenizer: Saved beside it, if there is one.
        optimizer: Of the model.
        group: The data-parallel peers.
        random: This rank's.

    Raises:
        CheckpointError: Something else stands at ``path``.
    """
    states = group.gather(random.state())
    with group.together("saving a checkpoint"):
        if group.rank:
            return
        with write_directory(path) as directory:
            _write_model(directory, model, tokenizer, original_format=False)
            tensors = optimizer.state()
            if _has_adapters(model):
                tensors |= {f"weight.{name}": p for name, p in optimizer.parameters.items()}
            (directory / STATE_FILE).parent.mkdir()
            save_file({n: t.detach().cpu() for n, t in tensors.items()}, directory / TENSORS_FILE)
            state = {"steps": optimizer.steps, "random": states}
            (directory / STATE_FILE).write_text(json.dumps(state))


def load(
    path: str | Path, model: nn.Module, optimizer: Optimizer, rank: int, random: RandomStream
) -> None:
    """Puts a checkpoint into a policy; nothing is touched unless all of it fits.

    Args:
        path: What :func:`save` wrote.
        model: A model of the same shape.
        optimizer: Of the model.
        rank: Whose random state is restored, if the checkpoint has it.
        random: This rank's.

    Raises:
        CheckpointError: It is missing, incomplete, altered, or of another model.
    """
    state, tensors, directory = read_checkpoint(path)
    if _has_adapters(model):
        targets: dict[str, torch.Tensor] = dict(optimizer.parameters)
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n[:7] == "weight."}
    else:
        targets, weights = _owned(model, model_weights(directory))
    check_fit(targets, weights, directory)
    check_fit(optimizer.expected_state(tensors), tensors, directory)
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(weights[name])
    optimizer.load_state(tensors, state["steps"])
    if rank < len(state["random"]):
        random.set_state(state["random"][rank])


def _write_model(
    directory: Path, model: nn.Module, tokenizer: Any, *, original_format: bool
) -> None:
    merged = merged_state(model) if _has_adapters(model) else None
    with quiet():
        base_model(model).save_pretrained(
            directory, state_dict=merged, save_original_format=original_format
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


def _owned(
    model: nn.Module, found: dict[str, torch.Tensor]
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's tensors without aliases; a file may hold a tied one under any of its names."""
    tensors = module_tensors(model)
    specs = tensor_specs(tensors)
    for spec in specs:
        if spec.alias_of is not None and spec.name in found:
            found.setdefault(spec.alias_of, found[spec.name])
    return {s.name: tensors[s.name] for s in specs if s.alias_of is None}, found


def _has_adapters(model: nn.Module) -> bool:
    return base_model(model) is not model
