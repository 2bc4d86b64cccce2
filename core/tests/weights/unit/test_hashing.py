"""Digests: which errors they see, and that nothing but the bytes decides them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from second_preimage import second_preimage

from rl_core.errors import RefitProtocolError
from rl_core.weights.data.digests import (
    BLOCK,
    BlockHash,
    Hasher,
    tensor_digest,
)
from rl_core.weights.gpu import fold as _fold

CPU, GPU = torch.device("cpu"), torch.device("cuda:1")
XXH3 = BlockHash.choose(CPU, private=True, token="secret")
BLAKE3 = BlockHash.choose(CPU, private=False, token="secret")
FOLD = BlockHash.choose(GPU, private=True, token="secret")
HASHES = pytest.mark.parametrize("how", [XXH3, BLAKE3, FOLD], ids=lambda how: how.kind)
CONTENTS = st.binary(min_size=1, max_size=300) | st.binary(min_size=64, max_size=300)
MASK = (1 << 64) - 1


def tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def digest(content: bytes, how: BlockHash) -> bytes:
    return tensor_digest(Hasher([tensor(content)], how).digests())


def folded(content: bytes, block: int, chunk: int) -> list[bytes]:
    return _fold.prepare([tensor(content)], FOLD.key, block, chunk)()()


def folded_by_hand(content: bytes) -> bytes:
    words = np.frombuffer(content + bytes(-len(content) % 4), dtype="<i4").tolist()
    stream = np.frombuffer(blake3(b"multipliers", key=FOLD.key).digest(4 * FOLD.block), dtype="<u8")
    lanes = b""
    for multipliers in stream.reshape(2, -1):
        odd = [number | 1 for number in multipliers[: len(words)].tolist()]
        total = sum(word * factor for word, factor in zip(words, odd, strict=True))
        lanes += (total & MASK).to_bytes(8, "little")
    last = lanes + len(content).to_bytes(8, "little")
    return hashlib.blake2b(last, key=FOLD.key, person=b"rl-refit fold", digest_size=16).digest()


@settings(max_examples=20)
@given(CONTENTS)
def test_the_folded_digest_is_its_formula(content: bytes) -> None:
    assert Hasher([tensor(content)], FOLD).digests() == [folded_by_hand(content)]


@HASHES
@given(content=CONTENTS, data=st.data())
def test_every_flipped_bit_changes_the_digest(
    how: BlockHash, content: bytes, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest(bytes(changed), how) != digest(content, how)


@given(st.lists(st.binary(min_size=64, max_size=64), min_size=2, max_size=6, unique=True))
def test_permuted_blocks_change_the_digest_of_the_tensor(blocks: list[bytes]) -> None:
    first = folded(b"".join(blocks), 64, 128)
    turned = folded(b"".join(blocks[1:] + blocks[:1]), 64, 128)
    assert turned == first[1:] + first[:1]
    assert tensor_digest(turned) != tensor_digest(first)


@given(st.lists(st.binary(max_size=400), min_size=1, max_size=6), st.sampled_from([64, 256, 4096]))
def test_how_much_is_folded_at_once_and_beside_what_has_no_influence(
    contents: list[bytes], chunk: int
) -> None:
    together = _fold.prepare([tensor(content) for content in contents], FOLD.key, 64, chunk)()()
    assert together == [one for content in contents for one in folded(content, 64, 1 << 20)]


@HASHES
@given(content=CONTENTS, offset=st.integers(0, 9))
def test_a_digest_does_not_depend_on_alignment(how: BlockHash, content: bytes, offset: int) -> None:
    whole = torch.full((len(content) + 16,), 0xA5, dtype=torch.uint8)
    view = whole[offset : offset + len(content)]
    view.copy_(tensor(content))
    assert Hasher([view], how).digests() == Hasher([tensor(content)], how).digests()


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("extra", [0, 1, 70_001])
def test_runs_of_several_blocks_fold_as_their_blocks_do(offset: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(extra)
    whole = torch.randint(
        0, 256, (3 * FOLD.block + extra + 8,), dtype=torch.uint8, generator=generator
    )
    run = whole[offset : offset + 3 * FOLD.block + extra]
    each = [Hasher([part.clone()], FOLD).digests()[0] for part in run.split(FOLD.block)]  # type: ignore[no-untyped-call]
    assert Hasher([run], FOLD).digests() == each
    assert len(set(each)) == len(each)


@pytest.mark.parametrize("how", [XXH3, BLAKE3], ids=lambda how: how.kind)
@settings(max_examples=10)
@given(size=st.integers(0, 2 * BLOCK + 1))
def test_blocks_are_digested_one_by_one(how: BlockHash, size: int) -> None:
    run = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    each = [how.of_view(part.numpy().data) for part in run.split(BLOCK) if len(part)]  # type: ignore[no-untyped-call]
    assert Hasher([run], how).digests() == each


@given(CONTENTS)
def test_the_kinds_of_the_cpu_are_those_functions_of_the_bytes(content: bytes) -> None:
    assert Hasher([tensor(content)], XXH3).digests() == [xxhash.xxh3_128_digest(content)]
    keyed = blake3(content, key=BLAKE3.key).digest(length=16)
    assert Hasher([tensor(content)], BLAKE3).digests() == [keyed]


@HASHES
def test_what_is_started_before_bytes_change_is_of_the_bytes_before(how: BlockHash) -> None:
    data = tensor(b"weights")
    finish = Hasher([data], how).begin()
    data.zero_()
    assert finish() == Hasher([tensor(b"weights")], how).digests()


# -- keys -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "private", "kind"),
    [(CPU, True, "xxh3"), (CPU, False, "blake3"), (GPU, True, "fold"), (GPU, False, "fold")],
)
def test_bytes_that_strangers_reach_or_that_are_on_a_gpu_have_a_keyed_hash(
    device: torch.device, private: bool, kind: str
) -> None:
    chosen = BlockHash.choose(device, private=private, token="secret")
    assert chosen.kind == kind
    assert (len(chosen.key) >= 16) is (kind != "xxh3")
    assert BlockHash.named(kind, private=private, token="secret") == chosen


@pytest.mark.parametrize(("kind", "private"), [("md5", True), ("", False), ("xxh3", False)])
def test_a_hash_that_is_unknown_or_protects_nothing_is_refused(kind: str, private: bool) -> None:
    with pytest.raises(RefitProtocolError) as caught:
        BlockHash.named(kind, private=private, token="secret")
    assert caught.value.fix


@pytest.mark.parametrize("how", [BLAKE3, FOLD], ids=lambda how: how.kind)
@given(content=CONTENTS)
def test_another_token_gives_unrelated_digests(how: BlockHash, content: bytes) -> None:
    other = BlockHash.named(how.kind, private=False, token="Secret")
    assert other.key != how.key
    ours, theirs = (np.frombuffer(digest(content, one), np.uint8) for one in (how, other))
    assert not np.array_equal(ours[:8], theirs[:8])
    assert not np.array_equal(ours[8:], theirs[8:])


def test_keys_of_two_kinds_differ_and_are_not_shown() -> None:
    assert BLAKE3.key != FOLD.key
    assert repr(BLAKE3) == "BlockHash(kind='blake3')"


@given(st.integers(0, 70), st.integers(1, 1000))
def test_folded_digests_do_not_tell_the_multipliers(position: int, word: int) -> None:
    """Of contents with one word, sums without a pseudo-random end are multiples of one number."""
    factors = _fold.multipliers(FOLD.key, CPU)[:, position].numpy().view(np.uint64)
    content = bytes(4 * position) + word.to_bytes(4, "little")
    halves = np.frombuffer(digest(content, FOLD), dtype=np.uint64)
    with np.errstate(over="ignore"):
        assert not (halves == factors * np.uint64(word)).any()


@given(st.binary(min_size=512, max_size=512), st.data())
def test_other_bytes_with_the_digest_of_xxh3_have_another_in_keyed_hashes(
    content: bytes, data: st.DataObject
) -> None:
    words = st.integers(0, MASK)
    forged = second_preimage(content, data.draw(words), data.draw(words))
    assert digest(forged, XXH3) == digest(content, XXH3)
    for how in (BLAKE3, FOLD):
        assert (digest(forged, how) == digest(content, how)) is (forged == content)


#: Must be told before Triton is imported, so that this is a process of its own.
INTERPRETED = """
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from rl_core.weights.gpu import fold as _fold, fold_triton as _fold_triton

