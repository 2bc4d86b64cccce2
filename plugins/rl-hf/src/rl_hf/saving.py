"""What a policy's checkpoint holds, and how it goes back into a policy.

The model is a Hugging Face directory; beside it are the optimizer's tensors, and with adapters the
adapters' own weights. All of it is safetensors and JSON.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_backends.policy.checkpoint_directory import check_fit
from rl_backends.torch.checkpoints import quiet
from rl_core.errors import CheckpointError
from rl_core.weights.tensors import module_tensors, tensor_specs
from rl_hf.forward import base_model
from rl_hf.lora import merged_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import nn

    from rl_backends.torch.optimizer import Optimizer

__all__ = ["read", "save", "write_model"]

TENSORS_FILE = "rl_training/state.safetensors"


def save(directory: Path, model: nn.Module, tokenizer: Any, optimizer: Optimizer) -> None:
    """Writes model, tokenizer and optimizer into a directory.

    Args:
        directory: Of the checkpoint; its folder ``rl_training`` is there.
        model: The policy's model.
        tokenizer: Saved beside it, if there is one.
        optimizer: Of the model.
    """
    write_model(directory, model, tokenizer, original_format=False)
    tensors = optimizer.state()
    if _has_adapters(model):
        tensors |= {f"weight.{name}": p for name, p in optimizer.parameters.items()}
    save_file({n: t.detach().cpu() for n, t in tensors.items()}, directory / TENSORS_FILE)


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
    tensors = _read_tensors(directory / TENSORS_FILE)
    if _has_adapters(model):
        targets: dict[str, torch.Tensor] = dict(optimizer.parameters)
        weights = {n.removeprefix("weight."): t for n, t in tensors.items() if n[:7] == "weight."}
    else:
        found: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("model*.safetensors")):
            found.update(_read_tensors(file))
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
            target.copy_(weights[name])
        optimizer.load_state(tensors)

    return put


def write_model(
    directory: Path, model: nn.Module, tokenizer: Any, *, original_format: bool
) -> None:
    """Writes the model (adapters merged) and its tokenizer as a Hugging Face directory.

    Args:
        directory: Is there.
        model: The policy's model.
        tokenizer: Saved beside it, if there is one.
        original_format: Use the names and layout that the architecture is published in.
    """
    merged = merged_state(model) if _has_adapters(model) else None
    with quiet():
        base_model(model).save_pretrained(
            directory, state_dict=merged, save_original_format=original_format
        )
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of one safetensors file, mapped and not copied."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read: {error}", fix="load another checkpoint", file=str(file)
        ) from error


def _has_adapters(model: nn.Module) -> bool:
    return base_model(model) is not model
