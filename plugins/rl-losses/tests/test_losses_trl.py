"""Against TRL's own code: value and gradient, option by option."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rl_core.batch import BatchedDataDict
from rl_core.interfaces import LossInputType, LossType
from rl_losses import DPOLossFn, GRPOLossFn
from rl_losses.preferences import PREFERENCES, SMOOTHED

trl = pytest.importorskip("trl")
GRPOTrainer = trl.GRPOTrainer

ROWS, WIDTH, VOCABULARY = 6, 5, 7
SEQUENCE = {"loss_type": LossType.SEQUENCE_LEVEL}
BASE = {"reference_policy_kl_penalty": 0.0}


def make_rows(seed: int) -> dict[str, torch.Tensor]:
    """Completions of different lengths; everything but logits is of the tokens that count."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    logits = normal(ROWS, WIDTH, VOCABULARY)
    tokens = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=generator)
    logps = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return {
        "logits": logits,
        "tokens": tokens,
        "mask": (torch.arange(WIDTH) < torch.tensor([5, 3, 1, 4, 5, 2])[:, None]).double(),
        "advantages": normal(ROWS),
        "old": logps + 0.3 * normal(ROWS, WIDTH),
        "sampled": logps + 0.3 * normal(ROWS, WIDTH),
        "reference": logps + 0.4 * normal(ROWS, WIDTH),
    }


def trl_loss(rows: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """Value, and gradient to the logits, of TRL's ``_compute_loss`` over one microbatch."""
    logits = rows["logits"].clone().requires_grad_()
    scores = logits.log_softmax(-1)
    logps = scores.gather(-1, rows["tokens"][..., None])[..., 0]
    entropies = -(scores.exp() * scores).sum(-1)
    args = {
        "use_bias_correction_kl": True,
        "delta": None,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
        "steps_per_generation": 1,
    }
    trainer = {
        "loss_type": "dapo",
        "beta": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
        "top_entropy_quantile": 1.0,
        "entropy_coef": 0.0,
        "max_completion_length": 11,
    }
    args |= {name: options[name] for name in options if name in args}
    trainer |= {name: options[name] for name in options if name in trainer}
    ratio = options.get("is_ratio")
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda x: x,
        reduce=lambda x, **_: x,
        pad_across_processes=lambda x, **_: x,
        sync_gradients=False,
    )
    me = SimpleNamespace(
        **trainer,
        args=SimpleNamespace(**args),
        aux_loss_enabled=False,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=True,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        accelerator=accelerator,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=trainer["entropy_coef"] > 0,
        _metrics=defaultdict(lambda: defaultdict(list)),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropies, None),
    )
    me.get_high_entropy_mask = lambda *a: GRPOTrainer.get_high_entropy_mask(me, *a)
    mask = rows["mask"]
    loss = GRPOTrainer._compute_loss(
        me,
        None,
        {
            "prompt_ids": rows["tokens"][:, :1],
            "prompt_mask": mask[:, :1],
            "completion_ids": rows["tokens"],
            "completion_mask": mask,
            "advantages": rows["advantages"],
            "old_per_token_logps": rows["old"],
            "sampling_per_token_logps": rows["sampled"],
            "ref_per_token_logps": rows["reference"],
            "num_items_in_batch": mask.sum(),
            "importance_sampling_ratio": None if ratio is None else ratio(rows),
        },
    )
    return loss, torch.autograd.grad(loss, logits)[0]


def our_loss(rows: dict[str, torch.Tensor], options: dict[str, Any]) -> Any:
    """The same of a :class:`GRPOLossFn`, whose rows have a prompt of one token."""
    loss_fn = GRPOLossFn(**BASE | options)
    logits = rows["logits"].clone().requires_grad_()

    def padded(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values, (1, 0))

    logps = logits.log_softmax(-1).gather(-1, rows["tokens"][..., None])[..., 0]
    data: BatchedDataDict[Any] = BatchedDataDict(
        input_ids=padded(rows["tokens"]),
        token_mask=padded(rows["mask"]),
        sample_mask=torch.ones(ROWS),
        advantages=rows["advantages"],
        prev_logprobs=padded(rows["old"]),
        generation_logprobs=padded(rows["sampled"]),
        reference_policy_logprobs=padded(rows["reference"]),
    )
    inputs = padded(logps)
    if loss_fn.input_type is LossInputType.LOGIT:
        inputs = torch.nn.functional.pad(logits, (0, 0, 0, 1))
    loss, _ = loss_fn(
        inputs,
        data,
        global_valid_seqs=torch.tensor(ROWS),
        global_valid_toks=rows["mask"].sum(),
    )
    return loss, torch.autograd.grad(loss, logits)[0]


