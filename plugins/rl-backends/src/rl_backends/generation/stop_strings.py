"""Stop strings: the first token that completes a match in the generated text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

__all__ = ["StopStrings"]

#: Characters decoded beyond the longest stop string. The left edge of a window may decode unlike
#: the same tokens in their context: half a character, or a space that is dropped.
MARGIN = 8
#: A byte of a character that has no token, in vocabularies of sentencepiece.
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class StopStrings:
    """Watches one row's generated tokens for any of some strings (clause G7 of the contract).

    The text is what the tokenizer decodes of all tokens that were generated, and of no others.
    Special tokens count with their text, since people stop at them by name; bytes that are no
    character, or none yet, are U+FFFD.

    Args:
        strings: Non-empty strings.
        tokenizer: Decodes.
    """

    def __init__(self, strings: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self._enough = max(len(string) for string in strings) + MARGIN
        self._tokens: list[int] = []
        # Of the window, in tokens; and how many characters are before its middle.
        self._start = self._middle = self._before = 0

    def push(self, token: int) -> bool:
        """Takes the next token; True if the text holds a stop string now."""
        self._tokens.append(token)
        text = self._decode(self._start)
        if self._match(text):  # perhaps at the window's left edge alone
            return not self._start or self._match(self._decode(0))
        # A token that comes changes nothing before the middle, and no match is longer than what
        # is between there and the start. A run of bytes is decoded as one: all or none of it are
        # characters, so a window neither starts in it nor has its middle there.
        if len(text) - self._before >= self._enough and not _BYTE.fullmatch(
            str(self._tokenizer.convert_ids_to_tokens(token))
        ):
            self._start, self._middle = self._middle, len(self._tokens)
            self._before = len(text) - self._before
        return False

    def _match(self, text: str) -> bool:
        return any(string in text for string in self._strings)

    def _decode(self, start: int) -> str:
        text = self._tokenizer.decode(
            self._tokens[start:], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text
