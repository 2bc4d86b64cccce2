"""G7: the text in which stop strings are looked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_conformance.batches import generated
from rl_conformance.expect import require
from rl_conformance.models import make_reciting_model, make_tokenizer
from rl_conformance.registry import check

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rl_conformance.context import Context
    from rl_core.interfaces import GenerationInterface

__all__ = ["ACCENT", "FACE", "IDEOGRAPH", "Recital"]

#: Characters of two, three and four bytes, each byte a token.
ACCENT, IDEOGRAPH, FACE = "\u00e9", "\u6f22", "\N{HUGGING FACE}"
#: Tokens of a prompt, and of what is generated.
_PROMPT, _STEPS = 6, 12


class Recital:
    """An engine whose model says the same tokens in a circle, and where its rows must end.

    Among them are bytes that are no character: one that begins none, and two that begin a
    character which does not go on.

    Args:
        ctx: Of the check.
    """

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._tokenizer = make_tokenizer()
        encode = self._tokenizer.encode
        self.tokens: list[int] = [
            *encode("\u00c0")[1:],
            *encode(f"st{FACE}"),
            *encode("\U00040000")[:1],
            *encode(f"x{ACCENT}op{IDEOGRAPH}"),
            *encode("\u1000")[:1],
            *encode(".y"),
        ]
        path = ctx.workshop.once(
            "recital", lambda: make_reciting_model(ctx.directory(), self.tokens)
        )
        self.engine: GenerationInterface = ctx.generation(
            model_name=str(path), max_new_tokens=_STEPS
        )

    def check(self, starts: Sequence[int], strings: Sequence[str]) -> None:
        """Fails unless rows from these places of the circle end where their strings say.

        Args:
            starts: One for each row; the tokens before it are its prompt.
            strings: One for each row.
        """
        circle = self.tokens * 3
        places = [start % len(self.tokens) + len(self.tokens) for start in starts]
        data: Any = self._ctx.batch(
            [circle[place - _PROMPT : place] for place in places],
            stop_strings=[[string] for string in strings],
        )
        output = self.engine.generate(data, greedy=True)
        got, truncated = generated(data, output), output["truncated"].tolist()
        for row, (place, string) in enumerate(zip(places, strings, strict=True)):
            said = circle[place : place + _STEPS]
            counts = range(1, _STEPS + 1)
            end = next((n for n in counts if string in self._tokenizer.decode(said[:n])), None)
            require(
                (got[row], truncated[row]) == (said[:end], end is None),
                f"row {row}, stop string {string!r}: got {got[row]}, truncated {truncated[row]}; "
                f"expected {end} tokens of {said}",
            )


@check(
    "G7",
    cases={
        "characters": {"strings": (ACCENT, IDEOGRAPH, FACE)},
        "between_characters": {"strings": (f"t{FACE}", f"{ACCENT}o", f"p{IDEOGRAPH}")},
        "after_stray_bytes": {"strings": ("st", "\ufffdx", ".y", f"x{ACCENT}op")},
    },
)
def stop_strings_are_of_the_generated_text(ctx: Context, strings: Sequence[str]) -> None:
    """Wherever a row begins, it ends where its own tokens, decoded as a whole, hold the string.

    Some begin within the string, or within a character of it: what the prompt has of it is no part
    of the text.
    """
    recital = Recital(ctx)
    starts = range(len(recital.tokens))
    for string in strings:
        recital.check(starts, [string] * len(starts))
