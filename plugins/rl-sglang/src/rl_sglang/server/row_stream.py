"""What a server says of one row, understood event by event; no I/O."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from rl_backends import Completion
from rl_backends.generation.stop_strings import StopStrings
from rl_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from rl_backends.generation.rows import Row
    from rl_sglang.server.checkpoint import Checkpoint

__all__ = ["RowStream"]

#: Tokens after which a row that is cut here is looked at again: as many may be decoded in vain. A
#: stream repeats all that came before, so that fewer would cost more.
_LOOK_EVERY = 16


class RowStream:
    """One row, from the request to its last token.

    A row ends at the first token that is a stop token, or that completes a stop string. SGLang
    itself ends one at the stop tokens that it is given and at those of its model, or, told
    ``ignore_eos``, at none; so where the model's are not to end a row, it is cut here.

    Args:
        row: The row.
        checkpoint: Of the model.
        url: Of the server, for errors.
        incremental: Whether an event has the new tokens alone.

    Raises:
        ConfigError: It has stop strings, and there is no tokenizer.
    """

    def __init__(self, row: Row, checkpoint: Checkpoint, url: str, *, incremental: bool) -> None:
        self._row = row
        self._checkpoint = checkpoint
        self._url = url
        self._incremental = incremental
        self._ends = frozenset(row.sampling.stop_token_ids)
        self._ends_by_itself = checkpoint.ends <= self._ends
        self._stops: StopStrings | None = None
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
        #: The server has said its last word.
        self.ended = False

    def request(self, name: str, *, seeded: bool) -> dict[str, Any]:
        """What ``/generate`` is to be asked.

        Args:
            name: Of the row, at the server.
            seeded: Whether the server draws from a row's seed.
        """
        sampling, greedy = self._row.sampling, self._row.sampling.greedy
        cut_here = self._stops is not None or not self._ends_by_itself
        params = {
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_k": -1 if greedy or not sampling.top_k else sampling.top_k,
            "top_p": 1.0 if greedy else sampling.top_p,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "min_new_tokens": 0,
            "max_new_tokens": self._row.budget,
            "stop": None,
            "stop_token_ids": sorted(self._ends),
            "ignore_eos": not self._ends_by_itself,
            "n": 1,
            "stream_interval": _LOOK_EVERY if cut_here else self._row.budget,
        }
        if seeded:  # without one, all rows of a deterministic server would draw alike
            params["sampling_seed"] = self._row.seed
        return {
            "input_ids": list(self._row.token_ids),
            "sampling_params": params,
            "return_logprob": True,
            "stream": True,
            "rid": name,
        }

    def take(self, event: dict[str, Any]) -> tuple[Completion | None, set[str]]:
        """Takes an event.

        Returns:
            The row if it is complete, and the labels of the weights that computed its tokens.

        Raises:
            PluginError: The server refused the row, gave it up, or said what is no part of a row.
        """
        if "error" in event:
            error = event["error"]
            raise self._fault(
                f"refused a row: {error.get('message') if isinstance(error, dict) else error}"
            )
        try:
            meta = event["meta_info"]
            ids = [int(token) for token in event["output_ids"]]
            logprobs = [float(one[0]) for one in meta["output_token_logprobs"]]
            spans = meta.get("weight_versions") or []
            versions = {str(meta["weight_version"]), *(str(one["version"]) for one in spans)}
            reason = meta["finish_reason"]
            kind = None if reason is None else reason["type"]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise self._fault(
                f"sent a malformed part of a row: {type(error).__name__}: {error}"
            ) from error
        self.ended = kind is not None
        if kind == "abort":
            raise self._fault(
                f"aborted a row: {reason.get('message')}",
                fix="look at its log; another client may abort all requests",
            )
        self._ids = self._ids + ids if self._incremental else ids
        self._logprobs = self._logprobs + logprobs if self._incremental else logprobs
        longest = min(len(self._ids), self._row.budget)
        for count in range(self._seen + 1, longest + 1):
            token = self._ids[count - 1]
            matched = self._stops is not None and self._stops.push(token)
            if matched or token in self._ends:
                return self._completion(count, truncated=False), versions
        self._seen = longest
        if kind == "length":
            return self._completion(longest, truncated=True), versions
        if kind is not None:
            raise self._fault(
                f"ended a row at token {self._ids[-1] if self._ids else None}, which is not a stop "
                f"token of this call: {reason}",
                fix="if it is a stop token of the server's checkpoint, copy that checkpoint's "
                "generation_config.json to model_name; if the reason is NaN, check the weights",
            )
        return None, versions

    def _completion(self, count: int, *, truncated: bool) -> Completion:
        ids, logprobs = self._ids[:count], self._logprobs[:count]
        size = self._checkpoint.facts.vocab_size
        if len(self._ids) != len(self._logprobs) or not all(0 <= token < size for token in ids):
            raise self._fault(
                f"returned {len(self._ids)} tokens and {len(self._logprobs)} log-probs for a row, "
                "or tokens outside of the model's vocabulary",
                fix="check that it serves the model of model_name",
            )
        if not all(math.isfinite(one) for one in logprobs):
            raise self._fault(
                "returned a log-prob that is not finite",
                fix="check the weights for NaN; float16 overflows where bfloat16 does not",
            )
        # A log-prob of more than 0 is a rounding error.
        return Completion(self._row.key, ids, [min(0.0, one) for one in logprobs], truncated)

    def _fault(self, what: str, fix: str = "look at its log") -> PluginError:
        return PluginError(f"the SGLang server at {self._url} {what}", fix=fix, url=self._url)
