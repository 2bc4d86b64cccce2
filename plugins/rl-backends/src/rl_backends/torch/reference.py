"""The weights a policy started with, kept while training changes the policy's own."""

from __future__ import annotations

import copy
import tempfile
from abc import ABC, abstractmethod
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rl_backends.pieces import local_part
from rl_backends.tensors import module_tensors, tensor_specs
from rl_core.errors import CapabilityError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from torch import nn

__all__ = ["Reference", "make_reference"]


class Reference(ABC):
    """Gives the model with the weights of the start, for a while.

    Attributes:
        moves_weights: True if the policy's own weights are elsewhere in the meantime.
    """

    moves_weights: bool = False

    @abstractmethod
    def keep(self, model: nn.Module) -> None:
        """Called before the weights change; remembers them the first time."""

    @abstractmethod
    def using(self, model: nn.Module) -> Any:
        """A context manager over a model with the weights of the start.

        The policy's own weights are in ``model`` again afterwards, whatever happened.
        """

    def to(self, device: torch.device) -> None:
        """Moves what stands beside the policy's own weights."""
        del device

    def close(self) -> None:
        """Lets go of what was kept. Idempotent."""


def make_reference(kind: str, model: nn.Module) -> Reference:
    """The reference policy of a model as it is now.

    Args:
        kind: ``"copy"`` for a second model, ``"memory"`` for a second set of tensors that take the
            place of the policy's for a call, ``"swap"`` for one in a file on disk, or ``"none"``.
        model: The policy's model, before any training.
    """
    if kind == "copy":
        return _Copy(model)
    kinds: dict[str, type[Reference]] = {"memory": _Swap, "swap": _SwapFile, "none": _Nothing}
    return kinds[kind]()


class _Copy(Reference):
    """A second model; made at once, so that it scores from the same memory all along."""

    def __init__(self, model: nn.Module) -> None:
        self._copy = copy.deepcopy(model).requires_grad_(requires_grad=False)

    def keep(self, model: nn.Module) -> None:
        del model

    @contextmanager
    def using(self, model: nn.Module) -> Generator[nn.Module]:
        del model
        yield self._copy

    def to(self, device: torch.device) -> None:
        self._copy.to(device)


class _Swap(Reference):
    """Tensors that take the place of the policy's for a call."""

    moves_weights = True

    def __init__(self) -> None:
        self._kept: dict[str, Callable[[], torch.Tensor]] = {}

    def keep(self, model: nn.Module) -> None:
        if not self._kept:
            tensors = module_tensors(model)
            owned = [s.name for s in tensor_specs(tensors) if s.alias_of is None]
            self._kept = self._stored({name: local_part(tensors[name]) for name in owned})

    def _stored(self, owned: dict[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
        copies = {name: tensor.clone() for name, tensor in owned.items()}
        return {name: partial(copies.__getitem__, name) for name in copies}

    @contextmanager
    def using(self, model: nn.Module) -> Generator[nn.Module]:
        tensors = {name: local_part(tensor) for name, tensor in module_tensors(model).items()}
        own: dict[str, torch.Tensor] = {}
        try:
            with torch.no_grad():
                for name, kept in self._kept.items():
                    own[name] = tensors[name].to("cpu", copy=True)
                    tensors[name].copy_(kept())
            yield model
        finally:
            with torch.no_grad():
                # Tensors may overlap: what was changed first was copied before any other change.
                for name, value in reversed(own.items()):
                    tensors[name].copy_(value)

    def close(self) -> None:
        self._kept = {}


class _SwapFile(_Swap):
    """In a file on disk, without a name."""

    def _stored(self, owned: dict[str, torch.Tensor]) -> dict[str, Callable[[], torch.Tensor]]:
        tensors: dict[str, torch.Tensor] = {}
        storages: set[int] = set()
        for name, given in owned.items():
            tensor = given.cpu().contiguous()
            storage = tensor.untyped_storage().data_ptr()
            # safetensors takes no two that overlap.
            tensors[name] = tensor.clone() if storage in storages else tensor
            storages.add(storage)
        where = "TMPDIR"
        try:
            where = tempfile.gettempdir()
            with tempfile.TemporaryDirectory(prefix="rl-reference-") as directory:
                path = Path(directory, "weights.safetensors")
                save_file(tensors, path)
                file: Any = safe_open(path, framework="pt")
                # The first tensor maps the file; from then on it lives without its name, and goes
                # with this process however that ends.
                file.get_tensor(next(iter(tensors)))
        except (OSError, SafetensorError) as error:
            raise ConfigError(
                f"the reference's weights cannot be written to a file in {where}: {error}",
                fix="free space there, set TMPDIR to a directory on another disk, or use "
                "reference='copy', which keeps them in memory",
                key="reference",
            ) from error
        return {name: partial(file.get_tensor, name) for name in tensors}


class _Nothing(Reference):
    def keep(self, model: nn.Module) -> None:
        del model

    def using(self, model: nn.Module) -> Any:
        raise CapabilityError(
            f"the policy of a {type(model).__name__} was built with reference='none', so it has no "
            "reference model",
            fix="build it with reference='swap' or 'copy'",
        )
