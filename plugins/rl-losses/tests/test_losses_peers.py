"""Against formulas of NeMo RL (7ea279abf), verl (0.9.1) and prime-rl (559b4477), written out here.

What TRL has is compared with its code, in ``test_losses_trl.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import tensor

from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError
from rl_losses import (
    AdvantageEstimator,
    GRPOLossFn,
    gdpo_advantages,
    grpo_advantages,
    high_covariance,
    kl_penalty,
    optimal_token_baseline_advantages,
    pass_at_k_advantages,
    reinforce_plus_plus_advantages,
    whiten,
)
from rl_losses.advantages import ESTIMATORS

T = torch.Tensor
ROWS, WIDTH = 6, 7
MASK = torch.arange(WIDTH) < tensor([6, 3, 1, 4, 5, 2])[:, None]


def make_rows(seed: int) -> SimpleNamespace:
    """Log-probs, and advantages, of answers; without prompts, as the peers have them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> T:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logp = -normal(ROWS, WIDTH).abs() - 0.3
    return SimpleNamespace(
        logp=logp.requires_grad_(),
        old=-(logp.detach() + 0.4 * normal(ROWS, WIDTH)).abs(),
        sampled=-(logp.detach() + 0.4 * normal(ROWS, WIDTH)).abs(),
        adv=normal(ROWS)[:, None].expand(ROWS, WIDTH),
        rewards=normal(ROWS),
        mask=MASK,
    )


def our_loss(rows: SimpleNamespace, options: dict[str, Any], **columns: T) -> tuple[T, Any]:
    def padded(values: T) -> T:
        return torch.nn.functional.pad(values, (1, 0))

    data: BatchedDataDict[Any] = BatchedDataDict(
        token_mask=padded(rows.mask.double()),
        sample_mask=torch.ones(ROWS),
        advantages=padded(rows.adv),
        prev_logprobs=padded(rows.old),
        generation_logprobs=padded(rows.sampled),
        **{name: padded(values) for name, values in columns.items()},
    )
    loss_fn = GRPOLossFn(**{"reference_policy_kl_penalty": 0.0} | options)
    counts = {"global_valid_seqs": tensor(ROWS), "global_valid_toks": rows.mask.sum()}
    return loss_fn(padded(rows.logp), data, **counts)


def token_mean(costs: T) -> T:
    return costs[MASK].mean()


def verl_dppo(r: SimpleNamespace, kept: Callable[[T, T], tuple[T, T]]) -> T:
    gain, loss = kept(r.logp.detach().exp(), r.old.exp())
    weight = (r.logp - r.old).detach().exp().clamp(max=1.4)
    return token_mean(-r.adv * weight * r.logp * torch.where(r.adv > 0, gain, loss))


def verl_binary_kl(p: T, q: T) -> tuple[T, T]:
    kl = q * (q / p).log() + (1 - q) * ((1 - q + 1e-8) / (1 - p + 1e-8)).log()
    return (kl <= 0.02) | (p <= q), (kl <= 0.03) | (p >= q)


def prime_default(r: SimpleNamespace) -> T:
    log_ratio = r.logp - r.sampled
    moved = (r.logp.exp() - r.sampled.exp()).detach()
    dropped = torch.where(r.adv > 0, moved > 0.08, moved < -0.05)
    return token_mean(-(~dropped * r.adv * log_ratio.exp()) + 1e-2 * log_ratio**2)


def verl_kl_cov(r: SimpleNamespace, chosen: T) -> T:
    log_ratio = r.logp - r.old
    return token_mean(-r.adv * log_ratio.exp() + torch.where(chosen, 0.7 * log_ratio.abs(), 0.0))


def nemo_reinforce(r: SimpleNamespace) -> T:
    return token_mean(-r.adv * r.logp * (r.old - r.sampled).exp().clamp(0.5, 1.5))


def verl_bypass_reinforce(r: SimpleNamespace) -> T:
    weight = (r.logp.detach() - r.sampled).exp().clamp(max=1.3)
    return token_mean(-r.adv * r.logp * weight)


