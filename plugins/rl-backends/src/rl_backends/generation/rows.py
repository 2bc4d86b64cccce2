"""Rows as engines see them, how they are sampled, and what becomes of them.

Rows and completions go to engines in other processes as they are, and this module imports no torch:
such a process is forked from one that has not imported it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence  # noqa: TC003 - msgspec looks the types of fields up
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

__all__ = ["Completion", "FailedRow", "ModelFacts", "Row", "RowEngine", "SamplingParams"]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the frontend must know of the loaded model.

    Attributes:
        pad_token_id: Fills the output on the right.
        eos_token_ids: The model's own end-of-sequence tokens.
        vocab_size: Token ids are in ``[0, vocab_size)``.
        max_model_len: Upper bound on prompt plus generated tokens.
    """

    pad_token_id: int
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    max_model_len: int


class SamplingParams(msgspec.Struct, array_like=True, frozen=True):
    """How every row of one call is sampled.

    Attributes:
        greedy: Take the argmax; the log-prob is then of the untruncated distribution at
            temperature 1.
        temperature: Divides the logits, > 0.
        top_k: Candidates kept; 0 is off.
        top_p: Nucleus mass; 1 is off.
        repetition_penalty: 1 is off.
        stop_token_ids: Tokens that end a row and are kept.
        logprobs_mode: ``"processed"`` or ``"raw"``.
        max_new_tokens: Upper bound on generated tokens per row.
        num_generations: Completions per prompt.
        seed: Base seed, or None for a fresh one per call.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logprobs_mode: str = "processed"
    max_new_tokens: int = 128
    num_generations: int = 1
    seed: int | None = None

    @property
    def distribution(self) -> str | None:
        """The options that shape the distribution sampled from; None if nothing is drawn."""
        off = {"temperature": None, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        set_ = [f"{k} {getattr(self, k):g}" for k, v in off.items() if getattr(self, k) != v]
        return None if self.greedy else ", ".join(set_)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], facts: ModelFacts) -> SamplingParams:
        """Reads the sampling keys of a :class:`GenerationConfig`."""
        eos = config.get("eos_token_id")
        eos_ids = facts.eos_token_ids if eos is None else (eos if isinstance(eos, list) else [eos])
        stops = dict.fromkeys([*(config.get("stop_token_ids") or ()), *eos_ids])
        return cls(
            greedy=not config.get("do_sample", True),
            temperature=float(config.get("temperature", 1.0)),
            top_k=max(0, config.get("top_k") or 0),
            top_p=float(config.get("top_p", 1.0)),
            repetition_penalty=float(config.get("repetition_penalty", 1.0)),
            stop_token_ids=tuple(stops),
            logprobs_mode=config.get("logprobs_mode", "processed"),
            max_new_tokens=config.get("max_new_tokens", 128),
            num_generations=config.get("num_generations", 1),
            seed=config.get("seed"),
        )


class Row(msgspec.Struct, array_like=True, frozen=True):
    """One prompt to complete.

    Attributes:
        key: Tells it from every other row of the engine, of this call and of all others.
        call: Number of the call that it belongs to.
        index: Of the row in its call, for messages.
        token_ids: The prompt, at least one token.
        budget: Tokens that it may generate, at least 1.
        seed: Of its own random stream, 63 bits.
        seeded: The seed was requested; otherwise an engine may as well draw from a stream of its
            own.
        stop_strings: Each of them ends it.
        sampling: How it is sampled; all rows of an engine share everything but ``greedy`` and
            what goes with that.
    """

    key: int
    call: int
    index: int
    token_ids: Sequence[int]
    budget: int
    seed: int
    seeded: bool
    stop_strings: tuple[str, ...]
    sampling: SamplingParams


class Completion(msgspec.Struct, array_like=True, frozen=True):
    """What an engine made of one prompt.

    Attributes:
        row: The row's key, or, of ``complete``, the prompt's index in its :class:`PromptBatch`.
        token_ids: Generated tokens, stop token included.
        logprobs: One float for each.
        truncated: True if the row ended by length.
    """

    row: int
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    truncated: bool


@dataclass(frozen=True, slots=True)
class FailedRow:
    """A row that cannot be completed; its call fails with it, and no other call does.

    Attributes:
        row: The row's key.
        error: What to raise where the call was made.
    """

    row: int
    error: BaseException


class RowEngine(ABC):
    """An engine that decodes rows of many calls together.

    One thread at a time, of the service that all calls share, calls its methods; others call
    :meth:`interrupt` and :meth:`release_threads`. Whatever one of them raises fails every call
    with rows in the engine, and the service calls :meth:`cancel` with them all.
    """

    #: Rows that it takes at a time, those that wait inside it included; others wait outside.
    room = 1024

    @abstractmethod
    def submit(self, rows: Sequence[Row]) -> None:
        """Takes rows; they may wait for room, and start in any order."""

    @abstractmethod
    def collect(self) -> Sequence[Completion | FailedRow]:
        """Works on the rows it has, such as by one token each, and returns those that ended.

        Nothing may have ended. It returns soon: what came meanwhile waits for that. ``row`` of a
        completion is the row's key.
        """

    @abstractmethod
    def cancel(self, keys: Collection[int]) -> None:
        """Forgets rows, and frees what they hold; some may be unknown."""

    def interrupt(self) -> None:
        """Makes a :meth:`collect` that only waits return at once. From any thread."""

    def release_threads(self) -> None:
        """Releases the calling thread's helper threads: from here on it waits for rows."""
