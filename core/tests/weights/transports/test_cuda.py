"""Memory of a GPU between processes, and what is refused before there is any."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from cuda_emulation import Gpu
from simple_pair import Engine, InPlaceSink, Trainer, fails, go, make_persistent

from rl_collective import collective, groups
from rl_collective.collective import COLLECTIVE
from rl_core.errors import ConfigError, RefitCorrupted, RefitError, RefitProtocolError
from rl_core.weights.data.digests import BlockHash, Hasher, tensor_digest
from rl_core.weights.transports import cuda, ipc
from rl_core.weights.transports.base import CPU, NoLane
from rl_core.weights.transports.cuda import CudaRegion, uuid_of, visible_gpus
from rl_core.weights.transports.ipc import IPC

REF = {
    "kind": "cuda",
    "uuid": "GPU-00000000-0000-0000-0000-000000000000",
    "handle": bytes(66),
    "nbytes": 4096,
    "offset": 0,
    "pid": 0,
    "key": "none",
}
NBYTES = 12_345_678
FOLD = BlockHash("fold", bytes(32))
RECEIVER = """
import sys, msgspec, torch
from rl_core.weights.data.digests import BlockHash, Hasher, tensor_digest
from rl_core.weights.transports.cuda import CudaRegion

FOLD = BlockHash("fold", bytes(32))
lane = CudaRegion.attach(msgspec.msgpack.decode(bytes.fromhex(sys.stdin.readline())))
target = torch.empty(lane.data.shape, dtype=torch.uint8, device=lane.data.device)
for line in sys.stdin:
    target.copy_(lane.data)
    lane.release()
    digest = tensor_digest(Hasher([target], FOLD).digests()).hex()
    print(digest, torch.cuda.memory_allocated(), flush=True)
