"""Models with one thing or another after their body, and what both ways make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from architectures.table import make_architecture

from rl_hf.forward import Forward, Sequences
from rl_hf.hidden import find_body

VOCABULARY = 272
#: A row of one token, a long one, one that fills a chunk.
LENGTHS = (20, 1, 7, 2, 14)
#: What each has after its body, or how its body is reached.
KINDS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "gemma2": {"attn_implementation": "eager", "final_logit_softcapping": 3.0},
    "granite": {"logits_scaling": 8.0},
    "cohere": {"logit_scale": 0.25},
    "phi": {},
    "gptj": {},
    "opt": {},
    "gpt2": {},
    "mamba": {},
    "qwen2_moe": {},
}


def made(path: Path, kind: str, dtype: str = "float32", **overrides: Any) -> Any:
    folder = make_architecture(path / kind, kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **overrides
    )
    return model.eval()


def rows(lengths: tuple[int, ...] = LENGTHS) -> Sequences:
    ids = torch.randint(3, 269, (len(lengths), 22), generator=torch.Generator().manual_seed(1))
    return Sequences.of(ids, torch.tensor(lengths), torch.device("cpu"))


def half(sequences: Sequences) -> torch.Tensor:
    """Some tokens: the whole of a row, none of another, first and last ones."""
    counts = torch.rand(sequences.ids.shape, generator=torch.Generator().manual_seed(2)) < 0.5
    counts[0], counts[2] = True, False
    return counts


def both(model: Any, inner: Any, counts: torch.Tensor | None, **options: Any) -> list[Any]:
    """Log-probs and gradients with all logits, and from hidden states."""
    body = find_body(model, inner, VOCABULARY)
    assert body is not None
    results = []
    for one in (None, body):
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        scores = Forward(model, body=one, **options).logprobs(rows(), counts)
        weights = torch.randn(scores.shape, generator=torch.Generator().manual_seed(4))
        (scores * weights).sum().backward()
        trained = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        results.append((scores.detach(), trained))
    return results


def agree(results: list[Any], rtol: float = 1e-5) -> None:
    (expected, gradients), (found, ours) = results
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert gradients.keys() == ours.keys()
    assert gradients
    # Some are 0 but for rounding, as those of biases that a softmax takes out.
    noise = 1e-6 * max(float(gradient.norm()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        off = float((ours[name] - gradient).norm())
        assert off <= rtol * float(gradient.norm()) + noise, name
