"""What the author of a backend writes about an engine that runs in a separate process."""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Self

from rl_backends import FailedRow, Row, SamplingParams
from rl_core.errors import CapabilityError, ConfigError, PluginError, RLError
from rl_hosting._messages import Reply, Request, decode, encode, error_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from rl_backends import Completion

__all__ = ["Engine"]


class Engine(ABC):
    """An engine, alone in its process. The main thread calls all methods, one after the other.

    Attributes:
        facts: Plain values for the driver, where they are ``HostedGeneration.engine_facts``:

            - ``pad_token_id``, ``eos_token_ids``, ``vocab_size``, ``max_model_len``: see
              :class:`rl_backends.ModelFacts`;
            - ``workers``: processes that hold a part of the model; 1 by default;
            - ``has_tokenizer``: False if it cannot find stop strings, so that rows which have some
              fail before the engine sees them; True by default;
            - whatever else the backend wants to know.
    """

    facts: dict[str, Any]

    @classmethod
    @abstractmethod
    def start(cls, config: Mapping[str, Any]) -> Self:
        """Loads a model.

        Args:
            config: The checked configuration of the backend.
        """

    @abstractmethod
    def submit(self, rows: Sequence[Row]) -> None:
        """Takes rows; they are decoded from the next :meth:`step` on.

        A row that cannot be taken comes back from :meth:`step` as a :class:`FailedRow`.
        """

    @abstractmethod
    def step(self) -> Sequence[Completion | FailedRow]:
        """Decodes all rows a little, such as by one token.

        Returns:
            The rows that ended meanwhile, by their keys.
        """

    @abstractmethod
    def cancel(self, keys: Collection[int]) -> None:
        """Forgets rows, by their keys; some of them may have ended."""

    def tokens_made(self) -> int:
        """A number that changes while the engine decodes; a change is a sign of life.

        By default every return from :meth:`step` is a change.
        """
        return time.monotonic_ns()

    @abstractmethod
    def call_workers(self, frame: bytes) -> list[bytes]:
        """Hands a frame to :meth:`rl_hosting.WorkerRefits.answer_frame` in every worker.

        Returns:
            The answer of each worker, in the order of their ranks.
        """

    def check_refits(self) -> None:
        """Makes sure that refits reach every worker; for the :meth:`start` of an engine.

        Raises:
            CapabilityError: In a worker the sink's ``begin`` refused.
        """
        self._ask_workers(Request("check"))

    def serving_adapter(self) -> tuple[int, int]:
        """The adapter that rows are to name from now on, and its version; 0 for none.

        For engines whose workers have a :class:`rl_backends.engine.adapters.AdapterSink`.

        Raises:
            PluginError: The workers have different ones.
        """
        call = {"function": "rl_backends.engine.adapters:serving", "arguments": {}}
        found = {tuple(answer) for answer in self._ask_workers(Request("call", call))}
        if len(found) > 1:
            raise PluginError(
                f"the workers of the engine serve different adapters: {sorted(found)}",
                fix="call refit again",
            )
        [(adapter, version)] = found
        return adapter, version

    def _ask_workers(self, request: Request) -> list[Any]:
        answers = [decode(one, type=Reply) for one in self.call_workers(encode(request))]
        errors = [error for answer in answers if (error := error_of(answer)) is not None]
        if errors:  # of those that only waited for another worker's, none
            raise min(errors, key=lambda e: not isinstance(e, CapabilityError | ConfigError))
        return [answer.value for answer in answers]

    def check_rows(self, model: str) -> None:
        """Makes sure that it can decode, with one short row; for the :meth:`start` of an engine.

        Some engines load models of which they have no kernel for a size. They know it only when
        they compute.

        Args:
            model: How errors call it.

        Raises:
            ConfigError: It cannot.
        """
        # Not a pad token: of its zeros some models make NaN, which a cache may keep.
        self.submit([Row(0, 0, 0, [*range(3, 10)], 2, 0, False, (), SamplingParams(greedy=True))])
        error: BaseException | None = None
        try:
            while not (done := self.step()):
                pass
            error = done[0].error if isinstance(done[0], FailedRow) else None
        except Exception as raised:  # whatever engines raise
            error = raised
        # It computed, and what it found is no number; or the row does not fit into its context.
        if isinstance(error, PluginError | ValueError):
            error = None
        if isinstance(error, RLError):
            raise error
        if error is not None:
            frames = traceback.extract_tb(error.__traceback__)
            text = str(error) or (frames[-1].line if frames else None)  # of a bare assertion
            raise ConfigError(
                f"the engine loaded {model}, but cannot compute with it: {type(error).__name__}: "
                f"{text}",
                fix="use a model with sizes for which the engine has kernels on this device (heads "
                "of 64 or 128, for example), or another attention backend of the engine",
                key="model_name",
            ) from error
        self.reset_caches()

    def wake(self, tags: Sequence[str]) -> None:
        """Allocates again what :meth:`sleep` freed: ``"weights"``, ``"kv_cache"`` or both."""

    def sleep(self, tags: Sequence[str], level: int) -> None:
        """Frees memory, as far as the backend's manifest declares.

        Args:
            tags: Of what: ``"weights"``, ``"kv_cache"`` or both.
            level: ``HostedGeneration.sleep_level``.
        """

    def reset_caches(self) -> bool:
        """Forgets the keys and values of earlier prompts.

        Returns:
            Whether it did.
        """
        return True

    @abstractmethod
    def shutdown(self) -> None:
        """Ends all that the engine started."""
