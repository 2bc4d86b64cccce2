"""Stop strings: the first token that completes a match, found in the text as a whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_conformance.models import make_tokenizer
from rl_core.backends.stop_strings import StopStrings

TOKENIZER = make_tokenizer()


def first_match(tokens: list[int], strings: list[str]) -> int | None:
    """Decodes every prefix from scratch."""
    for count in range(1, len(tokens) + 1):
        text = TOKENIZER.decode(tokens[:count], skip_special_tokens=False)
        if any(string in text for string in strings):
            return count
    return None


def watched(tokens: list[int], strings: list[str]) -> int | None:
    watcher = StopStrings(strings, TOKENIZER)
    return next((i for i, token in enumerate(tokens, 1) if watcher.push(token)), None)


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("a long text with the end in it", ["the end"]),
        ("1234 then 12", ["4 t", "n 1"]),
        ("no match here", ["zzz"]),
        ("naïve café 漢字 and more", ["字"]),
        ("naïve café", ["é"]),
        ("<eos> by name", ["<eos>"]),
        ("x", ["x"]),
        ("aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", ["ab"]),
    ],
)
def test_a_row_ends_where_decoding_every_prefix_says(text: str, strings: list[str]):
    tokens = TOKENIZER.encode(text)
    assert watched(tokens, strings) == first_match(tokens, strings)


@given(
    st.lists(st.integers(0, 268), max_size=40),
    st.lists(st.text(alphabet="aeinrth12 é�<", min_size=1, max_size=3), min_size=1, max_size=3),
)
def test_any_tokens_and_strings_end_where_decoding_every_prefix_says(
    tokens: list[int], strings: list[str]
):
    assert watched(tokens, strings) == first_match(tokens, strings)


def test_a_match_may_span_tokens_that_add_no_text_of_their_own():
    half = TOKENIZER.encode("é")
    assert len(half) == 2
    tokens = [*TOKENIZER.encode("caf"), *half]
    assert watched(tokens, ["fé"]) == len(tokens)


class _Bytes:
    """A tokenizer of single bytes, but for one long token."""

    LONG = 256

    def decode(self, tokens, **_):
        pieces = (b"-" * 40 if token == self.LONG else bytes([token]) for token in tokens)
        return b"".join(pieces).decode(errors="replace")


def test_a_long_last_token_does_not_push_a_match_out_of_sight():
    text = "\N{GRINNING FACE}" * 12 + "-"
    watcher = StopStrings([text], _Bytes())
    tokens = [*text[:-1].encode(), _Bytes.LONG]
    assert [watcher.push(token) for token in tokens] == [False] * 48 + [True]
