"""Stand-ins for what SGLang imports and has no build for CPUs. Loaded only where no GPU exists.

On a CPU without AMX SGLang computes with torch alone, but its modules import two packages that
exist for CUDA only:

- ``sgl_kernel``: a name of it may be imported, and raises when it is called. Real are the
  function that fills the table of cache places, and the hash behind seeded sampling, which is
  MurmurHash3 (32 bits) of seed, position and token, as SGLang's own kernel computes it.
- ``torchvision``, for models of images: a name of it may be imported, and raises when it is called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import library as torch_library

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["STOOD_IN", "murmur_hash32", "stand_in"]

STOOD_IN = ("sgl_kernel", "torchvision")
#: Operators of sgl_kernel that modules of models look up while they are imported.
_LOOKED_UP = ("fused_sigmoid_mul_cpu", "fused_moe_router_cpu")
_WORD = 0xFFFFFFFF
_library: Any = torch_library.Library


class _Absent:
    """A name of a package that is not there."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(
            f"SGLang's kernel {self._name} has no build for CPUs, and rl-sglang replaces only the "
            "kernels of text models"
        )


class _StandIn(ModuleType):
    """A module with whatever names are asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of packages that are not there."""

    operators: Any = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname.partition(".")[0] not in STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "sgl_kernel":
            vars(module).update(
                __version__="0.0.0", assign_req_to_token_pool_cpu=_assign_req_to_token_pool
            )


def stand_in() -> None:
    """Lets SGLang be imported on a CPU. To be called before; what is installed wins."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if importlib.util.find_spec("sgl_kernel") is not None:
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # it remembers the answer, which is no
    sys.meta_path.append(_Finder())  # the last one: asked for what nobody else has
    library = _Finder.operators = _library("sgl_kernel", "DEF")
    library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor tokens) -> Tensor")
    library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
    for name in _LOOKED_UP:
        library.define(f"{name}(Tensor input) -> Tensor")


def _assign_req_to_token_pool(
    rows: torch.Tensor,
    table: torch.Tensor,
    begins: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    width: int,
) -> None:
    """Writes each row's new places in the cache, which come one row after the other."""
    del width
    taken = 0
    for row, begin, end in zip(rows.tolist(), begins.tolist(), ends.tolist(), strict=True):
        table[row, begin:end] = places[taken : taken + end - begin].to(table.dtype)
        taken += end - begin


def murmur_hash32(
    seed: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """MurmurHash3 (x86, 32 bits; Appleby 2011) of 16 bytes: seed (two words), position, token.

    Args:
        seed: ``[R]`` 64-bit integers.
        positions: ``[R]`` integers.
        tokens: ``[V]`` integers.

    Returns:
        ``[R, V]`` uint32.
    """
    words = seed.to(torch.int64)[:, None]
    state = torch.zeros_like(words)
    for word in (words & _WORD, (words >> 32) & _WORD, positions.to(torch.int64)[:, None] & _WORD):
        state = _mixed(state, word)
    state = _mixed(state, tokens.to(torch.int64)[None] & _WORD) ^ 16
    state = _times(state ^ (state >> 16), 0x85EBCA6B)
    state = _times(state ^ (state >> 13), 0xC2B2AE35)
    return (state ^ (state >> 16)).to(torch.uint32)


def _mixed(state: torch.Tensor, word: torch.Tensor) -> torch.Tensor:
    word = _times(_rotated(_times(word, 0xCC9E2D51), 15), 0x1B873593)
    return (_times(_rotated(state ^ word, 13), 5) + 0xE6546B64) & _WORD


def _times(left: torch.Tensor, right: int) -> torch.Tensor:
    """The low 32 bits of a product; the whole of it may not fit into a signed 64-bit number."""
    high = ((left >> 16) * right) & 0xFFFF
    return ((left & 0xFFFF) * right + (high << 16)) & _WORD


def _rotated(word: torch.Tensor, bits: int) -> torch.Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
