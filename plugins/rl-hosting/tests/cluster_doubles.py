"""A test double of a backend: no engine, but every answer shows what the worker was given.

Workers import it by its entry point, from a directory on their ``PYTHONPATH``. Below it is what all
tests of launchers need.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NotRequired, Self

import psutil
import torch

from rl_backends import Completion, GenerationBackend, ModelFacts, PolicyRefits
from rl_backends.tensors import NamedTensorSink, NamedTensorSource
from rl_core.batch import BatchedDataDict
from rl_core.errors import ConfigError, DataError
from rl_core.interfaces import (
    GenerationConfig,
    PolicyConfig,
    WeightSink,
    WeightSource,
    WorkerContext,
)
from rl_core.interfaces.loss import LossFunction
from rl_core.plugins.manifest import (
    GENERATION_CAPABILITIES,
    POLICY_CAPABILITIES,
    BackendManifest,
    Capability,
    EngineRequirement,
)

VOCAB, PAD, EOS, CONTEXT = 1000, 0, 1, 64
#: Tokens of a prompt that make the double fail.
RAISE_FOREIGN, RAISE_DATA, EXIT = 901, 902, 903

NONE = Capability("unsupported", reason="a double")
BACKEND = BackendManifest(
    name="double",
    summary="A test double",
    factories={
        "generation": "cluster_doubles:DoubleGeneration",
        "policy": "cluster_doubles:DoublePolicy",
    },
    configs={
        "generation": "cluster_doubles:DoubleConfig",
        "policy": "cluster_doubles:DoublePolicyConfig",
    },
    capabilities={
        "generation": dict.fromkeys(GENERATION_CAPABILITIES, NONE),
        "policy": dict.fromkeys(POLICY_CAPABILITIES, NONE),
    },
    engine=EngineRequirement(("torch",), ">=2"),
)


class DoubleConfig(GenerationConfig):
    fault: NotRequired[str]


class DoublePolicyConfig(PolicyConfig):
    pass


class DoubleGeneration(GenerationBackend):
    """Tokens are drawn from each row's seed (greedy: counted up); log-probs are ``-weight``.

    ``fault`` makes it break one promise.
    """

    def __init__(self, model_name: str, **config: Any) -> None:
        if model_name == "missing":
            raise ConfigError("no model at 'missing'", fix="make one", key="model_name")
        self.weight = torch.ones(8)
        self.fault = config.get("fault")
        self.environment = os.environ.get("DOUBLE_SETTING", "")
        super().__init__(config, ModelFacts(PAD, (EOS,), VOCAB, CONTEXT))
        if self.fault == "no facts":
            del self.facts

    def complete(self, prompts: Any, sampling: Any) -> Iterator[Completion]:
        for row in range(len(prompts)):
            ids = prompts.token_ids(row)
            self._fail(ids)
            yield self._completion(row, ids, prompts, sampling)

    def _completion(self, row: int, ids: list[int], prompts: Any, sampling: Any) -> Completion:
        if sampling.greedy:
            new = [(ids[-1] + i) % 900 for i in range(1, CONTEXT)]
        else:
            generator = torch.Generator().manual_seed(int(prompts.seeds[row]))
            new = torch.randint(2, 900, (len(ids),), generator=generator).tolist()
        slack = {"overrun": 1, "early": -1}.get(self.fault or "", 0)
        new = new[: int(prompts.budgets[row]) + slack]
        logprobs = [-float(self.weight[0])] * len(new)
        if self.fault == "drift":
            logprobs[0] -= 1.0
        if self.fault == "other token":
            new[0] += 5
        return Completion(row, new, logprobs, self.fault != "unmarked")

    def _fail(self, ids: list[int]) -> None:
        if RAISE_FOREIGN in ids:
            from only_in_workers import EngineError

            raise EngineError(object(), "the engine is on fire")
        if RAISE_DATA in ids:
            raise DataError("row 7: a bad row", fix="mend it", row=7)
        if EXIT in ids:
            os._exit(3)

    def weight_sink(self) -> WeightSink:
        return NamedTensorSink({"weight": self.weight})

    def on_wake(self, tags: frozenset[str]) -> None:
        pass

    def on_sleep(self, tags: frozenset[str]) -> None:
        pass

    def on_shutdown(self) -> None:
        pass


class DoublePolicy(PolicyRefits):
    """Scores ``-token``; training reports which rows a worker saw, and who it is."""

    def __init__(self, worker: WorkerContext | None, config: Mapping[str, Any]) -> None:
        super().__init__(worker)
        self.config = config
        self.weight = torch.full((8,), 3.0)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, worker: WorkerContext | None = None) -> Self:
        return cls(worker, config)

    def weight_source(self) -> WeightSource:
        return NamedTensorSource({"weight": self.weight})

    def get_logprobs(
        self, data: Any, micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        return BatchedDataDict({"logprobs": -data["input_ids"].float()})

    def get_reference_policy_logprobs(
        self, data: Any, micro_batch_size: int | None = None, timer: Any = None
    ) -> Any:
        return BatchedDataDict({"reference_logprobs": -data["input_ids"].float()})

    def train(
        self,
        data: Any,
        loss_fn: LossFunction,
        eval_mode: bool = False,
        *,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        assert self.worker is not None
        with open(f"{self.config['model_name']}/rank{self.worker.rank}", "w") as file:
            print(data["input_ids"][:, 0].tolist(), data["sample_mask"].tolist(), gbs, file=file)
        return {"loss": 0.5, "rank": self.worker.rank, "world_size": self.worker.world_size}

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("no such checkpoint")

    def shutdown(self) -> bool:
        self._sender.close()
        return True


DoublePolicy.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


class PairLoss(LossFunction):
    group_size = 2

    def __call__(self, inputs: Any, data: Any, **counts: Any) -> Any:
        raise NotImplementedError


# -- in the driver ---------------------------------------------------------------------------------

CONFIG = {"backend": "double", "model_name": "none", "max_new_tokens": 20}
ENGINE_ERROR = """
class EngineError(RuntimeError):
    def __init__(self, handle, text):
        super().__init__(text)
        self.handle = handle
"""


def manifest_in(folder: Path) -> Any:
    """The double's manifest; its workers find the double, and an engine that is not here."""
    installed, engine = folder / "site", folder / "engine"
    info = installed / "rl_double-1.0.dist-info"
    for made in (info, engine):
        made.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rl-double\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[rl_core.backends]\ndouble=cluster_doubles:BACKEND\n")
    (engine / "only_in_workers.py").write_text(ENGINE_ERROR)
    given = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join(map(str, [Path(__file__).parent, installed, engine, *given]))
    return replace(BACKEND, environment={"PYTHONPATH": path, "DOUBLE_SETTING": "from manifest"})


def pids(backend: Any) -> list[int]:
    """Of the workers of a remote backend."""
    return [place["pid"] for place in backend._group.places]


def stop(process: int) -> None:
    """Stops all of its threads: one that runs on may answer still."""
    os.kill(process, signal.SIGSTOP)
    end = time.monotonic() + 60
    threads = Path(f"/proc/{process}/task")
    while any(
        (one / "stat").read_text().rpartition(")")[2].split()[0] != "T" for one in threads.iterdir()
    ):
        assert time.monotonic() < end, "it does not stop"
        time.sleep(0.01)


def wait_until_gone(processes: list[int]) -> None:
    end = time.monotonic() + 60
    while any(map(_alive, processes)):
        assert time.monotonic() < end, "processes are left behind"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
