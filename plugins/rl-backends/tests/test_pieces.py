"""Boxes of DTensors against tensors that torch distributed: on every rank of random meshes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_backends.pieces import copy_to_pieces, index_of, pieces_of
from rl_core.errors import CapabilityError


@contextmanager
def rank_of(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """This process is a rank of a mesh whose collectives do nothing."""
    # torch keeps what it knows of meshes, and those of two ranks would be equal.
    names = tuple(f"dim{number} of rank {rank}" for number in range(len(sizes)))
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def check(
    whole: torch.Tensor,
    sizes: tuple[int, ...],
    spread: Callable[[torch.Tensor, DeviceMesh], torch.Tensor],
    copies: int,
) -> int:
    """Every element is in the boxes of as many ranks as have a copy; most boxes of a rank."""
    count = torch.zeros(whole.shape, dtype=torch.int64)
    most = 0
    for rank in range(math.prod(sizes)):
        with rank_of(rank, sizes) as mesh:
            tensor = spread(whole, mesh)
            assert isinstance(tensor, DTensor)
            pieces = pieces_of(tensor)
            local = tensor.to_local()
            for box, view in pieces:
                assert all(first < after for first, after in box)
                assert torch.equal(view, whole[index_of(box)])
                count[index_of(box)] += 1
                assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
            assert sum(view.numel() for _, view in pieces) == local.numel()
            most = max(most, len(pieces))
            local.detach().zero_()
            copy_to_pieces(tensor, whole + 1)
            assert all(torch.equal(view, whole[index_of(box)] + 1) for box, view in pieces)
    assert (count == copies).all()
    return most


@pytest.mark.parametrize("seed", range(40))
def test_boxes_cover_a_tensor_on_any_mesh(seed: int) -> None:
    draw = random.Random(seed)
    sizes = tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3)))
    shape = tuple(draw.randint(1, 7) for _ in range(draw.randint(1, 3)))
    placements = [
        draw.choice([Replicate(), *(Shard(dim) for dim in range(len(shape)))]) for _ in sizes
    ]

    def spread(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        return distribute_tensor(whole.clone(), mesh, placements, src_data_rank=None)

    copies = math.prod(
        size for size, placed in zip(sizes, placements, strict=True) if placed == Replicate()
    )
    assert check(numbered(*shape), sizes, spread, copies) <= 1


@pytest.mark.parametrize("seed", range(80))
def test_boxes_of_fsdp_over_tensor_parallelism(seed: int) -> None:
    draw = random.Random(seed)
    sizes = draw.randint(1, 4), draw.randint(2, 4)
    shape = draw.randint(1, 19), draw.randint(1, 6)
    placed = draw.choice([Shard(0), Shard(1), Replicate()])

    def spread(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        names = mesh.mesh_dim_names
        assert names is not None
        module = nn.Module()
        tensor = distribute_tensor(whole.clone(), mesh[names[1]], [placed], src_data_rank=None)
        module.weight = nn.Parameter(tensor)
        fully_shard(module, mesh=mesh[names[0]])
        return module.weight

    assert check(numbered(*shape), sizes, spread, sizes[1] if placed == Replicate() else 1) <= 1


@pytest.mark.parametrize(("rows", "ranks"), [(7, 3), (2, 4), (1, 2)])
def test_a_rank_may_have_nothing(rows: int, ranks: int) -> None:
    def spread(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        module = nn.Linear(3, rows, bias=False)
        module.weight.data.copy_(whole)
        fully_shard(module, mesh=mesh)
        return module.weight

    assert check(numbered(rows, 3), (ranks,), spread, 1) == 1
    with rank_of(ranks - 1, (ranks,)) as mesh:
        last = spread(numbered(rows, 3), mesh)
        assert len(pieces_of(last)) == (rows == 7)


def test_partial_sums_are_refused() -> None:
    with rank_of(0, (2,)) as mesh:
        tensor = DTensor.from_local(numbered(2), mesh, [Partial()], run_check=False)
        with pytest.raises(CapabilityError, match="Partial"):
            pieces_of(tensor)


def test_a_rank_outside_of_the_mesh_has_nothing() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        tensor = distribute_tensor(numbered(4), mesh, [Shard(0)], src_data_rank=None)
        assert pieces_of(tensor) == []
    finally:
        dist.destroy_process_group()
