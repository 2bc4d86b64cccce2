"""The backend for an SGLang server that is already running."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from rl_backends import TAGS, GenerationBackend, ModelFacts
from rl_core.errors import CapabilityError, ConfigError
from rl_core.weights import RefitReceiver
from rl_sglang.server.checkpoint import Checkpoint
from rl_sglang.server.client import ServerClient
from rl_sglang.server.config import check_server_config
from rl_sglang.server.peer import Server
from rl_sglang.server.rows import ServerRows
from rl_sglang.server.weights import DiskSink, SharedFile

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rl_backends import Receiver, RowEngine
    from rl_core.batch import BatchedDataDict
    from rl_core.interfaces import (
        Cluster,
        TensorSpec,
        WeightSink,
        WorkerContext,
    )
    from rl_core.weights.engine_lock import EngineLock

__all__ = ["SglangServerGeneration"]

_CONNECT_S, _SILENCE_S, _LOAD_S, _ROOM = 10.0, 300.0, 120.0, 256
#: Seconds for what is under way when the client ends.
_GOODBYE_S = 5.0


class SglangServerGeneration(GenerationBackend):
    """Generates with an SGLang server that somebody else started, over HTTP.

    The server goes on when this object ends, with the weights that it has then.

    Args:
        cluster: Only None: replicas would be clients of one server.
        config: A :class:`~rl_sglang.server.config.SglangServerConfig`.

    Raises:
        ConfigError: A key is wrong; or there is no server, it serves another model, or refuses the
            key.
        CapabilityError: The server cannot do what is asked for.
        IncompatiblePluginError: Its release was not tested.
        PluginError: It is no SGLang server.
        DeadlineError: It does not answer.
    """

    initially_resident = TAGS

    def __init__(
        self, cluster: Cluster | None = None, config: Mapping[str, Any] | None = None
    ) -> None:
        checked = check_server_config({"backend": "sglang-server", **(config or {})})
        if cluster is not None:
            raise _alone()
        checkpoint = Checkpoint.load(checked)
        connect_s = checked.get("connect_timeout_s", _CONNECT_S)
        self._client = ServerClient(
            checked["server_url"], api_key=checked.pop("api_key", None), connect_timeout_s=connect_s
        )
        try:
            self._server = Server(
                self._client, checkpoint, checked, answer_s=connect_s, on_lost=self._lost
            )
            facts = checkpoint.facts
            longest = min(facts.max_model_len, self._server.facts.longest_row)
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
        self._file = SharedFile(checked.get("weights_dir"))
        self._specs: list[TensorSpec] | None = None
        if not self._server.has_loaded_weights:  # of somebody's refit, and nobody knows which
            self._lost()

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        """See :meth:`GenerationBackend.from_config`."""
        if worker is not None and worker.world_size > 1:
            raise _alone()
        return cls(None, config)

    def row_engine(self) -> RowEngine:
        """See :meth:`GenerationBackend.row_engine`."""
        return self._rows

    def _accept(self, data: BatchedDataDict[Any], greedy: bool, method: str) -> Any:
        drawn = not greedy and self.config.get("do_sample", True)
        if drawn and data.get("seed") is not None and not self._server.facts.deterministic:
            raise CapabilityError(
                "the seeds of rows have no effect: the SGLang server at "
                f"{self._client.url} does not sample deterministically",
                fix="start it with --enable-deterministic-inference, or leave the seeds out",
                capability="seed",
            )
        return super()._accept(data, greedy, method)

    # -- lifecycle --------------------------------------------------------------------------------

    def on_wake(self, tags: frozenset[str]) -> None:
        """Nothing: the server is always awake."""

    def on_sleep(self, tags: frozenset[str]) -> None:
        """Nothing: the server's memory is its own."""

    def on_shutdown(self) -> None:
        """Ends the connections, and removes the weights' file; the server goes on."""
        self._client.close(_GOODBYE_S)
        self._file.close()

    # -- refit ------------------------------------------------------------------------------------

    def make_receiver(self, lock: EngineLock) -> Receiver:
        """See :meth:`GenerationBackend.make_receiver`; the server drops its caches as it loads."""
        self._refits = RefitReceiver(self.weight_sink, name=type(self).__name__, lock=lock)
        return self._refits

    def weight_sink(self) -> WeightSink:
        """See :meth:`GenerationBackend.weight_sink`."""
        server = self._server
        if self._specs is None:
            dtype = self.config.get("torch_dtype") or server.facts.dtype
            if dtype in ("auto", "half", "float"):
                dtype = {"half": "float16", "float": "float32"}.get(dtype, server.checkpoint.dtype)
            self._specs = list(server.checkpoint.specs(dtype))
        load_s = self.config.get("load_timeout_s", _LOAD_S)
        return DiskSink(server, self._rows, self._specs, self._file, load_s)

    def invalidate_kv_cache(self) -> bool:
        """Has the server forget the keys and values of prompts seen so far.

        Raises:
            PluginError: It refused: somebody generates with it.
        """
        self._server.flush(self.config.get("connect_timeout_s", _CONNECT_S))
        return True

    def _lost(self) -> None:
        self._refits.dropped()


def _alone() -> ConfigError:
    return ConfigError(
        "the backend sglang-server takes no cluster: replicas of it would be clients of one server",
        fix="build it without a cluster; one client is enough for a server of any size",
        key="cluster",
    )
