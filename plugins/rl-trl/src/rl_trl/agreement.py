"""How far the engine's log-probs are from those of the trainer's model, row by row."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object
from torch.nn.utils.rnn import pad_sequence

from rl_core.errors import RLError

if TYPE_CHECKING:
    from rl_backends import SamplingParams

__all__ = ["DisagreementError", "check_agreement", "score_tokens", "trainer_logprobs"]


class DisagreementError(RLError):
    """The engine's log-probs are not those of the trainer's model.

    ``details`` has ``step``, ``row`` (over all processes), ``difference`` (the mean over that row's
    tokens, in nats), ``ratio`` (the mean of ``exp(|difference|)`` over all tokens) and
    ``weights_version``.
    """


def check_agreement(
    trainer: Any, output: dict[str, list[Any]], sampling: SamplingParams, threshold: float
) -> None:
    """Logs how far the log-probs of all processes are apart, with the trainer's other metrics.

    Args:
        trainer: A ``trl.GRPOTrainer``.
        output: What its rollout returns.
        sampling: How the engine sampled.
        threshold: See :func:`rl_trl.rollout`.

    Raises:
        DisagreementError: They are further apart than that, in all processes alike.
    """
    scores = trainer_logprobs(trainer, output["prompt_ids"], output["completion_ids"], sampling)
    pairs = zip(scores, output["logprobs"], strict=True)
    own = [(ours - torch.tensor(theirs)).abs() for ours, theirs in pairs]
    apart = [row for part in gather_object([own]) for row in part]
    tokens = torch.cat(apart).double()
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    # The names that TRL gives them where it has an engine of its own.
    metrics["sampling/sampling_logp_difference/mean"].append(float(tokens.mean()))
    metrics["sampling/sampling_logp_difference/max"].append(float(tokens.max()))
    ratio = float(tokens.exp().mean())
    if ratio < threshold:
        return
    means = torch.stack([row.mean() for row in apart]).nan_to_num(torch.inf)
    row, step, version = (
        int(means.argmax()),
        trainer.state.global_step,
        output["weights_version"][0],
    )
    raise DisagreementError(
        f"step {step}: the probabilities of the engine (weights version {version}) and of the "
        f"trainer's model differ by a factor of {ratio:.4g} on average, and the threshold is "
        f"{threshold:g}; they differ most in row {row}, by {float(means[row]):.4g} nats per token "
        f"(tokens: {len(apart[row])})",
        fix="find what the two compute differently, such as a dtype, an attention kernel or a "
        "quantised cache; or raise the threshold to accept the difference",
        step=step,
        row=row,
        difference=float(means[row]),
        ratio=ratio,
        weights_version=version,
    )


@torch.no_grad()
def trainer_logprobs(
    trainer: Any, prompts: list[list[int]], completions: list[list[int]], sampling: SamplingParams
) -> list[torch.Tensor]:
    """Scores completions with the trainer's model, in the distribution that the engine declares.

    Args:
        trainer: A ``trl.GRPOTrainer``; its model's dropout is off meanwhile.
        prompts: Token ids of each row.
        completions: Token ids that the engine generated for each.
        sampling: How the engine sampled.

    Returns:
        For each row float32 log-probs of its completion, on the CPU.
    """
    model, training, args = trainer.model, trainer.model.training, trainer.args
    size = args.per_device_train_batch_size if training else args.per_device_eval_batch_size
    rows = list(zip(prompts, completions, strict=True))
    scores = []
    model.eval()
    try:
        for start in range(0, len(rows), size):
            some = rows[start : start + size]
            tokens = [torch.tensor([*prompt, *completion]) for prompt, completion in some]
            ids = pad_sequence(tokens, batch_first=True).to(trainer.accelerator.device)
            mask = pad_sequence([torch.ones_like(row) for row in tokens], batch_first=True)
            first = min(len(prompt) for prompt, _ in some) - 1  # predicts the first completion
            inputs = {"input_ids": ids, "attention_mask": mask.to(ids.device), "use_cache": False}
            with trainer.accelerator.autocast():
                logits = model(**inputs, logits_to_keep=ids.shape[1] - first).logits
            for i, (prompt, completion) in enumerate(some):
                begin = len(prompt) - 1 - first
                predicting = logits[i, begin : begin + len(completion)]
                chosen = ids[i, len(prompt) : len(prompt) + len(completion)]
                scores.append(score_tokens(predicting, chosen, sampling).cpu())
    finally:
        model.train(training)
    return scores


def score_tokens(
    logits: torch.Tensor, tokens: torch.Tensor, sampling: SamplingParams
) -> torch.Tensor:
    """Log-probs of tokens in the distribution that ``logprobs_mode`` declares.

    A token drawn at the edge of the nucleus has a finite one, also where rounding puts it outside.

    Args:
        logits: ``[T, V]`` of any float dtype.
        tokens: ``[T]`` int64.
        sampling: Temperature, truncation and ``logprobs_mode``.

    Returns:
        ``[T]`` float32.
    """
    scores = logits.float()
    kept = scores
    if sampling.logprobs_mode == "processed":
        kept = scores = scores / sampling.temperature
        if sampling.top_k or sampling.top_p < 1.0:
            most = sampling.top_k or scores.shape[-1]
            kept = scores.topk(min(most, scores.shape[-1])).values
            mass = kept.softmax(-1)
            kept = kept.masked_fill(mass.cumsum(-1) - mass >= sampling.top_p, -torch.inf)
    return scores.gather(-1, tokens[:, None])[:, 0] - kept.logsumexp(-1)
