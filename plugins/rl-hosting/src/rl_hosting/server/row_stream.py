"""What a server answers for one row, read event by event; no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_backends import Completion
from rl_backends.generation.stop_strings import StopStrings
from rl_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from rl_backends.generation.rows import Row
    from rl_hosting.server.server import Server

__all__ = ["RowStream"]

#: Tokens after which a row that may be ended here is looked at again, at most, and how often at
#: least: as many tokens may be decoded in vain. An event of SGLang repeats all tokens before it, so
#: that fewer would cost more where rows are long.
_LOOK_EVERY, _LOOKS = 16, 8


class RowStream:
    """One row, from the request to its last token.

    A row ends at the first token that is a stop token, or that completes a stop string. Where the
    server would end it elsewhere, or does not know the strings, the row is ended here.

    Args:
        row: The row.
        server: Decodes it.

    Raises:
        ConfigError: It has stop strings, and there is no tokenizer.
    """

    def __init__(self, row: Row, server: Server) -> None:
        self._row = row
        self._server = server
        self._ends = frozenset(row.sampling.stop_token_ids)
        self._stops: StopStrings | None = None
        checkpoint = server.checkpoint
        if row.stop_strings:
            if checkpoint.tokenizer is None:
                raise ConfigError(
                    f"row {row.index} has stop strings, but {checkpoint.directory} has no "
                    "tokenizer",
                    fix="save the tokenizer beside the model, or use stop_token_ids",
                    key="stop_strings",
                )
            self._stops = StopStrings(row.stop_strings, checkpoint.tokenizer)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._seen = 0
        #: The server sends no more.
        self.ended = False

    def request(self, name: str) -> dict[str, Any]:
        """The body of the request.

        Args:
            name: Of the row, at the server.
        """
        ended_here = self._stops is not None or not self._server.ends_rows_itself(self._ends)
        often = max(1, min(_LOOK_EVERY, self._row.budget // _LOOKS))
        return self._server.request(self._row, name, look_every=often if ended_here else None)

    def take(self, event: dict[str, Any]) -> tuple[Completion | None, set[str]]:
        """Takes an event.

        Returns:
            The row if it is complete, and the labels of the weights that computed its tokens.

        Raises:
            PluginError: The server refused the row, gave it up, or sent what is no part of a row.
            WeightsTornError: It refused the row because of its weights, or ended it.
        """
        if "error" in event:
            error = event["error"]
            why = str(error.get("message") if isinstance(error, dict) else error)
            self._server.check_whole(why)
            raise self._fault(f"refused a row: {why}")
        try:
            part = self._server.part(event)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._fault(
                f"sent a malformed part of a row: {type(error).__name__}: {error}"
            ) from error
        self.ended = bool(part.reason)
        if part.reason.startswith("abort"):
            self._server.check_whole(part.reason)
            raise self._fault(
                f"aborted a row: {part.reason}",
                fix="look at its log; another client may abort all requests",
            )
        self._ids = part.ids if part.whole else self._ids + part.ids
        self._logprobs = part.logprobs if part.whole else self._logprobs + part.logprobs
        longest = min(len(self._ids), self._row.budget)
        for count in range(self._seen + 1, longest + 1):
            token = self._ids[count - 1]
            matched = self._stops is not None and self._stops.push(token)
            if matched or token in self._ends:
                return self._completion(count, truncated=False), part.labels
        self._seen = longest
        if part.reason == "length":
            return self._completion(longest, truncated=True), part.labels
        if part.reason:
            raise self._fault(
                f"ended a row at token {self._ids[-1] if self._ids else None}, which is not a stop "
                f"token of this call: {part.reason}",
                fix="if it is a stop token of the server's checkpoint, copy that checkpoint's "
                "generation_config.json to model_name; if the reason is NaN, check the weights",
            )
        return None, part.labels

    def _completion(self, count: int, *, truncated: bool) -> Completion:
        ids, logprobs = self._ids[:count], self._logprobs[:count]
        size = self._server.checkpoint.facts.vocab_size
        if len(self._ids) != len(self._logprobs) or not all(0 <= token < size for token in ids):
            raise self._fault(
                f"returned {len(self._ids)} tokens and {len(self._logprobs)} log-probs for a row, "
                "or tokens outside of the model's vocabulary",
                fix="check that it serves the model of model_name",
            )
        # A log-prob of more than 0 is a rounding error; NaN stays, and fails the row.
        return Completion(self._row.key, ids, [min(one, 0.0) for one in logprobs], truncated)

    def _fault(self, what: str, fix: str = "look at its log") -> PluginError:
        client = self._server.client
        return PluginError(f"{client.who} {what}", fix=fix, url=client.url)
