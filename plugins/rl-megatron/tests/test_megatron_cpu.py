"""Without a GPU, what megatron-core asks of CUDA is replaced for a while, and then as it was."""

from __future__ import annotations

import threading

import pytest
import torch

from rl_megatron.cpu import without_cuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="replaces CUDA where none is")

NAMES = ("current_device", "synchronize", "Stream", "current_stream", "stream")
MEGATRON = ("_get_cuda_rng_state", "_set_cuda_rng_state")
UNEVEN = ("_gather_along_first_dim", "_reduce_scatter_along_first_dim")


def state() -> list[object]:
    from megatron.core.tensor_parallel import mappings, random
    from megatron.core.transformer.moe import token_dispatcher

    return [
        *(getattr(torch.cuda, name) for name in NAMES),
        *(getattr(random, name) for name in MEGATRON),
        *(getattr(mappings, name) for name in UNEVEN),
        token_dispatcher.maybe_move_tensor_to_cpu,
    ]


def modes() -> int:
    return torch._C._len_torch_function_stack()


@pytest.fixture(autouse=True)
def as_it_was():
    before, depth = state(), modes()
    yield
    assert all(a is b for a, b in zip(state(), before, strict=True))
    assert modes() == depth


def works() -> bool:
    made = torch.zeros(2, device="cuda"), torch.zeros(2, device=torch.cuda.current_device())
    return all(tensor.device.type == "cpu" for tensor in (*made, made[0].cuda()))


def test_tensors_for_a_gpu_are_made_on_the_cpu():
    with without_cuda():
        assert works()
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            assert works()
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def test_other_devices_and_functions_are_left_alone():
    with without_cuda():
        assert torch.empty(2, device="meta").device.type == "meta"
        assert torch.arange(3).sum() == 3


def test_an_exception_ends_it_too():
    for _ in range(2):
        with pytest.raises(KeyError), without_cuda():
            raise KeyError
    with without_cuda():
        assert works()


@pytest.mark.parametrize("first_out", ["first in", "last in"])
def test_threads_that_overlap_do_not_restore_each_others(first_out):
    inside, leave = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def other() -> None:
        try:
            with without_cuda():
                inside.set()
                assert leave.wait(30)
                assert works()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=other)
    if first_out == "first in":
        with without_cuda():
            thread.start()
            assert inside.wait(30)
        leave.set()
        thread.join()
    else:
        thread.start()
        assert inside.wait(30)
        with without_cuda():
            leave.set()
            thread.join()
            assert works()
    assert not failures


def test_a_thread_beside_keeps_its_own_devices():
    """Functions of torch.cuda are everybody's; where tensors go is each thread's own."""
    found: list[object] = []

    def beside() -> None:
        try:
            torch.zeros(2, device="cuda")
        except (RuntimeError, AssertionError) as error:
            found.append(error)

    with without_cuda():
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    assert found


def test_nothing_happens_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before, depth = state(), modes()
    with without_cuda():
        assert all(a is b for a, b in zip(state(), before, strict=True))
        assert modes() == depth
