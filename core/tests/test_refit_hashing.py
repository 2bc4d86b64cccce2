"""Digests: which errors they see, and that nothing but the bytes decides them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_core.refit import hashing
from rl_core.refit.hashing import (
    BLOCK,
    block_digests,
    hash_views,
    kind_for,
    run_digests,
    tensor_digest,
    views_of,
)

KINDS = pytest.mark.parametrize("kind", ["xxh3", "fold"])
CONTENTS = st.binary(min_size=1, max_size=300)
MASK = (1 << 64) - 1


def tensor(content: bytes) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def digest(content: bytes, kind: str) -> bytes:
    return tensor_digest(block_digests(tensor(content), kind))


def folded(content: bytes, block: int, chunk: int) -> list[bytes]:
    return hashing._folded([tensor(content)], block, chunk)[0]


def split_mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def folded_by_hand(content: bytes) -> bytes:
    words = np.frombuffer(content + bytes(-len(content) % 4), dtype="<i4").tolist()
    lanes = []
    for seed in hashing._SEEDS.ravel().tolist():
        total = len(content) * (split_mix(seed) | 1)
        for position, word in enumerate(words, 1):
            total += word * (split_mix((seed + position * 0x9E3779B97F4A7C15) & MASK) | 1)
        lanes.append(split_mix(total & MASK).to_bytes(8, "little"))
    return b"".join(lanes)


@given(CONTENTS)
def test_the_folded_digest_is_its_formula(content: bytes) -> None:
    assert block_digests(tensor(content), "fold") == [folded_by_hand(content)]


@KINDS
@given(content=CONTENTS, data=st.data())
def test_every_flipped_bit_changes_the_digest(
    kind: str, content: bytes, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    changed = bytearray(content)
    changed[bit // 8] ^= 1 << bit % 8
    assert digest(bytes(changed), kind) != digest(content, kind)


@KINDS
@pytest.mark.parametrize("width", [2, 4, 8])
@given(content=st.binary(min_size=64, max_size=256), data=st.data())
def test_flipped_signs_of_two_numbers_change_the_digest(
    kind: str, width: int, content: bytes, data: st.DataObject
) -> None:
    last = len(content) // width - 1
    first, second = data.draw(st.lists(st.integers(0, last), min_size=2, max_size=2, unique=True))
    changed = bytearray(content)
    for place in (first, second):
        changed[place * width + width - 1] ^= 0x80
    assert digest(bytes(changed), kind) != digest(content, kind)


@KINDS
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@given(content=st.binary(min_size=64, max_size=256), data=st.data())
def test_swapped_numbers_change_the_digest(
    kind: str, width: int, content: bytes, data: st.DataObject
) -> None:
    numbers = [content[at : at + width] for at in range(0, len(content), width)]
    places = st.integers(0, len(content) // width - 1)
    first, second = data.draw(places), data.draw(places)
    swapped = numbers.copy()
    swapped[first], swapped[second] = numbers[second], numbers[first]
    same = swapped == numbers
    assert (digest(b"".join(swapped), kind) == digest(content, kind)) is same


@KINDS
@given(content=CONTENTS, data=st.data())
def test_a_shorter_content_has_another_digest(
    kind: str, content: bytes, data: st.DataObject
) -> None:
    kept = data.draw(st.integers(1, len(content)))
    assert (digest(content[:kept], kind) == digest(content, kind)) is (kept == len(content))


@KINDS
@given(content=CONTENTS, zeros=st.integers(1, 200))
def test_zeros_at_the_end_change_the_digest(kind: str, content: bytes, zeros: int) -> None:
    assert digest(content + bytes(zeros), kind) != digest(content, kind)


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
    together = hashing._folded([tensor(content) for content in contents], 64, chunk)
    assert together == [folded(content, 64, 1 << 20) for content in contents]


@KINDS
@given(content=CONTENTS, offset=st.integers(0, 9))
def test_a_digest_does_not_depend_on_alignment(kind: str, content: bytes, offset: int) -> None:
    whole = torch.full((len(content) + 16,), 0xA5, dtype=torch.uint8)
    view = whole[offset : offset + len(content)]
    view.copy_(tensor(content))
    assert block_digests(view, kind) == block_digests(tensor(content), kind)


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("extra", [0, 1, 70_001])
def test_runs_of_several_blocks_fold_as_their_blocks_do(offset: int, extra: int) -> None:
    generator = torch.Generator().manual_seed(extra)
    whole = torch.randint(0, 256, (3 * BLOCK + extra + 8,), dtype=torch.uint8, generator=generator)
    run = whole[offset : offset + 3 * BLOCK + extra]
    each = [block_digests(part.clone(), "fold")[0] for part in run.split(BLOCK)]  # type: ignore[no-untyped-call]
    assert block_digests(run, "fold") == each
    assert len(set(each)) == len(each)


@KINDS
def test_a_hundred_thousand_contents_have_as_many_digests(kind: str) -> None:
    rng = np.random.default_rng(7)
    sparse = rng.integers(0, 4, (50_000, 64), dtype=np.uint8) << rng.integers(0, 7, (50_000, 1))
    dense = rng.integers(0, 256, (50_000, 64), dtype=np.uint8)
    contents = np.unique(np.concatenate([sparse.astype(np.uint8), dense]), axis=0)
    runs = list(torch.from_numpy(contents))
    found = {blocks[0] for blocks in run_digests(runs, kind)}
    assert len(found) == len(runs) > 99_000
    assert len({one[:8] for one in found}) == len({one[8:] for one in found}) == len(runs)


def test_half_of_the_digest_changes_with_one_bit() -> None:
    start = torch.arange(128, dtype=torch.uint8)
    flipped = start.repeat(1024, 1)
    for bit in range(1024):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    runs = [start, *flipped]
    digests = np.array([list(one) for (one,) in run_digests(runs, "fold")], dtype=np.uint8)
    changes = np.unpackbits(digests[1:] ^ digests[0], axis=1)
    assert abs(changes.mean() - 0.5) < 0.01
    assert abs(changes.mean(axis=0) - 0.5).max() < 0.1
    assert abs(changes.mean(axis=1) - 0.5).max() < 0.25


@settings(max_examples=20)
@given(st.integers(0, 2 * BLOCK + 1))
def test_prepared_views_hash_as_the_tensor_does(size: int) -> None:
    run = torch.arange(size, dtype=torch.int64).to(torch.uint8)
    views = views_of(run.numpy().data)
    assert sum(map(len, views)) == size
    assert hash_views(views) == block_digests(run)


def test_the_cpu_hash_is_xxh3_of_the_bytes() -> None:
    assert block_digests(tensor(b"weights")) == [xxhash.xxh3_128_digest(b"weights")]


@KINDS
def test_an_empty_run_has_no_block(kind: str) -> None:
    empty = torch.empty(0, dtype=torch.uint8)
    assert run_digests([empty, tensor(b"a"), empty], kind) == [
        [],
        block_digests(tensor(b"a"), kind),
        [],
    ]
    assert tensor_digest([]) == xxhash.xxh3_128_digest(b"")


def test_no_runs_have_no_digests() -> None:
    assert run_digests([]) == []


def test_the_device_chooses_the_hash() -> None:
    assert [kind_for(torch.device(name)) for name in ("cpu", "cuda:1")] == ["xxh3", "fold"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_folds_as_the_cpu_does() -> None:
    sizes = [1, 3, 64, 4099, 200_000, BLOCK - 1, BLOCK, 5 * BLOCK + 77]
    runs = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    there = run_digests([run.cuda() for run in runs])
    assert there == run_digests(runs, "fold")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_folding_on_a_gpu_needs_little_memory_besides() -> None:
    run = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    block_digests(run)
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