key, cpu, launched_on = bytes(range(32)), torch.device("cpu"), []
_fold_triton._CUDA = SimpleNamespace(
    device_of=lambda factors: launched_on.append(factors.device) or nullcontext()
)
cases = {64: [0, 1, 2, 3, 4, 64, 130] * 3, 16_000: [5, 8192, 8193, 16_003], _fold.BLOCK: [9000]}
for block, sizes in cases.items():
    runs = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    slow = _fold.prepare(runs, key, block)
    _fold._fused = lambda runs, key, block: _fold_triton.prepare(
        runs, _fold.multipliers(key, cpu), block
    )
    fast = _fold.prepare(runs, key, block)
    _fold._fused = lambda *_: None
    assert fast()() == slow()()
    runs[-1][-1] ^= 1
    assert fast()() == slow()()
assert launched_on and set(launched_on) == {cpu}  # the tensors', whatever the current one is
print("as torch does")
"""


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="Triton is not installed; torch for GPUs brings it",
)
def test_the_kernel_for_gpus_folds_as_torch_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", INTERPRETED]
    output = subprocess.check_output(command, env=environment, text=True, timeout=280)
    assert output.endswith("as torch does\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_folds_as_the_cpu_does() -> None:
    sizes = [1, 3, 64, 4099, 200_000, FOLD.block - 1, FOLD.block, 5 * FOLD.block + 77]
    runs = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    there = Hasher([run.cuda() for run in runs], FOLD).digests()
    assert there == Hasher(runs, FOLD).digests()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_folding_on_a_gpu_needs_little_memory_besides() -> None:
    run = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    Hasher([run], FOLD).digests()
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20


def test_a_kernel_that_does_not_compile_is_told_and_done_without(monkeypatch):
    def prepare(*_: object) -> None:
        raise RuntimeError("no C compiler was found")

    broken = SimpleNamespace(prepare=prepare)
    monkeypatch.setattr("rl_core.weights.gpu.fold_triton", broken, raising=False)
    monkeypatch.setitem(sys.modules, "rl_core.weights.gpu.fold_triton", broken)
    _fold._kernel.cache_clear()
    with pytest.warns(RuntimeWarning, match="install a C compiler"):
        assert _fold._kernel(CPU) is None
    assert _fold._kernel(CPU) is None  # and is told once
    _fold._kernel.cache_clear()
