"""The oracle: a plain float32 forward pass over the checkpoint, without cache, padding or masks.

Nothing that a backend could share a mistake with. A backend in lower precision is compared with
its own weights, rounded as they have to be, in float32 arithmetic: what is left is its error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.quiet import no_progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Oracle", "Truncated", "penalised", "reward_scores", "truncated_distribution"]


class Oracle:
    """Reference values of one checkpoint.

    Args:
        path: Directory of the checkpoint.
        dtype: To which the weights are rounded before they are used in float32.
    """

    def __init__(self, path: str | Path, dtype: str = "float32") -> None:
        import transformers

        config = transformers.AutoConfig.from_pretrained(path)
        kind = getattr(transformers, config.architectures[0])
        text = config.get_text_config()
        self.model: Any = _rounded_model(kind, path, dtype)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
        self.vocab_size = int(text.vocab_size)
        self.pad_token_id = int(self.tokenizer.pad_token_id)
        eos = text.eos_token_id
        self.eos_token_ids: tuple[int, ...] = tuple(eos) if isinstance(eos, list) else (eos,)
        self.eos_token_id = self.eos_token_ids[0]
        self.context = int(text.max_position_embeddings)
        #: Tokens of a row up to which its positions do not change when it grows.
        self.boundary = self.context
        positions = getattr(text, "rope_parameters", None) or {}
        if positions.get("rope_type") == "longrope":
            self.boundary = int(positions["original_max_position_embeddings"])

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """``[len(ids), V]`` float32; position t predicts token t+1."""
        with torch.no_grad():
            out: torch.Tensor = self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return out.float()

    def logprobs(self, ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
        """``[len(ids)]`` float32; entry t scores token t, entry 0 is 0."""
        scores = (self.logits(ids) / temperature).log_softmax(-1)
        chosen = scores[:-1].gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]
        return torch.cat([torch.zeros(1), chosen])

    def batch_logprobs(
        self, ids: torch.Tensor, lengths: torch.Tensor, temperature: float = 1.0
    ) -> torch.Tensor:
        """``[B, S]`` float32 of right-padded rows; 0 on entry 0 and padding."""
        out = torch.zeros(ids.shape)
        for row, length in enumerate(lengths.tolist()):
            out[row, :length] = self.logprobs(ids[row, :length].tolist(), temperature)
        return out

    def continue_greedily(
        self, prompts: torch.Tensor, steps: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The argmax continuation of prompts of one length, beyond any end of text.

        Args:
            prompts: ``[N, L]``.
            steps: Tokens to add.

        Returns:
            ``[N, steps]`` int64 tokens, and float32 by how much the log-prob of each is above that
            of the next likely one.
        """
        ids, leads = prompts, []
        for _ in range(steps):
            with torch.no_grad():
                logits = self.model(ids, use_cache=False).logits[:, -1].float()
            two = logits.topk(2)
            leads.append(two.values[:, 0] - two.values[:, 1])
            ids = torch.cat([ids, two.indices[:, :1]], dim=1)
        return ids[:, prompts.shape[1] :], torch.stack(leads, dim=1)

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """The argmax continuation of a prompt, up to and with the model's eos."""
        tokens = self.continue_greedily(torch.tensor([list(prompt)]), steps)[0][0].tolist()
        end = tokens.index(self.eos_token_id) + 1 if self.eos_token_id in tokens else steps
        return tokens[:end]

    def truncated(
        self,
        prompt: Sequence[int],
        *,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        slack: tuple[float, float] = (0.0, 0.0),
    ) -> Truncated:
        """The distribution from which the next token is sampled.

        Args:
            prompt: Token ids.
            temperature: Divides the logits.
            top_k: See :func:`truncated_distribution`.
            top_p: See :func:`truncated_distribution`.
            slack: Mean and largest error of a log-prob that may move the edge of what is kept.
        """
        logits = self.logits(prompt)[-1].double() / temperature
        return Truncated.of(logits, top_k=top_k, top_p=top_p, slack=slack)

    def nll(
        self, ids: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor
    ) -> tuple[float, float]:
        """Mean negative log-likelihood over the masked tokens, and the norm of its gradient.

        Args:
            ids: ``[B, S]`` right-padded.
            lengths: ``[B]``.
            mask: ``[B, S]`` 1 where a token counts; position 0 never does.
        """
        total, gradients = self.nll_gradients(ids, lengths, mask)
        return total, float(torch.stack([g.norm() for g in gradients.values()]).norm())

    def nll_gradients(
        self,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        mask: torch.Tensor,
        temperature: float = 1.0,
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """As :meth:`nll`, with the gradient of each parameter in place of its norm."""
        self.model.zero_grad()
        count = float(mask[:, 1:].sum())
        total = 0.0
        for row, length in enumerate(lengths.tolist()):
            if not mask[row, 1:length].any():
                continue
            logits = self.model(ids[row : row + 1, :length], use_cache=False).logits[0].float()
            scores = (logits[:-1] / temperature).log_softmax(-1)
            chosen = scores.gather(1, ids[row, 1:length, None])[:, 0]
            loss = -(chosen * mask[row, 1:length]).sum() / count
            loss.backward()
            total += float(loss.detach())
        parameters = dict(self.model.named_parameters())
        found = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
        self.model.zero_grad()
        return total, found


@dataclass(frozen=True, slots=True)
class Truncated:
    """A next-token distribution after truncation.

    Attributes:
        probabilities: ``[V]`` float64, 0 for what is left out.
        logprobs: ``[V]`` float64 shares of what is kept; for a token that is left out, the share
            that it would have in place of its neighbour at the edge.
        edge: ``[V]`` True for tokens that rounding may let in or keep out.
    """

    probabilities: torch.Tensor
    logprobs: torch.Tensor
    edge: torch.Tensor

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        slack: tuple[float, float] = (0.0, 0.0),
    ) -> Truncated:
        """Truncates logits ``[V]`` to which the temperature was applied."""
        mean, largest = slack
        probabilities = truncated_distribution(logits, top_k=top_k, top_p=top_p)
        kept = probabilities > 0
        edge = torch.zeros_like(kept)
        if top_k or top_p < 1:
            masses = (top_p * (1 - mean), top_p * (1 + mean)) if top_p < 1 else (1.0, 1.0)
            upper, lower = (
                logits[truncated_distribution(logits, top_k=top_k, top_p=mass) > 0].min()
                for mass in masses
            )
            # Two log-probs with the largest error each change places if they are this close.
            edge = (logits >= lower - 2 * largest) & (logits <= upper + 2 * largest)
        return cls(probabilities, logits - logits[kept].logsumexp(0), edge)

    @property
    def possible(self) -> torch.Tensor:
        """``[V]`` True for tokens that may be drawn."""
        return (self.probabilities > 0) | self.edge


