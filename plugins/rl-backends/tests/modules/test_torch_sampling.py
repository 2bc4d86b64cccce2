"""Next tokens: the declared distribution, from streams that know nothing of each other."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_backends import SamplingParams
from rl_backends.torch.sampling import NUCLEUS_CANDIDATES, Sampler, uniforms


def reference(
    logits: list[float], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """The declared distribution, token by token in double precision."""
    probabilities = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1)
    ranked = sorted(range(len(logits)), key=lambda token: -float(probabilities[token]))
    if top_k:
        ranked = ranked[:top_k]
    total = sum(float(probabilities[token]) for token in ranked)
    kept, mass = [], 0.0
    for token in ranked:
        if mass >= top_p * total:
            break
        kept.append(token)
        mass += float(probabilities[token])
    result = torch.zeros(len(logits), dtype=torch.float64)
    result[kept] = probabilities[kept]
    return result / result.sum()


def draw(params: SamplingParams, logits: list[float], rows: int) -> tuple[torch.Tensor, ...]:
    seeds = torch.randint(0, 2**62, (rows,), generator=torch.Generator().manual_seed(5))
    table = torch.tensor(logits).expand(rows, -1)
    return Sampler(params)(table, seeds, torch.zeros(rows, dtype=torch.int64))


LOGITS = torch.randn(24, generator=torch.Generator().manual_seed(0)).mul(1.5).tolist()


def test_raw_logprobs_are_of_the_models_own_distribution():
    params = SamplingParams(temperature=0.5, top_k=4, logprobs_mode="raw")
    tokens, logprobs = draw(params, LOGITS, 50)
    torch.testing.assert_close(logprobs, torch.tensor(LOGITS).log_softmax(-1)[tokens])


def test_greedy_takes_the_argmax_with_its_raw_logprob():
    tokens, logprobs = draw(SamplingParams(greedy=True, temperature=0.1, top_k=1), LOGITS, 3)
    best = int(torch.tensor(LOGITS).argmax())
    assert tokens.tolist() == [best] * 3
    torch.testing.assert_close(logprobs, torch.tensor(LOGITS).log_softmax(-1)[best].expand(3))


def test_top_p_beyond_the_first_candidates_sorts_the_whole_vocabulary():
    vocabulary = 4 * NUCLEUS_CANDIDATES
    tokens, logprobs = draw(SamplingParams(top_p=0.9), [0.0] * vocabulary, 4000)
    assert len(tokens.unique()) > NUCLEUS_CANDIDATES
    torch.testing.assert_close(
        logprobs.exp() * 0.9 * vocabulary, torch.ones(4000), rtol=2e-3, atol=0
    )


def test_top_p_within_the_first_candidates_is_exact():
    logits = [5.0, 4.0, 3.0] + [-9.0] * (4 * NUCLEUS_CANDIDATES)
    tokens, logprobs = draw(SamplingParams(top_p=0.95), logits, 500)
    expected = reference(logits, top_p=0.95)
    torch.testing.assert_close(logprobs.double(), expected.log()[tokens], atol=1e-5, rtol=0)


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])
    seen = torch.tensor([[True, True, False, False]])
    sampler = Sampler(SamplingParams(repetition_penalty=4.0))
    one = torch.ones(1, dtype=torch.int64)
    token, logprob = sampler(logits, one, one, seen)
    expected = torch.tensor([0.5, -8.0, 1.0, 0.5]).log_softmax(-1)
    torch.testing.assert_close(logprob, expected[token])


def splitmix64(state: int) -> int:
    """The published generator's output function in Python's own integers."""
    mask = 2**64 - 1
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


@given(st.integers(0, 2**62), st.integers(0, 2**20))
def test_uniforms_are_splitmix64_in_tensor_arithmetic(seed: int, count: int):
    state = (splitmix64(seed) + (count + 1) * 0x9E3779B97F4A7C15) % 2**64
    expected = (splitmix64(state) >> 40) / 2**24
    assert float(uniforms(torch.tensor([seed]), torch.tensor([count]))) == expected


def test_half_precision_logits_are_scored_in_single_precision():
    logits = torch.tensor([LOGITS], dtype=torch.bfloat16)
    one = torch.ones(1, dtype=torch.int64)
    token, logprob = Sampler(SamplingParams(greedy=True))(logits, one, one)
    assert logprob.dtype == torch.float32
    torch.testing.assert_close(logprob, logits[0].float().log_softmax(-1)[token])
