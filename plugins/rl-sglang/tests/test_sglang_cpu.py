"""What stands in for packages that SGLang has for CUDA alone, and the sampler by itself."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
import torch

from rl_sglang.cpu import murmur_hash32

#: MurmurHash3_x86_32 of 16 bytes with seed 0, from the standard's own description, word by word.
_WORD = 0xFFFFFFFF


def murmur_of_words(words: list[int]) -> int:
    """The hash of some 32-bit words, with Python's integers."""
    state = 0
    for word in words:
        mixed = word * 0xCC9E2D51 & _WORD
        mixed = (mixed << 15 | mixed >> 17) & _WORD
        state ^= mixed * 0x1B873593 & _WORD
        state = (state << 13 | state >> 19) & _WORD
        state = (state * 5 + 0xE6546B64) & _WORD
    state ^= 4 * len(words)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        state = (state ^ state >> shift) * factor & _WORD
    return state


def test_the_hash_is_murmur3_of_seed_position_and_token():
    generator = torch.Generator().manual_seed(0)
    seeds = torch.cat([torch.randint(0, 2**62, (50,), generator=generator), torch.tensor([0, -1])])
    positions = torch.randint(0, 2**31, (52,), generator=generator)
    tokens = torch.tensor([0, 1, 2, 1000, 151_935])
    found = murmur_hash32(seeds, positions, tokens)
    assert found.dtype is torch.uint32
    for row, (seed, position) in enumerate(zip(seeds.tolist(), positions.tolist(), strict=True)):
        words = [seed & _WORD, seed >> 32 & _WORD, position]
        assert found[row].tolist() == [murmur_of_words([*words, t]) for t in tokens.tolist()]


def run(code: str, **variables: str) -> str:
    """What a process prints that has SGLang on a CPU."""
    environment = {**os.environ, "SGLANG_USE_CPU_ENGINE": "1", **variables}
    begin = "import warnings; warnings.simplefilter('ignore'); from rl_sglang.cpu import stand_in\n"
    program = begin + "stand_in()\n" + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.engine
def test_the_hash_is_that_of_sglangs_own_kernel():
    said = run(
        """
        import torch
        from sglang.kernels.ops.sampling import murmur_hash
        from rl_sglang.cpu import murmur_hash32
        seeds = torch.tensor([0, 1, 2**40 + 3, 2**62 - 1])
        positions, tokens = torch.tensor([0, 7, 100, 4095]), torch.arange(300)
        theirs = torch.empty(4, 300, dtype=torch.uint32)
        murmur_hash.murmur_hash32_kernel[(4, 1)](
            seeds.to(torch.uint64), positions, tokens, theirs, 4, 300, BLOCK_SIZE=512)
        print(torch.equal(theirs, murmur_hash32(seeds, positions, tokens)))
        """,
        TRITON_INTERPRET="1",
    )
    assert said.split()[-1] == "True"


@pytest.mark.engine
def test_what_stands_in_says_so_when_it_is_called():
    said = run(
        """
        import sgl_kernel, torchvision.transforms
        from sglang.srt.models.registry import ModelRegistry
        for absent in (sgl_kernel.rmsnorm, torchvision.transforms.Compose):
            try:
                absent(1)
            except NotImplementedError as error:
                print(error)
        import transformers
        from transformers.utils import is_torchvision_available
        print(is_torchvision_available(), len(ModelRegistry.get_supported_archs()) > 100)
        """
    )
    assert "sgl_kernel.rmsnorm has no build for CPUs" in said
    assert "torchvision.transforms.Compose has no build for CPUs" in said
    assert said.split()[-2:] == ["False", "True"]


@pytest.mark.engine
def test_rows_are_drawn_from_what_the_contract_says():
    """Frequencies and log-probs of the sampler alone, with tokens that tie and one candidate."""
    said = run(
        """
        import torch
        from types import SimpleNamespace
        from rl_sglang import sampler
        sampler.Sampler.__init__ = torch.nn.Module.__init__
        sampler.Sampler._sync_token_ids_across_tp = lambda self, tokens, info: None
        logits = torch.tensor([2.0, 1.0, 1.0, 0.0, -1.0, -torch.inf])
        rows = 20_000
        def draw(temperature=1.0, top_k=1 << 30, top_p=1.0, greedy=False, raw=False):
            seeds = torch.full((rows,), -1) if greedy else torch.arange(rows)
            info = SimpleNamespace(
                sampling_seed=seeds, temperatures=torch.full((rows, 1), temperature),
                top_ks=torch.full((rows,), top_k), top_ps=torch.full((rows,), top_p),
                is_all_greedy=greedy or top_k == 1, need_top_k_sampling=top_k < 1 << 30,
                need_top_p_sampling=top_p < 1)
            output = SimpleNamespace(next_token_logits=logits.repeat(rows, 1))
            tokens = sampler.RowSampler(raw=raw)(output, info, True, [], [], torch.zeros(rows))
            return tokens, output.next_token_logprobs
        def expected(scores, kept):
            masked = torch.full_like(scores, -torch.inf)
            masked[kept] = scores[kept]
            return masked.log_softmax(-1)
        everything = [0, 1, 2, 3, 4]
        for how, scores, kept in (
            ({}, logits, everything),
            ({"temperature": 0.5}, logits / 0.5, everything),
            ({"top_k": 2}, logits, [0, 1]),
            ({"top_p": 0.7}, logits, [0, 1]),
            ({"top_k": 3, "top_p": 0.75}, logits, [0, 1]),
            ({"top_k": 1}, logits, [0]),
            ({"temperature": 2.0, "top_k": 4}, logits / 2, [0, 1, 2, 3]),
        ):
            wanted = expected(scores, kept)
            tokens, found = draw(**how)
            assert torch.allclose(found, wanted[tokens], atol=1e-5), how
            share = torch.bincount(tokens, minlength=6) / rows
            assert (share - wanted.exp()).abs().max() < 0.015, (how, share)
            assert torch.equal(draw(**how)[0], tokens)
            assert torch.allclose(draw(**how, raw=True)[1], logits.log_softmax(-1)[tokens])
        tokens, found = draw(temperature=9.0, top_k=1, greedy=True)
        assert tokens.eq(0).all() and torch.allclose(found, logits.log_softmax(-1)[0].expand(rows))
        print("as said")
        """
    )
    assert said.split()[-2:] == ["as", "said"]
