"""Logits made of hidden states, some tokens at a time, by the model's own code.

With a large vocabulary the logits of all tokens are the largest tensor of a pass, and their
gradient is another. So the body of the model runs over all tokens, and what the model does after it
(the head with its bias, adapters, wrappers and hooks; scales; soft caps) over a few at a time: the
model is called again, with their hidden states in the place of what its body returns.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl_hf.fused import fused_head, plain_output
from rl_hf.logprobs import chunks, hidden_logprobs, token_logprobs
from rl_hf.modeling import model_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from rl_hf.fused import FusedHead

_log = logging.getLogger(__name__)

__all__ = ["Body", "HiddenStates", "Logits", "find_body"]

#: Logits in the model's dtype that are held at a time.
CHUNK_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class Logits:
    """The logits of all tokens of a pass, without the temperature.

    Attributes:
        values: ``[M, V]`` in the model's dtype.
    """

    values: torch.Tensor

    @property
    def vocabulary(self) -> int:
        """V."""
        return self.values.shape[-1]

    def at(self, places: torch.Tensor | slice) -> torch.Tensor:
        """``[n, V]`` logits of the tokens at ``[n]`` int64 places."""
        return self.values[places]

    def logprobs(
        self, places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """See :func:`~rl_hf.logprobs.token_logprobs`."""
        return token_logprobs(self.values, places, targets, temperature)


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """The hidden states of all tokens of a pass, of which logits are made when they are asked for.

    Attributes:
        values: ``[M, H]``.
        head: Makes ``[n, V]`` logits of ``[n, H]`` hidden states.
        vocabulary: V.
        fused: Makes cross entropies in the place of the head, if there is a kernel for it.
    """

    values: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    fused: FusedHead | None = None

    def at(self, places: torch.Tensor | slice) -> torch.Tensor:
        """``[n, V]`` logits of the tokens at ``[n]`` int64 places."""
        return self.head(self.values[places])

    def logprobs(
        self, places: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        """See :func:`~rl_hf.logprobs.token_logprobs`; several parts are made again backwards."""
        hidden = self.values[places.to(self.values.device)]
        if self.fused is not None and temperature == 1:
            return -self.fused(hidden, targets.to(hidden.device)).to(targets.device)
        parts = chunks(len(places), self.vocabulary, CHUNK_ELEMENTS)
        if len(parts) > 1:
            return hidden_logprobs(hidden, self.head, targets, temperature, parts)
        rows = torch.arange(len(places), device=places.device)
        return token_logprobs(self.head(hidden).to(places.device), rows, targets, temperature)


@dataclass(frozen=True, slots=True)
class Body:
    """The part of a model that makes hidden states.

    Attributes:
        name: Of the module in the model that was asked about.
        output: Likewise of the linear layer that makes logits of its hidden states, alone.
    """

    name: str
    output: str | None = None

    def __call__(self, model: nn.Module, **inputs: Any) -> HiddenStates | Logits:
        """Runs a model, whatever it is wrapped in, over all tokens of ``input_ids`` ``[b, s]``.

        Returns:
            Hidden states; logits if the model does not call the module.

        Raises:
            AttributeError: The module is gone, or returns something else than a body does.
        """
        parent, _, name = self.name.rpartition(".")
        holder = model.get_submodule(parent)
        body = holder.get_submodule(name)
        outputs: list[Any] = []

        def shorten(_module: nn.Module, _args: Any, output: Any) -> Any:
            outputs.append(output)
            return _replaced(output, output.last_hidden_state[:1, :1])

        handle = body.register_forward_hook(shorten)
        try:
            first = model(**inputs).logits
        finally:
            handle.remove()
        if not outputs:
            return Logits(first.flatten(0, 1))
        ids = inputs["input_ids"]

        # The pass has made the parameters of the head whole, and backward lets go of them. FSDP's
        # hooks would begin another pass, in the middle of backward.
        call = model.forward if isinstance(model, FSDPModule) else model

        def head(hidden: torch.Tensor) -> torch.Tensor:
            holder._modules[name] = _Given(body, _replaced(outputs[0], hidden[None]))
            try:
                logits: torch.Tensor = call(
                    input_ids=ids.new_zeros(1, len(hidden)), use_cache=False
                ).logits
            finally:
                holder._modules[name] = body
            return logits[0]

        hidden, fused = outputs[0].last_hidden_state, None
        if self.output is not None:
            fused = fused_head(model.get_submodule(self.output), hidden[:1, :1], first)
        return HiddenStates(hidden.flatten(0, 1), head, first.shape[-1], fused)


@torch.no_grad()
def find_body(model: nn.Module, inner: PreTrainedModel, vocab_size: int) -> Body | None:
    """The module whose hidden states give the model's own logits; tried on a few tokens.

    It is looked for among those that hold the input embeddings, from the outermost on. Nothing is
    assumed of what comes after it.

    Args:
        model: The model, whatever it is wrapped in.
        inner: The transformers model in it.
        vocab_size: Token ids are below it.

    Returns:
        None if there is none, with a warning that says why.
    """
    ids = torch.arange(1, 25, device=model_device(inner)).remainder(vocab_size).view(2, 12)
    plain = model(input_ids=ids, use_cache=False).logits.flatten(0, 1)
    exact = plain.dtype in (torch.float32, torch.float64)
    limit = (1e-4 if exact else 0.02) * float(plain.abs().max())
    parts = chunks(len(plain), 1, 5)
    reason = "none of its modules has its input embeddings"
    for name in _around_embeddings(model, inner):
        body = Body(name)
        try:
            states = body(model, input_ids=ids, use_cache=False)
            off = max(float((states.at(part) - plain[part]).abs().max()) for part in parts)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
            reason = f"what follows {name} cannot be skipped ({type(error).__name__}: {error})"
            continue
        if isinstance(states, Logits):
            reason = f"it does not call {name}"
        elif off <= limit:
            return Body(name, plain_output(model, inner, states.values, states.head, plain))
        else:
            reason = f"the head after {name}, applied to some tokens, gives logits {off:.3g} off"
    _log.warning(
        "%s computes the logits of all tokens of a microbatch at once, which takes more memory: %s",
        type(inner).__name__,
        reason,
    )
    return None


def _around_embeddings(model: nn.Module, inner: PreTrainedModel) -> list[str]:
    """Names in ``model`` of the modules of ``inner`` that hold its input embeddings."""
    embeddings = inner.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    path = [name for name, module in inner.named_modules() if module is embeddings]
    steps = path[0].split(".")[:-1] if path else []
    within = [names[inner]] if names[inner] else []
    return [".".join([*within, *steps[: end + 1]]) for end in range(len(steps))]


class _Given(nn.Module):
    """Stands where a body was, and returns what it is given."""

    def __init__(self, body: nn.Module, output: Any) -> None:
        super().__init__()
        # Not as a submodule: what a model reads of its body is the body's.
        self.__dict__["body"] = body
        self.output = output

    def forward(self, *_: Any, **__: Any) -> Any:
        return self.output

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["body"], name)


def _replaced(output: Any, hidden: torch.Tensor) -> Any:
    """A body's output with other hidden states."""
    other = copy.copy(output)
    other["last_hidden_state"] = hidden
    return other
