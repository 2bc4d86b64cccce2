"""TensorBoard, W&B and MLflow, each imported only if the configuration names it."""

from __future__ import annotations

import importlib
import json
import re
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rl_core.errors import ConfigError
from rl_train.lines import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["Trackers"]


class _Tracker:
    """One that is open. ``id`` is what it calls the run, ``place`` where a person finds it."""

    id: str
    place: str
    #: Whether it can take back the figures beyond a step.
    rewinds = False

    def __init__(self, trackers: Trackers, known: str | None) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def rewind(self, step: int) -> None: ...
    def close(self, failed: bool) -> None: ...


class _TensorBoard(_Tracker):
    rewinds = True

    def __init__(self, trackers: Trackers, known: str | None) -> None:
        name = "torch.utils.tensorboard" if find_spec("tensorboard") else "tensorboardX"
        self._open: Callable[..., Any] = importlib.import_module(name).SummaryWriter
        self.id = self.place = str(trackers.folder / "tensorboard")
        self._writer = self._open(self.place)
        if known is None:
            settings = json.dumps(trackers.settings, indent=2).replace("\n", "\n    ")
            self._writer.add_text("settings", f"    {settings}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in _in_groups(metrics).items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._writer = self._open(self.place, purge_step=step + 1)

    def close(self, failed: bool) -> None:
        self._writer.close()


class _WandB(_Tracker):
    def __init__(self, trackers: Trackers, known: str | None) -> None:
        import wandb

        self._run = wandb.init(
            project=trackers.project,
            name=trackers.run_name,
            id=known,
            resume="allow",
            dir=trackers.folder,
            config=trackers.settings,
            allow_val_change=True,
        )
        self.id = self._run.id
        self.place = self._run.url or self._run.dir

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(_in_groups(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


class _MLflow(_Tracker):
    def __init__(self, trackers: Trackers, known: str | None) -> None:
        from mlflow import MlflowClient, get_tracking_uri

        self._client, name = MlflowClient(), trackers.project
        self.place = f"experiment {name!r} at {get_tracking_uri()}"
        if known is not None:
            self.id = known
            self._client.update_run(known, status="RUNNING")
            return
        found = self._client.get_experiment_by_name(name)
        where = found.experiment_id if found else self._client.create_experiment(name)
        self.id = self._client.create_run(where, run_name=trackers.run_name).info.run_id
        self._client.log_dict(self.id, trackers.settings, "settings.json")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric
        from mlflow.utils.time import get_current_time_millis

        # MLflow has other characters in names than ours.
        named = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        now = get_current_time_millis()
        self._client.log_batch(self.id, [Metric(n, float(v), now, step) for n, v in named.items()])

    def close(self, failed: bool) -> None:
        self._client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")


#: The class of each, and modules one of which it needs.
_KNOWN: dict[str, tuple[type[_Tracker], tuple[str, ...]]] = {
    "tensorboard": (_TensorBoard, ("tensorboard", "tensorboardX")),
    "wandb": (_WandB, ("wandb",)),
    "mlflow": (_MLflow, ("mlflow",)),
}


class Trackers:
    """The trackers of a run. One that fails is left out from then on, and the run goes on.

    ``trackers.json`` in the folder has what each calls the run, so that a run that is resumed goes
    on there, and ``through``: the step up to which W&B and MLflow have figures already, which they
    do not get a second time.

    Raises:
        ConfigError: One is not installed, or (in ``open``) does not start.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        folder: Path,
        settings: dict[str, Any],
        note: Callable[[str], None],
    ) -> None:
        self.folder, self.settings, self._note = folder, settings, note
        self.project = config.get("project", "rl-train")
        self.run_name = config.get("run_name", folder.resolve().name)
        self._names, self._file = (
            list(dict.fromkeys(config.get("to", []))),
            folder / "trackers.json",
        )
        self._opened: dict[str, _Tracker] = {}
        self._kept: dict[str, Any] = {}
        for name in self._names:
            if not any(map(find_spec, _KNOWN[name][1])):
                raise ConfigError(
                    f"log.to has {name!r}, which is not installed",
                    fix=f"pip install {name}",
                    key="log.to",
                )

    def open(self) -> None:
        """Starts them, or goes on with the runs that the folder has."""
        if self._names and self._file.exists():
            self._kept = json.loads(self._file.read_text(encoding="utf-8"))
        for name in self._names:
            try:
                self._opened[name] = _KNOWN[name][0](self, self._kept.get(name))
            except Exception as error:
                self.close(failed=True)
                raise ConfigError(
                    f"log.to has {name!r}, which does not start: {error}",
                    fix=f"correct its settings, or remove it from log.to; if the run was deleted "
                    f"there, delete {self._file} to begin a new one",
                    key="log.to",
                ) from error
            self._kept[name] = self._opened[name].id
            self._save()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Sends the figures of a step; those that are not finite are not for trackers."""
        for name, tracker in list(self._opened.items()):
            if tracker.rewinds or step > self._kept.get("through", -1):
                self._try(name, tracker.log, step, metrics)

    def rewind(self, step: int, last: int) -> None:
        """Takes the figures beyond a step back, or else remembers that ``last`` was sent."""
        for name, tracker in list(self._opened.items()):
            self._try(name, tracker.rewind, step)
        if self._opened and last > step:
            self._kept["through"] = max(last, self._kept.get("through", -1))
            self._save()

    def close(self, failed: bool) -> None:
        """Ends them; ``failed`` is how the run ended."""
        for name, tracker in list(self._opened.items()):
            self._try(name, tracker.close, failed)

    def places(self) -> dict[str, str]:
        """Where a person finds the run in each."""
        return {name: tracker.place for name, tracker in self._opened.items()}

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            del self._opened[name]
            self._note(
                f"warning: {name} failed and gets no more figures of this run; "
                f"{self.folder / 'metrics.jsonl'} has all of them ({type(error).__name__}: {error})"
            )

    def _save(self) -> None:
        replace(self._file, json.dumps(self._kept).encode())


def _in_groups(metrics: Mapping[str, float]) -> dict[str, float]:
    """Names as transformers' callbacks write them: ``train/reward``, ``eval/reward``."""
    return {
        f"eval/{name[5:]}" if name.startswith("eval_") else f"train/{name}": value
        for name, value in metrics.items()
    }