DPPO = {"ratio_clip_c": 1.4}
GENERATED = {"ratio_denominator": "generation_logprobs"}
LOSSES: dict[str, tuple[Callable[[SimpleNamespace], T], dict[str, Any]]] = {
    "verl dppo_tv": (
        lambda r: verl_dppo(r, lambda p, q: (p - q <= 0.06, p - q >= -0.04)),
        DPPO | {"surrogate": "dppo", "ratio_clip_min": 0.04, "ratio_clip_max": 0.06},
    ),
    "verl dppo_kl": (
        lambda r: verl_dppo(r, verl_binary_kl),
        DPPO | {"surrogate": "dppo_kl", "ratio_clip_min": 0.03, "ratio_clip_max": 0.02},
    ),
    "verl dro": (
        lambda r: token_mean(-(r.logp * r.adv - 0.5 * 0.3 * (r.logp - r.old) ** 2)),
        {"surrogate": "reinforce", "log_ratio_penalty": 0.15},
    ),
    "verl gpg": (lambda r: token_mean(-r.logp * r.adv), {"surrogate": "reinforce"}),
    "verl bypass": (
        verl_bypass_reinforce,
        GENERATED | {"surrogate": "reinforce", "importance_sampling_cap": 1.3},
    ),
    "verl bypass clip": (
        lambda r: token_mean(
            torch.maximum(
                -r.adv * (r.logp - r.sampled).exp(),
                -r.adv * (r.logp - r.sampled).exp().clamp(0.8, 1.2),
            )
        ),
        GENERATED,
    ),
    "nemo disable_ppo_ratio": (
        nemo_reinforce,
        {
            "surrogate": "reinforce",
            "importance_sampling_cap": 1.5,
            "importance_sampling_floor": 0.5,
        },
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_the_peers(name: str, seed: int) -> None:
    rows = make_rows(seed)
    theirs, options = LOSSES[name]
    expected, (loss, _) = theirs(rows), our_loss(rows, options)
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    gradients = [torch.autograd.grad(one, rows.logp)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


GRADIENTS: dict[str, tuple[Callable[[SimpleNamespace], T], dict[str, Any]]] = {
    "prime-rl default": (
        prime_default,
        GENERATED
        | {
            "surrogate": "dppo",
            "ratio_clip_min": 0.05,
            "ratio_clip_max": 0.08,
            "log_ratio_penalty": 1e-2,
        },
    ),
    "nemo force_on_policy_ratio": (
        lambda r: token_mean(-r.adv * (r.logp - r.logp.detach()).exp()),
        {"surrogate": "reinforce", "on_policy": True},
    ),
    "nemo disable_ppo_ratio": (
        lambda r: token_mean(-r.adv * r.logp),
        {"on_policy": True},
    ),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_is_the_peers_where_the_value_is_another(name: str, seed: int) -> None:
    rows = make_rows(seed)
    theirs, options = GRADIENTS[name]
    gradients = [
        torch.autograd.grad(one, rows.logp)[0] for one in (our_loss(rows, options)[0], theirs(rows))
    ]
    torch.testing.assert_close(*gradients, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(
    ("level", "estimator"),
    [
        (level, estimator)
        for level in ("token", "seq_sum", "seq_mean", "seq_max")
        for estimator in ("k1", "k2", "k3")
        if (level, estimator) != ("seq_max", "k1")  # verl has none
    ],
)
def test_rejection_has_the_statistics_of_verl(level: str, estimator: str) -> None:
    rows = make_rows(3)
    log_ratio = (rows.old - rows.sampled) * MASK
    each = {"k1": -log_ratio, "k2": log_ratio**2 / 2, "k3": log_ratio.exp() - 1 - log_ratio}
    values = each[estimator]
    if level != "token":
        sums = values.sum(1)
        over = {"seq_sum": sums, "seq_mean": sums / MASK.sum(1), "seq_max": values.amax(1)}
        values = over[level][:, None].expand_as(values)
    high = 1.001 * values[MASK].median().abs().item()
    kept = values <= high
    bounds = {"rejection_max": high}
    if estimator == "k1":
        # verl's bounds are of engine to trainer, and so the other way round.
        high = math.exp(high)
        kept = (values <= math.log(high)) & (values >= -math.log(1.1))
        bounds = {"rejection_max": 1.1, "rejection_min": 1 / high}
    assert kept[MASK].any()
    assert not kept[MASK].all()
    loss, metrics = our_loss(rows, {"rejection": f"{level}_{estimator}"} | bounds)
    ratio = (rows.logp - rows.old).exp()
    cost = torch.maximum(-rows.adv * ratio, -rows.adv * ratio.clamp(0.8, 1.2))
    torch.testing.assert_close(loss, token_mean(torch.where(kept, cost, 0.0)))
    assert metrics["rejected_fraction"] == pytest.approx((~kept)[MASK].double().mean().item())


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"rejection": "token_k1"}, "rejection_max"),
        ({"rejection_max": 2.0}, "rejection_max"),
        ({"rejection": "token_k2", "rejection_max": 1.0, "rejection_min": 1.0}, "rejection_min"),
        ({"on_policy": True, "log_ratio_penalty": 0.1}, "log_ratio_penalty"),
        (GENERATED | {"importance_sampling_cap": 2.0}, "importance_sampling_cap"),
        ({"surrogate": "vespo", "importance_ratio": "sequence"}, "importance_ratio"),
        ({"surrogate": "reinforce", "ratio_clip_max": 0.3}, "ratio_clip_max"),
        ({"vespo_pos": (1.0, 1.0)}, "vespo_pos"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GRPOLossFn(**options)
    assert caught.value.details["key"] == key


# -- covariance ----------------------------------------------------------------------------------


def batch_of(rows: SimpleNamespace) -> dict[str, T]:
    return {
        "advantages": rows.adv[:, 0],
        "prev_logprobs": rows.old,
        "token_mask": rows.mask,
        "sample_mask": torch.ones(ROWS),
    }


def test_kl_cov_penalises_the_tokens_of_the_greatest_covariance() -> None:
    rows = make_rows(5)
    chosen = high_covariance(batch_of(rows), fraction=0.2)
    adv, logp = rows.adv[MASK], rows.old[MASK]
    covariance = (adv - adv.mean()) * (logp - logp.mean())
    top = torch.zeros_like(covariance, dtype=torch.bool)
    top[covariance.topk(int(0.2 * len(adv))).indices] = True
    assert torch.equal(chosen[MASK], top)
    assert not chosen[~MASK].any()
    options = {"kl_cov_penalty": 0.7, "ratio_clip_min": 1.0, "ratio_clip_max": math.inf}
    loss, _ = our_loss(rows, options, high_covariance=chosen)
    expected = verl_kl_cov(rows, chosen)
    torch.testing.assert_close(loss, expected)
    gradients = [torch.autograd.grad(one, rows.logp)[0] for one in (loss, expected)]
    torch.testing.assert_close(*gradients)


def test_clip_cov_chooses_at_random_between_bounds() -> None:
    rows = make_rows(5)
    adv, logp = rows.adv[MASK], rows.old[MASK]
    covariance = (adv - adv.mean()) * (logp - logp.mean())
    between = (covariance > 0.1) & (covariance < 0.8)
    seen = torch.zeros_like(MASK)
    for seed in range(50):
        generator = torch.Generator().manual_seed(seed)
        how = {"bounds": (0.1, 0.8), "generator": generator}
        chosen = high_covariance(batch_of(rows), fraction=0.1, **how)
        assert chosen.sum() == min(int(0.1 * MASK.sum()), between.sum())
        seen |= chosen
    assert torch.equal(seen[MASK], between)


def test_without_tokens_there_is_no_high_covariance() -> None:
    data = batch_of(make_rows(0)) | {"sample_mask": torch.zeros(ROWS)}
    assert not high_covariance(data).any()
    assert not high_covariance(data, bounds=(0.0, 1.0)).any()


# -- advantages ----------------------------------------------------------------------------------

REWARDS = tensor([1.0, 0.0, 0.5, 3.0, 7.0, 2.0, 0.1, 0.1, 0.9])


def nemo_advantages(rewards: T, size: int) -> T:
    """NeMo RL's default: mean and deviation of the other rows of a group."""
    made = []
    for i, reward in enumerate(rewards.double()):
        start = i // size * size
        others = torch.cat([rewards[start:i], rewards[i + 1 : start + size]]).double()
        deviation = others.std()
        made.append((reward - others.mean()) / (deviation + 1e-6 if deviation > 0 else 1.0))
    return torch.stack(made).float()


def test_deviation_and_mean_of_the_others_are_nemo_rls() -> None:
    how: dict[str, Any] = {"leave_one_out_baseline": True, "std_over": "others"}
    advantages = grpo_advantages(REWARDS, group_size=3, **how)
    torch.testing.assert_close(advantages, nemo_advantages(REWARDS, 3))
    assert advantages[8] == pytest.approx(0.8)  # the others are equal: not divided
    assert grpo_advantages(REWARDS[:4], group_size=2, **how).tolist() == pytest.approx(
        [1.0, -1.0, -2.5, 2.5]
    )


def test_gdpo_with_the_others_is_nemo_rls() -> None:
    other = REWARDS.flip(0).square()
    summed = 0.5 * nemo_advantages(REWARDS, 3) + 2.0 * nemo_advantages(other, 3)
    expected = (summed - summed.mean()) / summed.std()
    rewards = torch.stack([REWARDS, other], dim=1)
    how: dict[str, Any] = {"leave_one_out_baseline": True, "std_over": "others"}
    found = gdpo_advantages(rewards, weights=[0.5, 2.0], group_size=3, **how)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_gdpo_leaves_out_components_of_nan_as_trl_does() -> None:
    nanstd = pytest.importorskip("trl.trainer.utils").nanstd
    rewards = torch.stack([REWARDS, REWARDS.flip(0)], dim=1)
    rewards[1, 0] = rewards[4, 1] = rewards[5, 0] = rewards[5, 1] = math.nan
    grouped = rewards.view(3, 3, 2)
    each = grouped - grouped.nanmean(1, keepdim=True)
    summed = (each / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)).view(9, 2).nansum(1)
    summed[5] = math.nan
    expected = ((summed - summed.nanmean()) / (nanstd(summed) + 1e-4)).nan_to_num(nan=0.0)
    found = gdpo_advantages(rewards, group_size=3, ignore_nan=True, eps=1e-4)
    torch.testing.assert_close(found, expected)


def test_remax_subtracts_the_rewards_of_greedy_answers() -> None:
    greedy = tensor([0.5, 0.25, 1.0])
    how: dict[str, Any] = {"baseline": greedy.repeat_interleave(3), "normalize_std": False}
    torch.testing.assert_close(
        grpo_advantages(REWARDS, group_size=3, **how), REWARDS - greedy.repeat_interleave(3)
    )
    found = grpo_advantages(REWARDS, group_size=1, **how)  # one answer for each prompt will do
    torch.testing.assert_close(found, REWARDS - greedy.repeat_interleave(3))


@pytest.mark.parametrize("coefficient", [0.0, 0.1])
def test_reinforce_plus_plus_is_nemo_rls(coefficient: float) -> None:
    rows = make_rows(6)
    kl = kl_penalty(rows.old, rows.sampled, "k2")
    centred = grpo_advantages(rows.rewards, group_size=3, normalize_std=False)
    tokens = centred[:, None] - coefficient * kl
    mean = (tokens * MASK).sum() / MASK.sum()
    variance = ((tokens - mean) ** 2 * MASK).sum() / MASK.sum()
    expected = (tokens - mean) * variance.clamp(min=1e-8).rsqrt()
    torch.testing.assert_close(whiten(tokens, MASK)[MASK], expected[MASK])
    if not coefficient:
        of_rows = reinforce_plus_plus_advantages(rows.rewards, group_size=3, lengths=MASK.sum(1))
        torch.testing.assert_close(of_rows, expected[:, 0].float())


@pytest.mark.parametrize("zero_tail", [True, False])
@pytest.mark.parametrize("gap", [False, True])
def test_the_optimal_token_baseline_is_verls(zero_tail: bool, gap: bool) -> None:
    rows = make_rows(7)
    sum_pi_squared = rows.sampled.exp()
    mask = MASK.clone()
    if gap:  # the answer of a tool is between two tokens of the model
        mask[0, 2] = False
    found = optimal_token_baseline_advantages(
        rows.rewards,
        token_mask=mask,
        logprobs=rows.old,
        sum_pi_squared=sum_pi_squared,
        importance_weights=rows.old.exp(),
        zero_tail=zero_tail,
        group_size=3,
    )
    expected = torch.zeros(ROWS, WIDTH)
    energies = []
    for row in range(ROWS):
        kept = mask[row]
        energy = 1 - 2 * rows.old[row].exp() + sum_pi_squared[row]
        energies.append((energy * rows.old[row].exp() ** 2)[kept].cumsum(0))
    for row in range(ROWS):
        group = range(row // 3 * 3, row // 3 * 3 + 3)
        columns = mask[row].nonzero()[:, 0].tolist()
        for t, column in enumerate(columns):
            there = [i for i in group if len(energies[i]) > t]
            weights = [energies[i][t] for i in there]
            weighted = [energies[i][t] * rows.rewards[i] for i in there]
            baseline = sum(weighted) / (sum(weights) + 1e-8)
            if zero_tail and len(there) == 1:
                baseline = 0.0
            expected[row, column] = rows.rewards[row] - baseline
    torch.testing.assert_close(found, expected)


def test_advantages_by_name() -> None:
    names = {
        "grpo": grpo_advantages(REWARDS, group_size=3),
        "pass_at_k": pass_at_k_advantages(REWARDS, group_size=3),
    }
    for name, expected in names.items():
        estimator = AdvantageEstimator.from_config({"name": name})
        torch.testing.assert_close(estimator(REWARDS, group_size=3), expected)
    given = {"components": REWARDS[:, None], "lengths": list(range(1, 10)), "group_size": 3}
    for name in ESTIMATORS:
        estimator = AdvantageEstimator.from_config({"name": name, "ignore_nan": True})
        assert estimator(REWARDS, **given).isfinite().all()
    assert AdvantageEstimator.from_config({"normalize_std": False}).name == "grpo"
    with pytest.raises(ConfigError, match="no 'pass_at_n', did you mean 'pass_at_k'"):
        AdvantageEstimator.from_config({"name": "pass_at_n"})
    with pytest.raises(ConfigError, match="unknown key 'normalise_std'"):
        AdvantageEstimator.from_config({"normalise_std": False})
    with pytest.raises(ConfigError, match="'eps' must be"):
        AdvantageEstimator.from_config({"eps": "small"})
