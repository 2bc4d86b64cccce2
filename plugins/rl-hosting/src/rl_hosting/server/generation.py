"""The base class of backends for a server that is already running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from rl_backends import TAGS, GenerationBackend, ModelFacts
from rl_core.errors import CapabilityError, ConfigError
from rl_hosting._remote_receiver import RemoteReceiver
from rl_hosting._remote_sink import RemoteSink
from rl_hosting.server.checkpoint import Checkpoint
from rl_hosting.server.client import ServerClient
from rl_hosting.server.config import ServerConfig, check_server_config
from rl_hosting.server.rows import ServerRows
from rl_hosting.server.server import ServerWorkers

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends import Receiver, RowEngine
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import Cluster, WeightSink, WorkerContext
    from rl_core.weights.engine_lock import EngineLock
    from rl_hosting.server.server import Server

__all__ = ["ServerGeneration"]

_CONNECT_S, _SILENCE_S, _ROOM = 10.0, 300.0, 256
#: Seconds to close connections when the client ends, and for the server to abort rows.
_GOODBYE_S, _DRAIN_S = 5.0, 20.0


class ServerGeneration(GenerationBackend):
    """Generates with a server that already runs, over HTTP, and refits its weights.

    The server goes on when this object ends, with the weights that it has then.

    Args:
        cluster: Only None: replicas would be clients of one server.
        config: A :attr:`config_type`.

    Raises:
        ConfigError: A key is wrong; or there is no server, it serves another model, or refuses the
            key.
        CapabilityError: The server cannot do what the configuration demands.
        IncompatiblePluginError: Its release was not tested.
        PluginError: It is no server of this engine.
        DeadlineError: It does not answer.
    """

    #: Name of the backend.
    backend_name: ClassVar[str]
    #: The TypedDict of its configuration.
    config_type: ClassVar[type] = ServerConfig
    #: Knows the engine's routes.
    server_type: ClassVar[type[Server]]

    initially_resident = TAGS

    def __init__(
        self, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        given = {"backend": self.backend_name, **(config or {})}
        checked = check_server_config(self.config_type, given, type(self).__name__)
        self.check_config(checked)
        if cluster is not None:
            raise self._alone()
        checkpoint = Checkpoint.load(checked)
        connect_s = checked.get("connect_timeout_s", _CONNECT_S)
        key, url = checked.pop("api_key", None), checked["url"]
        self._client = ServerClient(
            self.server_type.name, url, api_key=key, connect_timeout_s=connect_s
        )
        try:
            self._server = self.server_type(
                self._client, checkpoint, checked, answer_s=connect_s, on_lost=self._lost
            )
            found, facts = self._server.facts, checkpoint.facts
            self.receiver_count = found.workers
            longest = min(facts.max_model_len, found.longest_row)
            super().__init__(
                checked,
                ModelFacts(facts.pad_token_id, facts.eos_token_ids, facts.vocab_size, longest),
            )
        except BaseException:
            self._client.close(_GOODBYE_S)
            raise
        self._rows = ServerRows(
            self._server,
            room=checked.get("max_requests", _ROOM),
            silence_s=checked.get("request_timeout_s", _SILENCE_S),
        )
        if found.weights != found.loaded:  # of another client's refit
            self._lost()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`GenerationBackend.from_config`."""
        if worker is not None and worker.world_size > 1:
            raise cls._alone()
        return cls(None, config)

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuses what no server of this engine can do."""

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._rows

    def _accept(self, data: BatchedDataDict[Any], greedy: bool, method: str) -> Any:
        drawn = not greedy and self.config.get("do_sample", True)
        if drawn and data.get("seed") is not None and self._server.facts.without_seeds:
            raise CapabilityError(
                f"the seeds of rows have no effect: {self._client.who} "
                f"{self._server.facts.without_seeds}",
                fix="start it so that it does, or leave the seeds out",
                capability="seed",
            )
        return super()._accept(data, greedy, method)

    # -- lifecycle --------------------------------------------------------------------------------

    def on_wake(self, tags: frozenset[str]) -> None:
        """Nothing: the server is always awake."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        """Nothing: the server's memory is its own."""

    def on_shutdown(self) -> None:
        """Ends the connections; the server goes on."""
        self._client.close(_GOODBYE_S)

    # -- refit ------------------------------------------------------------------------------------

    def make_receiver(self, lock: EngineLock) -> Receiver:
        """The receivers in the server's workers, as one."""
        self._remote = RemoteReceiver(
            ServerWorkers(self._server),
            count=self.receiver_count,
            answer_s=self._server.answer_s,
            lock=lock,
            busy=lambda: True,  # with other clients' rows
            on_commit=self._on_commit,
            wake=lambda: None,
        )
        return self._remote

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        """See :meth:`GenerationInterface.prepare_refit_info`.

        Raises:
            CapabilityError: The server takes no refits.
            ManifestMismatchError: The tensors are not those of the engine; nothing was touched.
        """
        self._check_open("prepare_refit_info")
        self._server.check_refit()
        super().prepare_refit_info(state_dict_info)

    def weight_sink(self) -> WeightSink:
        """The server's weights, for checks; refits write to sinks in the server's processes."""
        return RemoteSink(self._remote)

    def call_in_workers(self, function: str, **arguments: Any) -> list[Any]:
        """See :meth:`GenerationBackend.call_in_workers`: in the server's workers."""
        return self._remote.call(function, arguments)

    def invalidate_kv_cache(self) -> bool:
        """Has the server forget the keys and values of prompts seen so far.

        Raises:
            PluginError: It refused, because a client generates with it.
        """
        self._rows.drain(_DRAIN_S)
        self._client.run(self._server.reset_caches(), self._server.answer_s, "a reset of its cache")
        return True

    def _on_commit(self, version: int) -> None:
        """Counts on the new weights; the server has labelled them, and has reset its caches."""
        self._server.committed(self._remote.label)

    def _lost(self) -> None:
        self._remote.torn = True

    @classmethod
    def _alone(cls) -> ConfigError:
        return ConfigError(
            f"the backend {cls.backend_name} takes no cluster: replicas of it would be clients of "
            "one server",
            fix="build it without a cluster; one client is enough for a server of any size",
            key="cluster",
        )
