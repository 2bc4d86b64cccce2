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
        # The last tokens decide nearly always, and cost little; a match is looked for again in
        # the whole text, whose beginning a window may decode otherwise.
        text = self._decode(self._tokens[-self._window :])
        while len(text) < self._enough and self._window < len(self._tokens):
            self._window *= 2
            text = self._decode(self._tokens[-self._window :])
        return self._match(text) and self._match(self._decode(self._tokens))

    def _match(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(
            tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
