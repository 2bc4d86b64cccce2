from __future__ import annotations

import io
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rl_core.errors import ConfigError, DataError
from rl_train.curves import plot
from rl_train.lines import LogError, read_metrics
from rl_train.log import LogConfig, RunLog
from rl_train.metrics import generation_metrics

ROW = {
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "completion": "[red]4\x1b[2J",
    "rewards": {"exact": 1.0, "length": None},
    "advantage": 0.5,
    "truncated": True,
}


def screen(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100)


def text_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def log(tmp_path: Path) -> Callable[..., RunLog]:
    def make(config: LogConfig | None = None, **options: Any) -> RunLog:
        made: Any = {"total_steps": 4, "console": screen(), **options}
        return RunLog(tmp_path / "run", {"plot": None, **(config or {})}, **made)

    return make


def test_a_step_is_one_flat_line_of_numbers(log: Callable[..., RunLog], tmp_path: Path) -> None:
    with log() as run:
        run.step(1, {"reward": torch.tensor(0.5), "kl": math.nan, "loss": math.inf, "n": 3})
        line = (tmp_path / "run/metrics.jsonl").read_text()  # flushed, before the run ends
    row = json.loads(line)
    assert line.count("\n") == 1
    assert row.pop("time") > 1.7e9
    assert row == {"step": 1, "reward": 0.5, "kl": None, "loss": None, "n": 3}
    with pytest.raises(ValueError, match="could not convert"), log() as run:
        run.step(2, {"reward": "high"})  # type: ignore[dict-item]


def test_off_a_terminal_a_step_is_one_line_that_grep_finds(log: Callable[..., RunLog]) -> None:
    console = screen()
    with log(console=console, total_steps=101) as run:
        figures = {"reward": 0.431, "loss": 0.0123, "kl": 1.2e-4, "logprob_error/max": 3e-6}
        run.step(1, {**figures, "step_time": 4.1})
        run.evaluation(1, {"reward": 0.5, "eval_pass@1": 0.25, "completions/mean_length": 7})
        run.completions(1, [ROW])
        run.note("checkpoint: [a]/b")
    assert text_of(console).splitlines() == [
        "step 1/101  reward 0.431  loss 0.0123  kl 1.2e-04  logprob_error 3.0e-06  4.1 s  ETA 6:50",
        "eval 1/101  eval_reward 0.5  eval_pass@1 0.25",
        "checkpoint: [a]/b",
    ]


def test_completions_are_kept_now_and_then_and_from_all_of_the_step(
    log: Callable[..., RunLog], tmp_path: Path
) -> None:
    with log({"completions": 2, "completions_every": 3}) as run:
        for step in range(1, 7):
            run.completions(step, [{**ROW, "advantage": float(i)} for i in range(8)])
    lines = (tmp_path / "run/completions.jsonl").read_text().splitlines()
    kept = [json.loads(line) for line in lines]
    assert [(row["step"], row["advantage"]) for row in kept] == [
        (step, advantage) for step in (1, 3, 6) for advantage in (0.0, 4.0)
    ]
    assert kept[0] == {"step": 1, **ROW, "advantage": 0.0}


def test_going_back_takes_later_lines_out_of_all_files(
    log: Callable[..., RunLog], tmp_path: Path
) -> None:
    with log({"completions_every": 1}) as run:
        for step in (1, 2, 3):
            run.step(step, {"loss": step})
            run.evaluation(step, {"loss": step})
            run.completions(step, [ROW])
    with log({"completions_every": 1}) as run:
        run.rewind(1)
        run.step(2, {"loss": 20})
    rows = read_metrics(tmp_path / "run")
    assert [row.get("loss", row.get("eval_loss")) for row in rows] == [1, 1, 20]
    assert (tmp_path / "run/completions.jsonl").read_text().count("\n") == 1
    assert sorted(path.suffix for path in (tmp_path / "run").iterdir()) == [".jsonl", ".jsonl"]


