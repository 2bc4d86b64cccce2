"""One server: who it is, which weights it has, and whether it still is who it was."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any

from rl_core.errors import (
    CapabilityError,
    ConfigError,
    PluginError,
    RefitError,
    WeightsTornError,
    WorkerDiedError,
)
from rl_sglang.server.facts import ServerFacts, Weights, check_facts, read_facts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from rl_sglang.server.checkpoint import Checkpoint
    from rl_sglang.server.client import ServerClient

__all__ = ["Server"]

#: Candidates whose log-probs are compared, prompts that are tried, and how far apart two
#: candidates must be for a temperature to show.
_CANDIDATES, _PROMPTS, _APART = 16, 4, 1e-2


class Server:
    """A running server and the weights that this process counts on.

    Args:
        client: Talks to it.
        checkpoint: The model that is meant.
        config: A checked :class:`~rl_sglang.server.config.SglangServerConfig`.
        answer_s: Seconds for answers that need no generation.
        on_lost: Called when the server turns out to have other weights.

    Attributes:
        facts: Of the start that was looked at last.
        counted_on: The weights that rows must be of.

    Raises:
        ConfigError: There is no server, or of another model, or it refuses the key.
        IncompatiblePluginError: It is of a release that was not tested.
        CapabilityError: It was started in a way that it cannot do what is asked for.
        PluginError: It is no SGLang server.
        DeadlineError: It does not answer.
    """

    def __init__(
        self,
        client: ServerClient,
        checkpoint: Checkpoint,
        config: Mapping[str, Any],
        *,
        answer_s: float,
        on_lost: Callable[[], None],
    ) -> None:
        self.client = client
        self.checkpoint = checkpoint
        sampled = config.get("do_sample", True)
        self._seeded = sampled and config.get("seed") is not None
        self._temperature = config.get("temperature", 1.0) if sampled else 1.0
        self._raw = config.get("logprobs_mode", "processed") == "raw"
        self._answer_s = answer_s
        self._on_lost = on_lost
        self._token = secrets.token_hex(6)
        try:
            self.facts: ServerFacts = client.run(self._look(None), 4 * answer_s, "/server_info")
        except WorkerDiedError as error:
            raise ConfigError(
                f"no server answers at {client.url}: {error.message}",
                fix="start an SGLang server there, or correct server_url",
                key="server_url",
            ) from error
        self.counted_on = self.facts.loaded

    @property
    def has_loaded_weights(self) -> bool:
        """Whether it has the weights that it started with."""
        return self.facts.weights == self.facts.loaded

    async def confirm(self) -> None:
        """Makes sure that the server is there, and has the weights that are counted on.

        Raises:
            WeightsTornError: It was started again since a refit, or somebody else changed its
                weights.
            RLError: As where it was looked at first; a server that is gone is a
                :class:`~rl_core.errors.WorkerDiedError`.
        """
        before = self.facts
        self.facts = await self._look(before)
        if self.facts.longest_row < before.longest_row:
            raise ConfigError(
                f"the SGLang server at {self.client.url} was restarted with a context of "
                f"{self.facts.longest_row} tokens; before it had {before.longest_row}",
                fix="start it with the arguments that it had before, or build a new backend",
                key="server_url",
            )
        if self.facts.weights != self.counted_on:
            raise self.lost(self.facts.weights.version)

    def lost(self, version: str) -> WeightsTornError:
        """The error for weights that nobody counts on; from now on nothing is generated.

        Args:
            version: The label that the server has instead.
        """
        self._on_lost()
        return WeightsTornError(
            f"the SGLang server at {self.client.url} has weights {version!r} instead of "
            f"{self.counted_on.version!r}: it was restarted, or another client changed them",
            fix="call refit again; the server's other clients then get these weights, too",
            url=self.client.url,
        )

    def check_refit(self) -> None:
        """Makes sure that a refit can begin; nothing was touched.

        Raises:
            CapabilityError: The server takes none.
            RLError: As :meth:`confirm`, but for its weights.
        """
        self.facts = self.client.run(self._look(self.facts), 4 * self._answer_s, "/server_info")
        if self.facts.without_refits:
            raise CapabilityError(
                f"the SGLang server at {self.client.url} takes no refit: "
                f"{self.facts.without_refits}",
                fix="start a server of a checkpoint that is not quantised, without a weight cache",
                capability="refit",
            )

    def load(self, directory: Path, version: int, timeout_s: float) -> None:
        """Has the server load weights, and forget what it cached under the old ones.

        Args:
            directory: With the tensors, as safetensors.
            version: Of the refit.
            timeout_s: Seconds for the server; it waits for requests of others, too.

        Raises:
            RefitError: It could not; what it has now is not known.
            DeadlineError: It did not end in time.
            WorkerDiedError: It went away.
        """
        wanted = Weights(f"rl-{self._token}-{version}", str(directory))
        self.counted_on = Weights("", "")  # until it says so, nobody knows
        request = {
            "model_path": str(directory),
            "load_format": "safetensors",
            "weight_version": wanted.version,
            "flush_cache": True,
            "abort_all_requests": False,
        }
        path = "/update_weights_from_disk"
        asked = self.client.post(path, request, timeout_s)
        status, answer = self.client.run(asked, timeout_s, path)
        if status != 200 or answer.get("success") is not True:
            raise RefitError(
                f"the SGLang server at {self.client.url} did not load version {version} from "
                f"{directory}: {answer.get('message') or answer or status}",
                fix="look at its log; it must be able to read weights_dir at the same path",
                phase="SEAL",
            )
        self.facts = self.client.run(self._look(self.facts), 4 * self._answer_s, "/model_info")
        if self.facts.weights != wanted:
            raise RefitError(
                f"the SGLang server at {self.client.url} reports weights "
                f"{self.facts.weights.version!r} of {self.facts.weights.path} after it loaded "
                f"{wanted.version!r} of {wanted.path}",
                fix="call refit again, and let no other client change the server's weights",
                phase="SEAL",
            )
        self.counted_on = wanted

    def flush(self, timeout_s: float) -> None:
        """Has the server forget the keys and values of prompts.

        Raises:
            PluginError: It refused.
        """
        asked = self.client.post("/flush_cache", {}, timeout_s)
        status, answer = self.client.run(asked, timeout_s, "/flush_cache")
        if status != 200:
            raise PluginError(
                f"the SGLang server at {self.client.url} did not clear its prefix cache: "
                f"{answer.get('message') or status}",
                fix="call it again when no client generates with the server",
            )

    async def _look(self, known: ServerFacts | None) -> ServerFacts:
        """What the server says of itself; one that was started since is checked anew."""
        client = self.client
        model, server = await asyncio.gather(
            client.get("/model_info", self._answer_s), client.get("/server_info", self._answer_s)
        )
        facts = read_facts(client.url, model, server)
        if known is None or known.start != facts.start:
            check_facts(client.url, facts, self.checkpoint, seeded=self._seeded)
            if self._temperature != 1.0:
                await self._check_temperature()
        return facts

    async def _check_temperature(self) -> None:
        """Finds out what the server's log-probs are of, which it does not say.

        With the variable SGLANG_RETURN_ORIGINAL_LOGPROB they are of the logits, otherwise of the
        logits divided by the temperature.

        Raises:
            CapabilityError: They are not those that are asked for, or it does not show.
        """
        for token in range(min(_PROMPTS, self.checkpoint.facts.vocab_size)):
            plain, scaled = await asyncio.gather(
                self._candidates(token, 1.0), self._candidates(token, self._temperature)
            )
            both = [one for one in plain if one in scaled]
            apart = plain[both[0]] - plain[both[-1]] if both else 0.0
            seen = scaled[both[0]] - scaled[both[-1]] if both else 0.0
            divided = apart / self._temperature
            if abs(apart - divided) < _APART:
                continue
            is_raw = abs(seen - apart) < abs(seen - divided)
            if is_raw == self._raw:
                return
            other = "without" if is_raw else "with"
            raise CapabilityError(
                f"the SGLang server at {self.client.url} gives {'raw' if is_raw else 'processed'} "
                f"log-probs at temperature {self._temperature}, and logprobs_mode is "
                f"{'raw' if self._raw else 'processed'}",
                fix=f"start it {other} SGLANG_RETURN_ORIGINAL_LOGPROB=1, change logprobs_mode, or "
                "use temperature 1",
                capability="logprobs_mode",
                key="logprobs_mode",
            )
        raise CapabilityError(
            f"it cannot be measured whether the SGLang server at {self.client.url} applies the "
            f"temperature {self._temperature} to log-probs",
            fix="use temperature 1",
            capability="logprobs_mode",
            key="logprobs_mode",
        )

    async def _candidates(self, token: int, temperature: float) -> dict[int, float]:
        """The log-probs of the likeliest tokens after one token."""
        request = {
            "input_ids": [token],
            "sampling_params": {"temperature": temperature, "max_new_tokens": 1, "top_k": -1}
            | {"top_p": 1.0, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": _CANDIDATES,
        }
        status, answer = await self.client.post("/generate", request, self._answer_s)
        try:
            if status != 200:
                raise ValueError(f"{status}: {answer}")
            [found] = answer["meta_info"]["output_top_logprobs"]
            return {int(one[1]): float(one[0]) for one in found}
        except (KeyError, TypeError, ValueError) as error:
            raise PluginError(
                f"the SGLang server at {self.client.url} returned no log-probs for a prompt of one "
                f"token: {type(error).__name__}: {error}",
                fix="look at its log",
            ) from error