def penalised(logits: torch.Tensor, seen: list[int], penalty: float) -> torch.Tensor:
    """Logits ``[V]``, those of seen tokens divided by the penalty, or multiplied if negative."""
    tokens, lowered = torch.tensor(seen), logits.clone()
    values = logits[tokens]
    lowered[tokens] = torch.where(values > 0, values / penalty, values * penalty)
    return lowered


def truncated_distribution(
    logits: torch.Tensor, *, top_k: int = 0, top_p: float = 1.0
) -> torch.Tensor:
    """Softmax, then the ``top_k`` largest, then the nucleus of mass ``top_p``, renormalised.

    Args:
        logits: ``[..., V]``, temperature applied.
        top_k: Tokens kept; 0 is off.
        top_p: The smallest set of most likely tokens whose mass reaches it is kept; 1 is off.
    """
    probabilities, order = logits.softmax(-1).sort(descending=True)
    if top_k:
        probabilities[..., top_k:] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    if top_p < 1:
        before = probabilities.cumsum(-1) - probabilities
        probabilities[before >= top_p] = 0
        probabilities /= probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter(-1, order, probabilities)


def reward_scores(
    path: str | Path, ids: torch.Tensor, lengths: torch.Tensor, dtype: str = "float32"
) -> torch.Tensor:
    """``[B]`` float32 output of a checkpoint's scoring head at each row's last token."""
    from transformers import AutoModelForSequenceClassification

    model = _rounded_model(AutoModelForSequenceClassification, path, dtype)
    with torch.no_grad():
        rows = zip(ids, lengths.tolist(), strict=True)
        # Not the classifier's own choice, which takes a pad token at the end for padding.
        last = [model.model(row[None, :length]).last_hidden_state[0, -1] for row, length in rows]
        scores: torch.Tensor = model.score(torch.stack(last))[:, 0].float()
    return scores


def _rounded_model(factory: Any, path: str | Path, dtype: str) -> Any:
    """A checkpoint in float32 whose weights have the values that they have in a dtype."""
    with no_progress_bars():
        model = factory.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, dtype)).float()
    return model.eval()