lane.close()
"""
gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Receiver:
    """Another process that copies a lane whenever it is asked."""

    def __init__(self, region: CudaRegion, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self._say(msgspec.msgpack.encode(dict(region.ref)).hex())

    def _say(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def copy(self) -> tuple[str, int]:
        """The digest of what it copied, and the bytes that it has allocated."""
        self._say("copy")
        assert self.process.stdout
        digest, allocated = self.process.stdout.readline().split()
        return digest, int(allocated)


@contextmanager
def receiving(region: CudaRegion, **environment: str) -> Iterator[Receiver]:
    receiver = Receiver(region, **environment)
    with receiver.process:
        try:
            yield receiver
            receiver.process.communicate(timeout=280)
        finally:
            receiver.process.kill()


@contextmanager
def created(device: torch.device | None = None) -> Iterator[CudaRegion]:
    region = CudaRegion.create(NBYTES, device or torch.device("cuda"))
    try:
        yield region
    finally:
        region.close()


def digest_of(region: CudaRegion) -> str:
    return tensor_digest(Hasher([region.data], FOLD).digests()).hex()


def fill(region: CudaRegion) -> str:
    region.data.random_()
    region.publish(0, NBYTES)
    return digest_of(region)


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "shm"},
        {"uuid": 3},
        {"handle": 7},
        {"nbytes": 0},
        {"offset": -1},
        {"extra": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_malformed_reference_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RefitProtocolError, match="malformed"):
        CudaRegion.attach({**REF, **change})


@pytest.mark.parametrize("field", REF)
def test_a_reference_without_one_of_its_fields_is_refused(field: str) -> None:
    with pytest.raises(RefitProtocolError, match=field):
        CudaRegion.attach({name: value for name, value in REF.items() if name != field})


def test_a_gpu_that_is_not_visible_is_named_with_the_fix() -> None:
    with pytest.raises(RefitProtocolError, match="does not see; it sees") as caught:
        CudaRegion.attach(REF)
    assert caught.value.details["uuid"] == REF["uuid"]
    assert caught.value.fix
    assert f"add {REF['uuid']} to the receiver's CUDA_VISIBLE_DEVICES" in caught.value.fix


def test_the_cpu_has_no_uuid() -> None:
    assert uuid_of(CPU) is None
    assert visible_gpus(CPU) == ()


HERE, THERE, BEYOND = "GPU-a", "GPU-b", "GPU-c"


@pytest.mark.parametrize(
    ("seen", "by_handle", "by_nccl"),
    [
        ([(THERE, HERE)], True, True),
        ([(THERE, HERE), (BEYOND, HERE)], True, True),
        ([(THERE,)], False, True),
        ([(HERE, THERE)], True, False),  # two members of NCCL cannot share a GPU
        ([(THERE, HERE), (THERE, HERE)], True, False),
        ([(THERE, HERE), ()], False, False),  # the second's tensors are on the CPU
    ],
)
def test_bytes_stay_on_the_gpu_if_every_receiver_can_take_them_there(
    seen: list[tuple[str, ...]], by_handle: bool, by_nccl: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "uuid_of", lambda device: HERE)
    monkeypatch.setattr(collective, "uuid_of", lambda device: HERE)
    monkeypatch.setattr(CudaRegion, "create", lambda nbytes, device: NoLane())
    device = torch.device("cuda", 0)
    with closing(IPC.sender()) as sender:
        assert (sender.lane_device(device, seen) == device) is by_handle
    with closing(COLLECTIVE.sender(ip="127.0.0.1", port=0, receivers=1)) as sender:
        assert (sender.lane_device(device, seen) == device) is by_nccl


@pytest.mark.parametrize(
    ("seen", "where"), [([(HERE,)], "GPU-a, GPU-a"), ([(THERE,), ()], "GPU-a, GPU-b, no GPU")]
)
def test_nccl_where_gpus_are_shared_is_refused_and_gloo_is_made_on_the_cpu(
    seen: list[tuple[str, ...]], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "uuid_of", lambda device: HERE)
    options = {"ip": "127.0.0.1", "port": 0, "receivers": 1}
    with closing(COLLECTIVE.sender(**options, backend="nccl")) as sender:
        with pytest.raises(ConfigError, match=f"their tensors are on {where}") as caught:
            sender.lane_device(torch.device("cuda", 0), seen)
        assert caught.value.details["key"] == "backend"
        assert sender.lane_device(torch.device("cuda", 0), [(BEYOND,)]).type == "cuda"
        assert sender.lane(100, CPU, ["a"]).ref["backend"] == "gloo"


@gpu
@needs_gpu
def test_every_visible_gpu_has_a_uuid_of_its_own() -> None:
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    assert set(visible_gpus(devices[-1])) == {uuid_of(device) for device in devices}
    assert len(visible_gpus(devices[-1])) == len(devices)
    assert visible_gpus(devices[-1])[0] == uuid_of(devices[-1])


def test_a_lack_of_memory_says_which_setting_to_lower(gpu: Gpu) -> None:
    gpu.limit = 1024
    with pytest.raises(
        RefitError, match="cannot allocate a buffer of 4096 bytes on cuda:1"
    ) as caught:
        CudaRegion.create(4096, torch.device("cuda:1"))
    assert "lower bucket_bytes" in str(caught.value.fix)


def test_expandable_segments_are_refused_with_the_fix(gpu: Gpu) -> None:
    gpu.expandable = True
    with pytest.raises(RefitError, match="expandable segment") as caught:
        cuda._export(torch.empty(16, dtype=torch.uint8))
    assert "leave expandable_segments out of PYTORCH_ALLOC_CONF" in str(caught.value.fix)


def test_an_allocator_that_cannot_share_is_named(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    refuses = mock.Mock(side_effect=RuntimeError("operation not supported"))
    monkeypatch.setattr(gpu, "_share_cuda_", refuses)
    with pytest.raises(RefitError, match=r"cannot be shared .* operation not supported") as caught:
        CudaRegion.create(16, torch.device("cpu"))
    assert "collective transport" in str(caught.value.fix)


@gpu
@needs_gpu
def test_another_process_reads_what_was_published() -> None:
    with created() as region, receiving(region) as receiver:
        expected = fill(region)
        assert receiver.copy()[0] == expected


@gpu
@needs_gpu
def test_the_gpu_is_found_where_it_has_another_index() -> None:
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with (
        created(last) as region,
        receiving(region, CUDA_VISIBLE_DEVICES=str(region.ref["uuid"])) as receiver,
    ):
        expected = fill(region)
        assert receiver.copy()[0] == expected


@gpu
@needs_gpu
@pytest.mark.parametrize("receivers", [0, 1, 2])
@pytest.mark.parametrize("killed", [False, True])
def test_closing_frees_the_memory_whatever_receivers_did(receivers: int, killed: bool) -> None:
    counts = f"torch_{os.getpid()}_*"
    before = torch.cuda.memory_allocated(), len(list(Path("/dev/shm").glob(counts)))
    region = CudaRegion.create(NBYTES, torch.device("cuda"))
    for _ in range(receivers):
        with receiving(region) as receiver:
            receiver.copy()
            if killed:
                receiver.process.kill()
    region.close()
    assert (torch.cuda.memory_allocated(), len(list(Path("/dev/shm").glob(counts)))) == before


@gpu
@needs_gpu
def test_one_process_shares_the_tensor_itself() -> None:
    with created() as region:
        other = CudaRegion.attach(dict(region.ref))
        assert other.data.data_ptr() == region.data.data_ptr()
        other.close()
        assert region.data.numel() == NBYTES


@gpu
@needs_gpu
def test_a_region_that_is_closed_cannot_be_attached() -> None:
    with created() as region:
        ref = dict(region.ref)
    with pytest.raises(RefitProtocolError, match="cannot be mapped"):
        CudaRegion.attach(ref)


@gpu
@needs_gpu
def test_both_processes_fold_to_the_same_digest_as_a_cpu() -> None:
    with created() as region, receiving(region) as receiver:
        fill(region)
        on_cpu = tensor_digest(Hasher([region.data.cpu()], FOLD).digests()).hex()
        assert receiver.copy()[0] == on_cpu


BYTE = torch.zeros(1, dtype=torch.uint8)


class Communicator:
    """A group of NCCL whose transfers end, as those of one that was aborted do."""

    def __init__(self, state: Any) -> None:
        self.get_error = lambda: state
        self.rank = lambda: 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> SimpleNamespace:
            self.calls.append(name)
            return SimpleNamespace(wait=lambda: None)

        return call


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Any:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(groups, "_CUDA", SimpleNamespace(Stream=lambda device: stream))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    return groups._Nccl(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("runs", "calls"),
    [
        (None, ["broadcast"]),
        ([], []),
        ([(1, BYTE), (2, BYTE)], ["_start_coalescing", "send", "send", "_end_coalescing"]),
    ],
    ids=["broadcast", "nothing", "apart"],
)
def test_a_transfer_of_a_communicator_that_broke_is_no_success(
    nccl: Any, runs: Any, calls: list[str]
) -> None:
    states = groups._C10D.ErrorType
    span = groups._Span(BYTE, runs, 0.0)
    nccl.move(sound := Communicator(states.SUCCESS), span)
    assert sound.calls == calls
    with pytest.raises(RuntimeError, match="NCCL reports"):
        nccl.move(Communicator(states.REMOTE_ERROR), span)


def test_a_failed_peer_ends_no_process_and_the_environment_is_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")  # the user's own word counts
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with groups._survive_errors():
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING")
    with groups._survive_errors():
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"


@gpu
@needs_gpu
@pytest.mark.parametrize("at_home", [False, True])
def test_on_a_gpu_what_is_held_is_verified_although_nothing_is_sent(keep, at_home):
    tensors = {name: t.to("cuda:0") for name, t in make_persistent().items()}
    trainer = keep(Trainer(tensors, at_home=at_home))
    engine = keep(Engine({n: torch.zeros_like(t) for n, t in tensors.items()}, kind=InPlaceSink))
    trainer.source.device = engine.sink.device = "cuda:0"
    go(trainer, engine)
    assert go(trainer, engine, verify="installed", delta=True).bytes == 0
    engine.sink.tensor["half"].zero_()
    _, receiver = fails(trainer, engine, verify="installed", delta=True)
    assert isinstance(receiver, RefitCorrupted)
