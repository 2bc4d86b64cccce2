"""Lets megatron-core compute where no GPU exists.

It names CUDA in a few places: rotary embeddings and the exchanges between stages make
their tensors on the current CUDA device, and it waits for the GPU here and there. It also relies on
NCCL where experts are over tensor-parallel ranks: their parts have different numbers of tokens,
which gloo does not gather. Where an optimizer is distributed, gloo has slow ways to exchange
shares. All of that is turned to the CPU for as long as :func:`without_cuda` lasts, and torch is
then as it was.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed as dist
from torch.overrides import TorchFunctionMode

from rl_megatron.engine import (
    parallel_mappings,
    parallel_random,
    param_and_grad_buffer,
    token_dispatcher,
)

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["without_cuda"]


class _OnTheCpu(TorchFunctionMode):
    """Makes tensors that were meant for a GPU on the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


_gather_equal = parallel_mappings._gather_along_first_dim
_reduce_scatter_equal = parallel_mappings._reduce_scatter_along_first_dim


def _gather(tensor: Any, group: Any, sizes: list[int] | None = None, *options: Any) -> Any:
    """All ranks' rows one after the other; where there are ``sizes``, so many of each rank."""
    if sizes is None or group.size() == 1:
        return _gather_equal(tensor, group, sizes, *options)
    parts = [tensor.new_empty(size, *tensor.shape[1:]) for size in sizes]
    parts[group.rank()] = tensor.contiguous()
    for rank, part in enumerate(parts):
        if len(part):
            dist.broadcast(part, dist.get_global_rank(group, rank), group=group)
    return torch.cat(parts)


def _reduce_scatter(tensor: Any, group: Any, sizes: list[int] | None = None, *options: Any) -> Any:
    """This rank's rows of the sum over all ranks; where there are ``sizes``, so many for each."""
    if sizes is None or group.size() == 1:
        return _reduce_scatter_equal(tensor, group, sizes, *options)
    parts = [part.clone() for part in tensor.split(sizes)]  # the sum is made in place
    for rank, part in enumerate(parts):
        if len(part):
            dist.reduce(part, dist.get_global_rank(group, rank), group=group)
    return parts[group.rank()]


def _sum_shares(share: Any, whole: Any, op: Any, group: Any, async_op: bool = False) -> None:
    """Each rank's share of a sum. Gloo's own way to it sums all of it on every rank."""
    assert op == dist.ReduceOp.SUM
    assert not async_op
    for rank, part in enumerate(whole.chunk(group.size())):
        dist.reduce(part, dist.get_global_rank(group, rank), group=group)


def _gather_shares(whole: Any, share: Any, group: Any, async_op: bool = False) -> None:
    """All ranks' shares, each in its place in the whole already. Gloo copies them aside first."""
    assert not async_op
    for rank, part in enumerate(whole.chunk(group.size())):
        dist.broadcast(part, dist.get_global_rank(group, rank), group=group)


#: What is replaced in torch and megatron-core.
_REPLACED: tuple[Any, ...] = (
    mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
    mock.patch.object(torch.cuda, "synchronize"),
    # megatron-core counts the tokens of each expert on a stream beside the current one.
    mock.patch.object(torch.cuda, "Stream"),
    mock.patch.object(torch.cuda, "current_stream"),
    mock.patch.object(torch.cuda, "stream", side_effect=lambda _: nullcontext()),
    mock.patch.object(
        parallel_random, "_get_cuda_rng_state", side_effect=lambda *_, **__: torch.get_rng_state()
    ),
    mock.patch.object(parallel_random, "_set_cuda_rng_state"),
    # megatron-core does not make the array that it wants of counts which need not be moved.
    mock.patch.object(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        lambda counts, as_numpy=False, **_: (
            counts.numpy() if as_numpy and torch.is_tensor(counts) else counts
        ),
    ),
    mock.patch.object(parallel_mappings, "_gather_along_first_dim", _gather),
    mock.patch.object(parallel_mappings, "_reduce_scatter_along_first_dim", _reduce_scatter),
    mock.patch.object(param_and_grad_buffer, "dist_reduce_scatter_func", _sum_shares),
    mock.patch.object(param_and_grad_buffer, "dist_all_gather_func", _gather_shares),
)


class _Patches:
    """Makes the replacements while any thread needs them; the last thread undoes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._made = ExitStack()

    @contextmanager
    def used(self) -> Generator[None]:
        with self._lock:
            if not self._users:
                with ExitStack() as made:
                    for patch in _REPLACED:
                        made.enter_context(patch)
                    self._made = made.pop_all()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._made.close()


_PATCHES = _Patches()


@contextmanager
def without_cuda() -> Generator[None]:
    """In its body, megatron-core runs on the CPU. Does nothing where there is a GPU.

    Threads may be in it at the same time.
    """
    if torch.cuda.is_available():
        yield
        return
    with _PATCHES.used(), _OnTheCpu():
        yield