KILLED = """
import sys
from rl_train.log import RunLog
with RunLog(sys.argv[1], {}, total_steps=9) as log:
    log.step(1, {"loss": 1.0})
    log.step(2, {"loss": 2.0})
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_after_a_kill_what_is_half_written_is_taken_out(
    log: Callable[..., RunLog], tmp_path: Path
) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path / "run")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, **pipes) as process:
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGKILL)
    path = tmp_path / "run/metrics.jsonl"
    os.truncate(path, path.stat().st_size - 5)  # as a kill within a write leaves it
    assert [row["loss"] for row in read_metrics(path.parent)] == [1.0]
    with log() as run:
        run.step(2, {"loss": 3.0})
    assert [row["loss"] for row in read_metrics(path.parent)] == [1.0, 3.0]


def test_a_full_disk_is_named_and_leaves_no_half_line(
    log: Callable[..., RunLog], tmp_path: Path
) -> None:
    with log() as run:
        run.step(1, {"loss": 1.0})
        path = tmp_path / "run/metrics.jsonl"
        before = path.read_bytes()
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        # The first bytes of a line still fit, as on a disk that is about to be full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, limits[1]))
        try:
            with pytest.raises(LogError, match="File too large") as caught:
                run.step(2, {"loss": 2.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert path.read_bytes() == before
        path.unlink()
        path.symlink_to("/dev/full")
        with pytest.raises(LogError, match=f"{path} cannot be written: No space left") as caught:
            run.step(2, {"loss": 2.0})
        assert "free space under" in str(caught.value)


def test_the_summary_is_of_the_whole_run(log: Callable[..., RunLog]) -> None:
    def figures(step: int) -> dict[str, float]:
        return {
            "reward": [0, 0.1, 0.7, 0.4][step],
            "logprob_error/max": 2e-3 * step,
            "time/generate": 2.0,
            "refit/seconds": 0.5,
            "step_time": 4.0,
            "num_tokens": 100 * step,
        }

    with log() as run:
        run.step(1, figures(1))
        run.step(2, figures(2))
    for tolerance, verdict in ((1e-2, "6.0e-03, within the"), (1e-3, "6.0e-03, ABOVE the")):
        console = screen()
        with log(console=console, tolerance=tolerance) as run:
            run.rewind(2)
            run.step(3, figures(3))
            run.summary()
        shown = " ".join(text_of(console).replace("│", " ").split())
        assert "reward 0.1 0.4 0.7 (step 2)" in shown
        assert verdict in shown
        assert "generate 2, refit 0.5, step_time 4" in shown
        assert "tokens per second 25" in shown


def test_curves_of_one_run_and_of_several(log: Callable[..., RunLog], tmp_path: Path) -> None:
    for name, figure in (("grpo", "reward"), ("sft", "loss")):
        with RunLog(tmp_path / name, {}, total_steps=2, tolerance=0.1, console=screen()) as run:
            for step in (1, 2):
                run.step(step, {figure: step, "logprob_error/max": 0.0, "entropy": math.nan})
            run.evaluation(2, {figure: 1})
        assert (tmp_path / name / "curves.png").read_bytes().startswith(b"\x89PNG")
    plot([tmp_path / "grpo", tmp_path / "sft"], tmp_path / "plots/both.svg", 1e-3)
    assert "<svg" in (tmp_path / "plots/both.svg").read_text()
    with pytest.raises(DataError, match="no figures"):
        plot(tmp_path, tmp_path / "none.png")


def test_figures_of_a_batch_are_those_of_trl() -> None:
    from trl.trainer.utils import nanstd

    draw = random.Random(0)
    each: dict[str, list[float | None]] = {
        "a": [draw.random() for _ in range(8)],
        "b": [None, None, 1.0, 0.0, 1.0, None, None, 1.0],
    }
    each["a"][4:] = [0.5, None, 0.5, 0.5]
    table = torch.tensor([[math.nan if x is None else x for x in one] for one in each.values()])
    total = table.nansum(dim=0)
    total[table.isnan().all(dim=0)] = math.nan
    total[4:] = torch.tensor([1.0, math.nan, 1.0, 1.0])  # equal, but for one without a reward
    lengths, truncated = [5, 9, 1, 4, 9, 9, 2, 3], [False, True, False, False] * 2
    ended = torch.tensor(lengths)[~torch.tensor(truncated)].float()
    stds = nanstd(total.view(-1, 4), dim=1).repeat_interleave(4)
    expected = {
        **{f"rewards/{name}/mean": table[i].nanmean() for i, name in enumerate(each)},
        **{f"rewards/{name}/std": nanstd(table[i]) for i, name in enumerate(each)},
        "reward": total.nanmean(),
        "reward_std": nanstd(total),
        "frac_reward_zero_std": torch.isclose(stds, torch.zeros(8)).float().mean(),
        "completions/mean_length": sum(lengths) / 8,
        "completions/min_length": 1,
        "completions/max_length": 9,
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": ended.mean(),
        "completions/min_terminated_length": ended.min(),
        "completions/max_terminated_length": ended.max(),
    }
    metrics = generation_metrics(each, total.tolist(), 4, lengths, truncated)
    assert metrics == {name: pytest.approx(float(value)) for name, value in expected.items()}
    assert metrics["frac_reward_zero_std"] == 0.5
    none = generation_metrics({"a": [None]}, [None], 1, [3], [True])
    assert math.isnan(none["reward"])
    assert none["completions/mean_terminated_length"] == 0


def test_a_tracker_that_is_not_installed_is_known_before_the_run(
    log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rl_train.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        log({"to": ["wandb"]})


def test_a_tracker_that_does_not_start_is_named_with_what_to_do(
    log: Callable[..., RunLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no route to host")

    monkeypatch.setattr(SummaryWriter, "__init__", fail)
    with pytest.raises(ConfigError, match="'tensorboard', which does not start: no route"):
        log({"to": ["tensorboard"]}).__enter__()


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_has_one_unbroken_run(log: Callable[..., RunLog], tmp_path: Path) -> None:
    with log({"to": ["tensorboard"]}, settings={"lr": 1e-5}) as run:
        for step in (1, 2, 3):
            run.step(step, {"reward": step, "kl": math.nan})
    with log({"to": ["tensorboard"]}) as run:
        run.rewind(1)
        run.step(2, {"reward": 20})
        run.evaluation(2, {"reward": 5})
    assert scalars(tmp_path / "run/tensorboard") == {
        "train/reward": [(1, 1.0), (2, 20.0)],
        "eval/reward": [(2, 5.0)],
    }


def test_a_tracker_that_fails_is_warned_of_once(
    log: Callable[..., RunLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    console = screen()
    with log({"to": ["tensorboard"]}, console=console) as run:
        run.step(1, {"reward": 1})
        monkeypatch.setattr(SummaryWriter, "add_scalar", lambda *_: 1 / 0)
        run.step(2, {"reward": 2})
        run.step(3, {"reward": 3})
    assert text_of(console).count("warning: tensorboard failed") == 1
    assert len(read_metrics(tmp_path / "run")) == 3


def test_mlflow_goes_on_with_its_run(
    log: Callable[..., RunLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    for first in (1, 3):
        with log({"to": ["mlflow"]}, settings={"lr": 1e-5}) as run:
            run.rewind(first - 1 - (first == 3))  # the second process does step 2 again
            for step in range(2 if first == 3 else 1, first + 2):
                run.step(step, {"reward": step, "rewards/<lambda>/mean": step})
    (known,) = mlflow.search_runs(experiment_names=["rl-train"], output_format="list")
    assert known.info.status == "FINISHED"
    history = mlflow.MlflowClient().get_metric_history(known.info.run_id, "reward")
    assert [(one.step, one.value) for one in history] == [(1, 1), (2, 2), (3, 3), (4, 4)]


def test_wandb_goes_on_with_its_run(
    log: Callable[..., RunLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    for step in (1, 2):
        with log({"to": ["wandb"]}, settings={"lr": 1e-5}) as run:
            run.step(step, {"reward": step})
            run.evaluation(step, {"reward": step})
    known = json.loads((tmp_path / "run/trackers.json").read_text())["wandb"]
    written = list((tmp_path / "run/wandb").glob("offline-run-*"))
    assert {path.name.split("-")[-1] for path in written} == {known}
