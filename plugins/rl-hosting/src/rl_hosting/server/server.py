"""One server that already runs: what it serves, its weights, and its routes."""

from __future__ import annotations

import base64
import contextlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rl_backends.engine.checkpoint import check_positions
from rl_core.errors import (
    CapabilityError,
    ConfigError,
    IncompatiblePluginError,
    PluginError,
    WeightsTornError,
    WorkerDiedError,
)
from rl_hosting.worker_refits import TORN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rl_backends.generation.rows import Row
    from rl_core.errors import RLError
    from rl_hosting.server.checkpoint import Checkpoint
    from rl_hosting.server.client import ServerClient

__all__ = ["Part", "Server", "ServerFacts", "Weights", "read_version"]


#: How often a server that is new is looked at again: if it is another one then, there are several,
#: because a restart takes longer.
_LOOKS = 3


class Weights(msgspec.Struct, frozen=True):
    """Which weights a server has, as far as it reports them.

    Attributes:
        label: Given by the refit that brought them.
        path: The directory that they were loaded from; empty if the engine does not report it.
    """

    label: str
    path: str = ""


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is true of one start of a server.

    Attributes:
        start: Differs between any two starts.
        path: The checkpoint that it started with.
        loaded: The weights that it started with.
        weights: The weights that it has now.
        model: Names of the model's classes, and its type; empty if the engine reports none.
        longest_prompt: Tokens.
        longest_row: Tokens of a prompt and its completion.
        workers: Processes that have parts of the weights.
        without_seeds: Why seeds have no effect, or nothing.
        without_refits: Why it takes no refits, or nothing.
        unusable: Why its answers do not mean what they should, and what to do; or nothing.
    """

    start: str
    path: str
    loaded: Weights
    weights: Weights
    model: tuple[str, ...] = ()
    longest_prompt: int
    longest_row: int
    workers: int = 1
    without_seeds: str = ""
    without_refits: str = ""
    unusable: tuple[str, str] | None = None


class Part(msgspec.Struct):
    """What one event of a stream has of a row.

    Attributes:
        ids: Tokens.
        logprobs: As many.
        reason: Why the row ended: ``"stop"``, ``"length"``, other words of the server, or nothing
            while it goes on.
        labels: Of the weights that computed the tokens, as far as the event has them.
        whole: It repeats all tokens so far.
    """

    ids: list[int]
    logprobs: list[float]
    reason: str
    labels: set[str]
    whole: bool = False


class Server(ABC):
    """A running server, and the weights that this process counts on.

    Args:
        client: Talks to it.
        checkpoint: The model that is meant.
        config: The checked configuration.
        answer_s: Seconds for answers that need no generation.
        on_lost: Called when the server turns out to have other weights.

    Attributes:
        facts: Of the start that was looked at last.
        counted_on: The weights that rows must be of.

    Raises:
        ConfigError: There is no server, or of another model, or it refuses the key.
        IncompatiblePluginError: It is of a release that was not tested.
        CapabilityError: As it was started, it cannot do what the configuration demands.
        PluginError: It is no server of this engine.
        DeadlineError: It does not answer.
    """

    #: Of the engine.
    name: ClassVar[str]
    #: The route that generates.
    generate_path: ClassVar[str]

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
        self.config = config
        self.answer_s = answer_s
        self._sampled = config.get("do_sample", True)
        self._on_lost = on_lost
        self._measured = False
        try:
            self.facts = client.run(self._look(None), 4 * answer_s, "what it serves")
        except WorkerDiedError as error:
            raise ConfigError(
                f"no server answers at {client.url}: {error.message}",
                fix=f"start a server of {self.name} there, or correct url",
                key="url",
            ) from error
        self.counted_on = self.facts.loaded

    # -- the routes of an engine -------------------------------------------------------------------

    @abstractmethod
    async def look(self) -> ServerFacts:
        """Reads what the server reports of itself."""

    async def measure(self) -> None:
        """Finds out what the server does not report, once for each start.

        Raises:
            WeightsTornError: A refit must come first.
        """

    @abstractmethod
    def request(self, row: Row, name: str, *, look_every: int | None) -> dict[str, Any]:
        """The body for :attr:`generate_path`.

        Args:
            row: The row.
            name: Of the row, at the server.
            look_every: Tokens of one event, where the row may be ended here before the server does.
        """

    @abstractmethod
    def part(self, event: dict[str, Any]) -> Part:
        """Reads an event of a stream.

        Raises:
            KeyError, TypeError, ValueError, IndexError: It is no part of a row.
        """

    @abstractmethod
    async def abort(self, name: str, timeout_s: float) -> None:
        """Has the server give up a row."""

    @abstractmethod
    async def progress(self, timeout_s: float) -> Any:
        """What changes whenever a row of any client gets a token."""

    @abstractmethod
    async def paused(self, timeout_s: float) -> bool:
        """Whether somebody paused the server."""

    @abstractmethod
    async def call_workers(self, frame: str, timeout_s: float) -> list[str]:
        """Has every worker answer a frame of a refit; frame and answers are in base64."""

    @abstractmethod
    async def reset_caches(self) -> None:
        """Has the server forget the keys and values of prompts.

        Raises:
            PluginError: It refused.
        """

    def ends_rows_itself(self, stops: frozenset[int]) -> bool:
        """Whether the server ends a row at these tokens, and at no other."""
        del stops
        return True

    # -- whether it still is who it was -----------------------------------------------------------

    async def confirm(self) -> None:
        """Makes sure that the server is there, and has the weights that are counted on.

        Raises:
            WeightsTornError: It was started again since a refit, or another client changed its
                weights.
            RLError: As the constructor; a server that has ended raises a
                :class:`~rl_core.errors.WorkerDiedError`.
        """
        before = self.facts
        self.facts = await self._look(before)
        if self.facts.longest_row < before.longest_row:
            raise ConfigError(
                f"{self.client.who} was restarted with a context of "
                f"{self.facts.longest_row} tokens; before it had {before.longest_row}",
                fix="start it with the arguments that it had before, or build a new backend",
                key="url",
            )
        if self.facts.weights != self.counted_on:
            raise self.lost(self.facts.weights.label)

    def check_whole(self, why: str) -> None:
        """Raises the error for torn weights, if they are why the server refuses or ends a row.

        Args:
            why: What the server says.

        Raises:
            WeightsTornError: The last refit, of any client, left them so.
        """
        _, torn, reason = why.partition(TORN)
        if torn:
            raise WeightsTornError(
                f"{self.client.who} refuses rows: {reason}",
                fix="call refit again; the server needs no restart",
                url=self.client.url,
            )

    def lost(self, label: str) -> WeightsTornError:
        """The error for other weights than these; from now on nothing is generated.

        Args:
            label: Of the weights that the server has instead.
        """
        self._on_lost()
        return WeightsTornError(
            f"{self.client.who} has weights {label!r} instead of "
            f"{self.counted_on.label!r}: it was restarted, or another client changed them",
            fix="call refit again; the server's other clients then get these weights, too",
            url=self.client.url,
        )

    # -- refits -----------------------------------------------------------------------------------

    def check_refit(self) -> None:
        """Makes sure that a refit can begin; nothing was touched.

        Raises:
            CapabilityError: The server takes none.
            RLError: As :meth:`confirm`, but for its weights.
        """
        self.facts = self.client.run(self._look(self.facts), 4 * self.answer_s, "what it serves")
        if self.facts.without_refits:
            raise CapabilityError(
                f"{self.client.who} takes no refit: {self.facts.without_refits}",
                fix="start it as the guide on servers that are already running shows",
                capability="refit",
            )

    def committed(self, label: str) -> None:
        """Counts on the weights of a refit from now on.

        Raises:
            WeightsTornError: The server has others.
        """
        asked = self._look(self.facts)
        self.facts = self.client.run(asked, 4 * self.answer_s, "which weights it has")
        self.counted_on = Weights(label, self.facts.weights.path)
        if self.facts.weights != self.counted_on:
            raise self.lost(self.facts.weights.label)

    async def _look(self, known: ServerFacts | None) -> ServerFacts:
        """What the server reports of itself; one that was started since is checked anew."""
        facts = await self.look()
        if known is None or known.start != facts.start:
            for _ in range(_LOOKS):
                if (await self.look()).start != facts.start:
                    raise ConfigError(
                        f"several servers of {self.name} answer at {self.client.url} in turn; a "
                        "refit would reach one of them",
                        fix="set url to the address of one server, not to that of a load balancer, "
                        "and start no two servers at one port",
                        key="url",
                    )
            self._check(facts)
            self._measured = False
        if not self._measured:
            with contextlib.suppress(WeightsTornError):
                await self.measure()
                self._measured = True
        return facts

    def _check(self, facts: ServerFacts) -> None:
        """Makes sure that the server serves the model, and that its answers can be used.

        The model is the same if it was loaded from the same directory, or, where the server has
        another view of the file system, if classes and type are equal, or, where the engine does
        not report these, the names of the directories.
        """
        who, ours, path = self.client.who, self.checkpoint, Path(facts.path)
        same = facts.model == ours.model if facts.model else path.name == ours.directory.name
        if not same and path.resolve() != ours.directory.resolve():
            raise ConfigError(
                f"{who} serves {' '.join((facts.path, *facts.model))}, but model_name is "
                f"{' '.join((str(ours.directory), *ours.model))}",
                fix="set model_name to the checkpoint that the server serves, or url to a "
                "server of this checkpoint",
                key="model_name",
            )
        if facts.unusable is not None:
            why, fix = facts.unusable
            raise CapabilityError(f"{who} cannot be used: {why}", fix=fix, url=self.client.url)
        text = ours.settings.get_text_config()
        check_positions(text, facts.longest_row, what=f"the context of {who}", key="url")
        if self._sampled and self.config.get("seed") is not None and facts.without_seeds:
            raise CapabilityError(
                f"seed has no effect: {who} {facts.without_seeds}",
                fix="start it so that it does, or leave seed out",
                capability="seed",
                key="seed",
            )


class ServerWorkers:
    """The workers of a server, for :class:`rl_hosting._remote_receiver.RemoteReceiver`.

    Args:
        server: The server.
    """

    def __init__(self, server: Server) -> None:
        self.name = server.client.who
        self._server = server

    def call(self, what: str, timeout_s: float, *, call: bytes) -> list[bytes]:
        """Has every worker answer a frame."""
        frame = base64.b64encode(call).decode()
        asked = self._server.call_workers(frame, timeout_s)
        found = self._server.client.run(asked, timeout_s, what)
        return [base64.b64decode(one, validate=True) for one in found]

    def logs_in_errors(self) -> contextlib.AbstractContextManager[None]:
        """Nothing: the server's log is its own."""
        return contextlib.nullcontext()

    def with_log(self, error: RLError) -> RLError:
        """The error as it is."""
        return error


def read_version(who: str, version: Any, tested: str, engine: str) -> str:
    """The release of a server's engine.

    Args:
        who: The server, for errors.
        version: What it reports.
        tested: The releases that were tested.
        engine: Name of the engine.

    Raises:
        IncompatiblePluginError: It is another.
        PluginError: It is no release.
    """
    try:
        found = Version(str(version))
    except InvalidVersion:
        raise PluginError(
            f"{who} does not report its version of {engine}",
            fix=f"check that url is the address of a server of {engine}",
        ) from None
    if not SpecifierSet(tested).contains(found, prereleases=True):
        raise IncompatiblePluginError(
            f"{who} has version {found}; {tested} is supported",
            fix=f'install "{engine.lower()}{tested}" for the server, or newer plugins here',
            version=str(found),
        )
    return str(found)