def is_ratio(level: str, outside: str, low: float, high: float) -> Any:
    """TRL's four ``vllm_importance_sampling_mode``, of which it has no function to call."""

    def compute(rows: dict[str, torch.Tensor]) -> torch.Tensor:
        difference = (rows["old"] - rows["sampled"]) * rows["mask"]
        if level == "sequence":
            difference = difference.sum(-1, keepdim=True)
        ratio = difference.exp()
        if outside == "truncate":
            return ratio.clamp(low, high)
        return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)

    return compute


KL = {"reference_policy_kl_penalty": 0.04}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {}),
    "dapo-higher": ({"epsilon_high": 0.28}, {"ratio_clip_max": 0.28}),
    "grpo": ({"loss_type": "grpo"}, SEQUENCE),
    "bnpo": ({"loss_type": "bnpo"}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, SEQUENCE | {"length_norm": 11}),
    "luspo": (
        {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        SEQUENCE | {"length_norm": 1, "importance_ratio": "sequence"},
    ),
    "gspo": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        SEQUENCE | {"importance_ratio": "sequence"},
    ),
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.3},
        {"surrogate": "cispo", "ratio_clip_min": 1, "ratio_clip_max": 0.3},
    ),
    "sapo": ({"loss_type": "sapo"}, SEQUENCE | {"surrogate": "sapo"}),
    "sapo-temperatures": (
        {"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
        SEQUENCE | {"surrogate": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0},
    ),
    "vespo": ({"loss_type": "vespo"}, {"surrogate": "vespo"}),
    "vespo-options": (
        {
            "loss_type": "vespo",
            "vespo_k_pos": 1.0,
            "vespo_lambda_pos": 0.5,
            "vespo_k_neg": 1.5,
            "vespo_lambda_neg": 0.7,
        },
        {"surrogate": "vespo", "vespo_pos": (1.0, 0.5), "vespo_neg": (1.5, 0.7)},
    ),
    **{
        f"vespo-{outside}": (
            {"loss_type": "vespo", "is_ratio": is_ratio("token", outside, 0.8, 1.2)},
            {
                "surrogate": "vespo",
                "importance_sampling_cap": 1.2,
                "importance_sampling_floor": 0.8,
                "importance_sampling_outside": outside,
            },
        )
        for outside in ("truncate", "mask")
    },
    "delta": ({"delta": 1.4}, {"ratio_clip_c": 1.4}),
    "kl": ({"beta": 0.04}, KL | {"kl_gradient": "ratio"}),
    "kl-of-the-estimate": ({"beta": 0.04, "use_bias_correction_kl": False}, KL),
    "kl-of-sequences": (
        {"beta": 0.04, "loss_type": "grpo", "importance_sampling_level": "sequence"},
        KL | SEQUENCE | {"kl_gradient": "ratio", "importance_ratio": "sequence"},
    ),
    "off-policy": ({"off_policy_mask_threshold": 0.05}, {"off_policy_mask_threshold": 0.05}),
    "entropy-bonus": ({"entropy_coef": 0.1}, {"entropy_bonus": 0.1}),
    **{
        f"{level}-{outside}": (
            {"is_ratio": is_ratio(level, outside, 0.8, 1.2)},
            {
                "importance_sampling_cap": 1.2,
                "importance_sampling_floor": 0.8,
                "importance_sampling_outside": outside,
                "importance_sampling_weight": level,
            },
        )
        for level in ("token", "sequence")
        for outside in ("truncate", "mask")
    },
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("theirs", "ours"), CASES.values(), ids=CASES)
def test_value_and_gradient_are_trls(theirs: Any, ours: Any, seed: int) -> None:
    rows = make_rows(seed)
    value, gradient = trl_loss(rows, theirs)
    loss, own = our_loss(rows, ours)
    torch.testing.assert_close(loss, value, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(own, gradient, atol=1e-9, rtol=1e-9)


def test_the_top_entropy_mask_is_trls_at_its_threshold() -> None:
    rows = make_rows(5)
    scores = rows["logits"].log_softmax(-1)
    entropies = -(scores.exp() * scores).sum(-1)[rows["mask"].bool()]
    threshold = torch.quantile(entropies.float(), 0.4).item()
    value, gradient = trl_loss(rows, {"top_entropy_quantile": 0.6, "entropy_coef": 0.0})
    loss, own = our_loss(rows, {"entropy_min": threshold})
    torch.testing.assert_close(loss, value)
    torch.testing.assert_close(own, gradient)


def trl_dpo(
    rows: dict[str, torch.Tensor],
    name: str,
    beta: float,
    smoothing: float,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
) -> Any:
    """Value, and gradient to the logits, of TRL's DPO; the first half of the rows is chosen."""
    logits = rows["logits"].clone().requires_grad_()
    scores = logits.log_softmax(-1)
    logps = scores.gather(-1, rows["tokens"][..., None])[..., 0]
    mask = torch.nn.functional.pad(rows["mask"], (1, 0))
    output = SimpleNamespace(
        log_probs=logps * rows["mask"],
        entropy=rows["old"],
        mean_logits=rows["old"],
        is_top1=rows["mask"].bool(),
        log_sum_sq_probs=scores.exp().square().sum(-1).log(),
    )
    reference = rows["reference"] * rows["mask"]
    if ld_alpha is not None:
        shorter = rows["mask"].sum(-1).view(2, -1).amin(0).repeat(2)[:, None]
        beyond = torch.arange(WIDTH) >= shorter
        reference = torch.where(beyond, ld_alpha * reference, reference)
    reference = reference.sum(-1)
    me = SimpleNamespace(
        model=SimpleNamespace(training=False),
        accelerator=SimpleNamespace(
            device=torch.device("cpu"), gather=lambda x: x, gather_for_metrics=lambda x: x
        ),
        aux_loss_enabled=False,
        ld_alpha=ld_alpha,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[name],
        loss_weights=[1.0],
        beta=beta,
        label_smoothing=smoothing,
        args=SimpleNamespace(discopop_tau=0.05),
        use_weighting=use_weighting,
        _total_train_tokens=0,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    loss = trl.DPOTrainer._compute_loss(
        me,
        lambda **_: output,
        {
            "input_ids": torch.nn.functional.pad(rows["tokens"], (1, 0)),
            "completion_mask": mask.long(),
            "ref_chosen_logps": reference[: ROWS // 2],
            "ref_rejected_logps": reference[ROWS // 2 :],
        },
        False,
    )
    return loss, torch.autograd.grad(loss, logits)[0]


DPO_CASES: list[tuple[str, float, str, dict[str, Any], dict[str, Any]]] = [
    *(
        (name, 0.2 if name in SMOOTHED else 0.0, name, {}, {})
        for name in PREFERENCES
        if name not in ("sigmoid", "ipo")
    ),
    ("sigmoid", 0.0, "sigmoid", {}, {}),
    ("ipo", 0.0, "ipo", {"preference_average_log_probs": True}, {}),
    ("sigmoid_norm", 0.0, "sigmoid", {"preference_average_log_probs": True}, {}),
    ("sigmoid", 0.0, "sigmoid", {"length_desensitization": 0.3}, {"ld_alpha": 0.3}),
    ("sigmoid", 0.0, "sigmoid", {"weighted": True}, {"use_weighting": True}),
]


@pytest.mark.parametrize(("theirs", "smoothing", "ours", "options", "more"), DPO_CASES)
def test_preferences_are_trls(
    theirs: str, smoothing: float, ours: Any, options: dict[str, Any], more: dict[str, Any]
) -> None:
    rows = make_rows(7)
    value, gradient = trl_dpo(rows, theirs, 0.3, smoothing, **more)
    pairs = torch.arange(ROWS).reshape(2, -1).T.flatten()  # TRL has the chosen rows first
    loss_fn = DPOLossFn(beta=0.3, preference_loss=ours, label_smoothing=smoothing, **options)
    logits = rows["logits"].clone().requires_grad_()
    logps = logits.log_softmax(-1).gather(-1, rows["tokens"][..., None])[..., 0]

    def padded(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values[pairs], (1, 0))

    whole = torch.nn.functional.pad(logits[pairs], (0, 0, 0, 1))
    loss, _ = loss_fn(
        whole if loss_fn.input_type is LossInputType.LOGIT else padded(logps),
        BatchedDataDict(
            input_ids=padded(rows["tokens"]),
            token_mask=padded(rows["mask"]),
            sample_mask=torch.ones(ROWS),
            reference_policy_logprobs=padded(rows["reference"]),
        ),
        global_valid_seqs=torch.tensor(ROWS),
        global_valid_toks=rows["mask"].sum(),
    )
    torch.testing.assert_close(loss, value)
    torch.testing.assert_close(torch.autograd.grad(loss, logits)[0], gradient)
