"""Reads weights through paths of their own: the policy's, the engine's, the checkpoint's."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from rl_conformance.expect import NotRun, require, same_tensor

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

    from rl_core.interfaces import ColocatablePolicyInterface, GenerationInterface

__all__ = ["checkpoint_weights", "digests", "engine_weights", "policy_weights", "same_weights"]


def policy_weights(policy: ColocatablePolicyInterface) -> dict[str, torch.Tensor]:
    """Copies of the policy's tensors under their names, aliases included."""
    source: Any = getattr(policy, "refit_source", None)
    if source is None:
        raise NotRun("the policy has no weight_source in this process (of PolicyBackend)")
    source = source()
    specs = list(source.specs())
    owned = [spec.name for spec in specs if spec.alias_of is None]
    found = {name: tensor.detach().cpu().clone() for name, tensor in source.tensors(owned)}
    return found | {s.name: found[s.alias_of] for s in specs if s.alias_of is not None}


def engine_weights(generation: GenerationInterface) -> dict[str, torch.Tensor]:
    """Copies of what the engine has installed, under the manifest's names.

    Without those of which it keeps only what it computed.
    """
    sink: Any = getattr(generation, "weight_sink", None)
    if sink is None:
        raise NotRun("the engine has no weight_sink in this process (of GenerationBackend)")
    sink = sink()
    names = [spec.name for spec in sink.specs()]
    found = sink.read(names)
    return {name: one.detach().cpu().clone() for name, one in found if one is not None}


def checkpoint_weights(path: Path) -> dict[str, torch.Tensor]:
    """The tensors in the safetensors files of a Hugging Face directory."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        found |= load_file(file)
    require(found, f"{path}", "model*.safetensors", "no such file")
    return found


def digests(
    tensors: Mapping[str, torch.Tensor], dtypes: Mapping[str, str] | None = None
) -> dict[str, list[str]]:
    """Dtype and SHA-256 of each tensor's bytes, in another dtype where ``dtypes`` names one."""
    import torch

    from rl_backends.tensors import dtype_name

    found = {}
    for name, tensor in tensors.items():
        dtype = (dtypes or {}).get(name, dtype_name(tensor.dtype))
        whole = tensor.to(getattr(torch, dtype)).contiguous().reshape(-1).view(torch.uint8)
        found[name] = [dtype, hashlib.sha256(whole.numpy().tobytes()).hexdigest()]
    return found


def same_weights(
    got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str
) -> None:
    """Fails unless both sides have the same names and the same bits, signs of zeros among them."""
    missing, more = expected.keys() - got.keys(), got.keys() - expected.keys()
    names = f"{sorted(missing)[:5]} missing, {sorted(more)[:5]} unexpected"
    require(not missing and not more, f"{what}: names of tensors", "the same on both sides", names)
    for name, tensor in expected.items():
        same_tensor(got[name], tensor, f"{what}: {name}")
