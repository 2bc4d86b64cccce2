"""The oracle: a plain float32 forward pass over the checkpoint, one unpadded row at a time.

No cache, no batch, no padding, no masks: nothing that a backend could share a mistake with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_conformance.quiet import no_progress_bars

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["Oracle", "reward_scores", "truncated_distribution"]


class Oracle:
    """Reference values of one checkpoint.

    Args:
        path: Directory of the checkpoint.
    """

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        with no_progress_bars():
            self.model: Any = AutoModelForCausalLM.from_pretrained(
                path, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(path)
        self.vocab_size = int(self.model.config.vocab_size)
        self.pad_token_id = int(self.tokenizer.pad_token_id)
        self.eos_token_id = int(self.model.config.eos_token_id)
        self.context = int(self.model.config.max_position_embeddings)
        self._paths: dict[tuple[int, ...], list[int]] = {}

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

    def greedy(self, prompt: Sequence[int], steps: int) -> list[int]:
        """The argmax continuation, up to and with the model's eos."""
        path = self._paths.setdefault(tuple(prompt), [])
        while len(path) < steps and self.eos_token_id not in path:
            path.append(int(self.logits([*prompt, *path])[-1].argmax()))
        return path[:steps]

    def distribution(
        self, prompt: Sequence[int], *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
    ) -> torch.Tensor:
        """``[V]`` float64 probabilities of the next token as it is sampled."""
        logits = self.logits(prompt)[-1].double() / temperature
        return truncated_distribution(logits, top_k=top_k, top_p=top_p)

    def nll(
        self, ids: torch.Tensor, lengths: torch.Tensor, mask: torch.Tensor
    ) -> tuple[float, float]:
        """Mean negative log-likelihood over the masked tokens, and the norm of its gradient.

        Args:
            ids: ``[B, S]`` right-padded.
            lengths: ``[B]``.
            mask: ``[B, S]`` 1 where a token counts; position 0 never does.
        """
        self.model.zero_grad()
        count = float(mask[:, 1:].sum())
        total = 0.0
        for row, length in enumerate(lengths.tolist()):
            logits = self.model(ids[row : row + 1, :length], use_cache=False).logits[0].float()
            chosen = logits[:-1].log_softmax(-1).gather(1, ids[row, 1:length, None])[:, 0]
            loss = -(chosen * mask[row, 1:length]).sum() / count
            loss.backward()
            total += float(loss.detach())
        norms = [p.grad.norm() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return total, float(torch.stack(norms).norm())


def truncated_distribution(logits: torch.Tensor, *, top_k: int, top_p: float) -> torch.Tensor:
    """Softmax, then the ``top_k`` largest, then the nucleus of mass ``top_p``, renormalised.

    Args:
        logits: ``[V]``, temperature applied.
        top_k: Tokens kept; 0 is off.
        top_p: The smallest set of most likely tokens whose mass reaches it is kept; 1 is off.
    """
    probabilities, order = logits.softmax(-1).sort(descending=True)
    if top_k:
        probabilities[top_k:] = 0
        probabilities /= probabilities.sum()
    if top_p < 1:
        before = probabilities.cumsum(0) - probabilities
        probabilities[before >= top_p] = 0
        probabilities /= probabilities.sum()
    return torch.zeros_like(probabilities).scatter(0, order, probabilities)


def reward_scores(path: str | Path, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """``[B]`` float32 output of a checkpoint's scoring head at each row's last token."""
    from transformers import AutoModelForSequenceClassification

    with no_progress_bars():
        model = AutoModelForSequenceClassification.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    with torch.no_grad():
        rows = zip(ids, lengths.tolist(), strict=True)
        scores = [model(row[None, :length]).logits[0, 0] for row, length in rows]
    return torch.stack(scores).float()
