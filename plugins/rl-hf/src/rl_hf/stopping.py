"""Stop strings: the first token that completes a match in the generated text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

__all__ = ["StopStrings"]

#: Characters decoded beyond the longest stop string. The left edge of a window may decode unlike
#: the same tokens in their context: half a character, or a space that is dropped.
MARGIN = 8


class StopStrings:
    """Watches one row's generated tokens for any of some strings.

    Special tokens count with their text, since people stop at them by name.

    Args:
        strings: Non-empty strings.
        tokenizer: Decodes.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._enough = max(len(string) for string in strings) + MARGIN
        self._tokens: list[int] = []
        self._window = self._enough

    def push(self, token: int) -> bool:
        """Takes the next token; True if the text holds a stop string now."""
        self._tokens.append(token)
        # The tail is cheap and answers nearly always; the whole text has the last word.
        return self._match(self._tail()) and self._match(self._decode(self._tokens))

    def _tail(self) -> str:
        """Text of the last tokens, at least ``enough`` characters if there are as many."""
        text = self._decode(self._tokens[-self._window :])
        while len(text) < self._enough and self._window < len(self._tokens):
            self._window *= 2
            text = self._decode(self._tokens[-self._window :])
        return text

    def _match(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
