"""Rows end at stop strings as everywhere: vLLM asks this for them, instead of its detokenizer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from rl_backends.generation.stop_strings import StopStrings

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

__all__ = ["STOP_STRINGS", "watch_stop_strings"]

#: The extra argument of a request that has what ends it.
STOP_STRINGS = "rl_stop_strings"


class _TokenWatcher(IncrementalDetokenizer):  # type: ignore[misc]
    """Keeps a row's tokens, and makes no text of them but to look for its stop strings."""

    def __init__(self, stops: StopStrings) -> None:
        super().__init__()
        self._stops = stops

    def update(self, new_token_ids: list[int], stop_terminated: bool) -> str | None:
        """Takes tokens up to the one that completes a stop string; vLLM then aborts the row."""
        del stop_terminated
        for token in new_token_ids:
            self.token_ids.append(token)
            if self._stops.push(token):
                return "one of the row's own"
        return None


def watch_stop_strings(tokenizer: Any) -> None:
    """Has vLLM, in this process, end rows by :class:`StopStrings`.

    Its own detokenizer begins with the prompt's last tokens, and starts again, or makes no text,
    at bytes that are no character: a row would end at text of its prompt, or not at its own.

    Args:
        tokenizer: Of the model.
    """
    make = IncrementalDetokenizer.from_new_request
    watching = partial(StopStrings, tokenizer=tokenizer)

    def from_new_request(tokenizer: Any, request: EngineCoreRequest) -> IncrementalDetokenizer:
        strings = (request.sampling_params.extra_args or {}).get(STOP_STRINGS)
        return _TokenWatcher(watching(strings)) if strings else make(tokenizer, request)

    IncrementalDetokenizer.from_new_request = from_new_request
