"""Whole runs of a tiny model: to their end, and through everything that may end them before it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from examples.additions import make_model

import rl_train
from rl_core.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DeadlineError,
    RLError,
)
from rl_hf.generation import HuggingFaceGeneration
from rl_hf.policy import HuggingFacePolicy
from rl_train import GRPOTrainer, Turn, train
from rl_train.backends import Backends
from rl_train.config import check_run, read_config
from rl_train.methods import loss_of
from rl_train.rewards import RewardError
from rl_train.run import _Loop

pytestmark = pytest.mark.xdist_group("rl-train")
ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
#: Figures that are not the same in every run of the same numbers.
_TIMED = ("time", "step_time", "refit/seconds", "refit/gb_per_s")


def last_digit(completions: list[str], **_: Any) -> list[float]:
    """Rewards that differ with the text, of any model."""
    return [sum(map(ord, text)) % 7 / 7 for text in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), seed=0, layers=1)


def configured(model: Path, output: Path, **more: Any) -> dict[str, Any]:
    config = {
        "model": str(model),
        "output": str(output),
        "steps": 4,
        "batch_size": 4,
        "grpo": {"num_generations": 4},
        "policy": {"optimizer": {"lr": 1e-3}, "scheduler": {"name": "linear", "warmup_steps": 1}},
        "generation": {"max_new_tokens": 4},
        "rewards": {"functions": [f"{__file__}:last_digit"], "workers": 0},
        "evaluation": {"every": 2},
        "log": {"plot": None},
    }
    return config | more


def figures(output: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in line.items() if not key.startswith(_TIMED)} for line in lines
    ]


@pytest.fixture(scope="module")
def unbroken(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The figures of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("unbroken")
    outcome = train(configured(model, output), rows=ROWS, eval_rows=ROWS[:4])
    assert (outcome.steps, outcome.stopped) == (4, None)
    assert outcome.checkpoint == output / "checkpoints/step-000004"
    return figures(output)


def test_a_run_learns_and_its_figures_have_the_names_of_trl(
    unbroken: list[dict[str, Any]],
) -> None:
    assert [line["step"] for line in unbroken] == [0, 1, 2, 2, 3, 4, 4]  # with evaluations
    steps = [line for line in unbroken if "loss" in line]
    expected = {"loss", "grad_norm", "learning_rate", "epoch", "num_tokens", "reward", "reward_std"}
    expected |= {"frac_reward_zero_std", "completions/mean_length", "rewards/last_digit/mean"}
    assert expected <= steps[0].keys()
    assert [line["weights_version"] for line in steps] == [1, 2, 3, 4]
    assert max(line["logprob_error/max"] for line in steps) < 1e-4
    assert {"eval_reward", "eval_pass@1"} <= unbroken[0].keys()


@pytest.mark.parametrize("method", ["sft", "dpo"])
def test_dpo_and_sft_lower_their_loss(method: str, model: Path, tmp_path: Path) -> None:
    rows = [
        {**row, "completion": row["answer"], "chosen": row["answer"], "rejected": "9+"}
        for row in ROWS
    ]
    config = configured(model, tmp_path, method=method, steps=8, batch_size=8)
    outcome = train(config, rows=rows, eval_rows=rows[:4])
    assert outcome.evaluations[8]["loss"] < outcome.evaluations[0]["loss"]
    if method == "dpo":
        assert outcome.metrics["rewards/margins"] > 0


def test_advantages_are_checked_before_a_run(model: Path, tmp_path: Path) -> None:
    for wrong, key in (({"name": "gae"}, "name"), ({"weights": [1.0]}, "weights")):
        with pytest.raises(ConfigError) as caught:
            train(configured(model, tmp_path, grpo={"advantages": wrong}), rows=ROWS)
        assert caught.value.details["key"] == f"grpo.advantages.{key}"


_RESUMED = """
import json, os, signal, sys
from rl_train import train
from rl_train.run import _Loop
config, rows, at = json.loads(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
refit = _Loop._refit
def dies(self):
    if self.outcome.steps == at:
        os.kill(os.getpid(), signal.SIGKILL)
    refit(self)
_Loop._refit = dies
train(config, rows=rows, eval_rows=rows[:4])
"""


@pytest.mark.parametrize("at", [2, 3])
def test_a_killed_run_goes_on_to_the_same_numbers(
    at: int, model: Path, tmp_path: Path, unbroken: list[dict[str, Any]]
) -> None:
    config = configured(model, tmp_path, checkpoint={"every": 2})
    given = [sys.executable, "-c", _RESUMED, json.dumps(config), json.dumps(ROWS), str(at)]
    assert subprocess.run(given, timeout=280, capture_output=True).returncode == -signal.SIGKILL
    if at == 2:  # before there was a checkpoint
        assert not list(tmp_path.glob("checkpoints/step-*"))
    config["checkpoint"]["resume"] = "auto"
    outcome = train(config, rows=ROWS, eval_rows=ROWS[:4])
    assert outcome.steps == 4
    assert figures(tmp_path) == unbroken


def test_an_engine_that_dies_is_replaced_and_the_numbers_stay(
    model: Path, tmp_path: Path, unbroken: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process is killed before a step generates, and before a refit."""
    started, kills = [], {1: "generate", 3: "refit"}
    start_engine, refit, state = Backends.start_engine, Backends.refit, _Loop._state

    def start(self: Backends) -> None:
        start_engine(self)
        started.append(self)

    def kill(self: Backends, what: str, step: int) -> None:
        if kills.get(step) == what:
            del kills[step]
            for child in psutil.Process().children(recursive=True):  # the engine's, and no other
                child.kill()

    def snapshot(self: _Loop) -> dict[str, Any]:
        kill(self.study.backends, "generate", self.outcome.steps)
        return state(self)

    def refits(self: Backends, version: int) -> Any:
        kill(self, "refit", version - 1)
        return refit(self, version)

    monkeypatch.setattr(Backends, "start_engine", start)
    monkeypatch.setattr(Backends, "refit", refits)
    monkeypatch.setattr(_Loop, "_state", snapshot)
    place = {"generation": {"where": "local"}}
    train(configured(model, tmp_path, placement=place), rows=ROWS, eval_rows=ROWS[:4])
    assert len(started) == 3
    assert figures(tmp_path) == unbroken


def test_ctrl_c_saves_and_says_how_to_go_on(
    model: Path, tmp_path: Path, unbroken: list[dict[str, Any]]
) -> None:
    file = tmp_path / "run.yaml"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    config = configured(model, tmp_path / "out", data={"path": str(data)}, steps=400)
    file.write_text(json.dumps(config))
    given = [sys.executable, "-m", "rl_cli", "train", str(file)]
    with subprocess.Popen(given, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        for line in run.stderr:
            if line.startswith("step 2/"):
                run.send_signal(signal.SIGINT)
                break
        rest = run.stderr.read()
    assert run.returncode == 130, rest
    assert "to continue, run it again with checkpoint.resume=auto" in rest
    assert "Traceback" not in rest
    assert list(tmp_path.glob("out/checkpoints/step-*/run.json"))


def test_a_full_disk_ends_the_run_and_names_the_newest_checkpoint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = HuggingFacePolicy.save_checkpoint

    def full(self: Any, path: str) -> None:
        if "000004" in path:
            raise OSError(28, "No space left on device")
        save(self, path)

    monkeypatch.setattr(HuggingFacePolicy, "save_checkpoint", full)
    with pytest.raises(CheckpointError, match="No space left") as caught:
        train(configured(model, tmp_path, checkpoint={"every": 2}), rows=ROWS)
    assert "step-000002" in str(caught.value)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]


def test_a_reward_that_fails_loses_no_step(
    model: Path, tmp_path: Path, unbroken: list[dict[str, Any]]
) -> None:
    calls = []

    def last_digit_once_broken(completions: list[str], **_: Any) -> list[float]:
        calls.append(None)
        if len(calls) == 3:
            raise KeyError("no such answer")
        return last_digit(completions)

    last_digit_once_broken.__name__ = "last_digit"
    config = configured(model, tmp_path)
    config["rewards"] = {}
    with pytest.raises(RLError, match="no such answer"):
        train(config, rows=ROWS, eval_rows=ROWS[:4], rewards=[last_digit_once_broken])
    config["checkpoint"] = {"resume": "auto"}
    again = train(config, rows=ROWS, eval_rows=ROWS[:4], rewards=[last_digit_once_broken])
    assert again.steps == 4
    assert figures(tmp_path) == unbroken


def test_a_step_that_fails_amid_training_is_not_done_again_and_not_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of its updates may be in the weights."""
    calls, learn = [], HuggingFacePolicy.train

    def fails(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        done = learn(self, *args, **kwargs)
        if len(calls) == 2:
            raise DeadlineError("a rank did not answer")
        return done

    monkeypatch.setattr(HuggingFacePolicy, "train", fails)
    with pytest.raises(DeadlineError, match="did not answer"):
        train(configured(model, tmp_path), rows=ROWS)
    assert len(calls) == 2
    assert not list(tmp_path.glob("checkpoints/*"))


def test_only_the_newest_checkpoints_are_kept(model: Path, tmp_path: Path) -> None:
    train(configured(model, tmp_path, checkpoint={"every": 1, "keep": 2}), rows=ROWS)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step-000003", "step-000004"]
    with pytest.raises(ConfigError, match="has checkpoints of a run"):
        train(configured(model, tmp_path), rows=ROWS)
    with pytest.raises(ConfigError, match="another configuration: batch_size was 4, is 2"):
        train(configured(model, tmp_path, batch_size=2, checkpoint={"resume": "auto"}), rows=ROWS)


def test_prompts_of_equal_rewards_are_drawn_anew(model: Path, tmp_path: Path) -> None:
    def by_prompt(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
        return [
            0.0 if p[0] in "012" else sum(map(ord, c)) % 7
            for p, c in zip(prompts, completions, strict=True)
        ]

    config = configured(model, tmp_path, steps=2)
    config["grpo"] |= {"equal_rewards": "redraw", "max_redraws": 8}
    config["rewards"] = {}
    outcome = train(config, rows=ROWS, rewards=[by_prompt])
    assert outcome.metrics["groups/redrawn"] > 0
    assert outcome.metrics["frac_reward_zero_std"] == 0


class Counts:
    """Answers each turn with the number of the turn, and stops after the given number."""

    def __init__(self, turns: int = 3) -> None:
        self.turns, self.seen = turns, []

    def step(self, completion: str, row: Any) -> Turn:
        self.seen.append(completion)
        if len(self.seen) == self.turns:
            return Turn(done=True, reward=float(len(completion)))
        return Turn(messages=str(len(self.seen)), reward=0.5)


def test_turns_are_appended_as_tokens_and_only_the_models_count(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = []
    learn = rl_train.methods.learn_step
    monkeypatch.setattr(
        rl_train.methods, "learn_step", lambda s, b, t: (batches.append(b), learn(s, b, t))[1]
    )
    config = configured(model, tmp_path, steps=1)
    del config["rewards"]
    config["environment"] = {"function": f"{__file__}:Counts", "options": {"turns": 3}}
    config["generation"] |= {"max_model_len": 40}
    outcome = train(config, rows=ROWS)
    assert outcome.metrics["logprob_error/max"] < 1e-4  # the trainer reads what was sampled
    (batch,) = batches
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    one, two = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in "12")
    several = 0
    for ids, mask, length in zip(
        batch["input_ids"].tolist(),
        batch["token_mask"].tolist(),
        batch["input_lengths"].tolist(),
        strict=True,
    ):
        learned = [i for i in range(length) if mask[i]]
        between = [ids[i] for i in range(learned[0], learned[-1]) if not mask[i]]
        assert between in ([], one, [*one, *two])
        several += len(between) == 2
    assert several > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["stepps=3"], ["unknown key 'stepps'", "'steps'", "argument stepps=3"]),
        (["policy.optimizer.lrr=1"], ["'lr'", "argument policy.optimizer.lrr=1"]),
        (["generation.backend=vllmm"], ["vllmm"]),
        (["batch_size=0"], ["must be >= 1", "argument batch_size=0"]),
        (["grpo.updates=3"], ["which 3 updates do not divide"]),
        (["method=ppo"], ["'grpo', 'dpo' or 'sft'"]),
        (["checkpoint.resume"], ["not a key=value"]),
    ],
)
def test_mistakes_name_the_argument(
    arguments: list[str], words: list[str], model: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {model}\nbatch_size: 4\nrewards: [exact]\n")
    with pytest.raises(RLError) as caught:
        check_run(*read_config(file, arguments))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"model": object()}, "save it and its tokenizer with save_pretrained"),
        ({"args": object()}, "args is a object, not a dict"),
        ({"args": {"learning_rate": 1e-3}}, "policy: {optimizer: {lr: ...}}"),
        ({"max_steps": 4}, "write 'steps' instead"),
    ],
)
def test_a_trainer_refuses_what_is_of_trl_where_it_is_made(
    more: dict[str, Any], words: str, model: Path
) -> None:
    given: dict[str, Any] = {"model": model, "reward_funcs": last_digit, "train_dataset": ROWS}
    with pytest.raises(ConfigError, match=re.escape(words)):
        GRPOTrainer(**{**given, **more})


def test_a_trainer_takes_and_resumes_what_that_of_trl_does(model: Path, tmp_path: Path) -> None:
    args = {"output": str(tmp_path), "grpo.num_generations": 2, "generation.max_new_tokens": 3}
    outcomes = []
    for steps in (1, 2):
        trainer = GRPOTrainer(
            model=str(model),
            reward_funcs=last_digit,
            train_dataset=ROWS,
            args={**args, "log.plot": None, "steps": steps},
        )
        outcomes.append(trainer.train(resume_from_checkpoint=steps == 2))
    assert [outcome.steps for outcome in outcomes] == [1, 2]
    assert "loss" in outcomes[1].metrics


def test_a_step_without_any_reward_in_time_ends_the_run(model: Path, tmp_path: Path) -> None:
    def late(completions: list[str]) -> list[float]:
        time.sleep(0.5)
        return [1.0] * len(completions)

    config = configured(model, tmp_path / "out")
    config["rewards"] = {"deadline_s": 0.1}
    with pytest.raises(RewardError, match="every call of the reward functions"):
        train(config, rows=ROWS, rewards=[late])


def test_mistakes_name_the_line_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\npolicy:\n  optimizer:\n    learning_rat: 1e-3\nsteps: many\n")
    given, origins = read_config(file)
    with pytest.raises(ConfigError, match=r"run.yaml, line 5"):
        check_run(given, origins)
    given["steps"] = 3
    with pytest.raises(ConfigError, match=r"run.yaml, line 4"):
        check_run(given, origins)


def test_numbers_that_yaml_reads_as_text_elsewhere_are_numbers(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model: m\nrate: 1e-3\noutput: runs/${model}\n")
    given, _ = read_config(file, ["policy.optimizer.lr=1e-6"])
    assert given["rate"] == 1e-3
    assert given["policy"]["optimizer"]["lr"] == 1e-6
    assert given["output"] == "runs/m"


@pytest.mark.parametrize(
    "file",
    sorted((Path(__file__).parents[3] / "examples/train").glob("*.yaml")),
    ids=lambda f: f.stem,
)
def test_the_examples_are_configured_rightly(file: Path) -> None:
    loss_of(check_run(*read_config(file)))


# -- what may go wrong amid a run ------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4])
def test_an_evaluation_generates_as_many_rows_at_a_time_as_a_step(
    batch_size: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, evaluated = [], {}
    generate = HuggingFaceGeneration.generate

    def counted(self: Any, data: Any, greedy: bool = False) -> Any:
        sizes.append(len(data["input_ids"]))
        return generate(self, data, greedy)

    monkeypatch.setattr(HuggingFaceGeneration, "generate", counted)
    more: Any = {"steps": 1, "grpo": {"num_generations": 4}, "evaluation": {"samples": 2}}
    for size in (batch_size, 36):
        output = tmp_path / str(size)
        config = configured(model, output, batch_size=size, **more)
        evaluated[size] = train(config, rows=ROWS, eval_rows=ROWS[:9]).evaluations[0]
        if size == batch_size:
            assert max(sizes) == 4 * size
    assert evaluated[batch_size] == evaluated[36]


_LOCKS = """
import sys
from rl_train import train
def waits(completions, **_):
    print("ready", flush=True)
    sys.stdin.read()
train(eval(sys.argv[1]), rows=eval(sys.argv[2]), rewards=[waits])
"""


def test_a_run_that_cannot_start_leaves_no_folder(model: Path, tmp_path: Path) -> None:
    with pytest.raises(RLError, match="column"):
        train(configured(model, tmp_path / "new"), rows=[{"other": "1"}], rewards=[last_digit])
    assert not (tmp_path / "new").exists()


def test_a_second_run_in_the_same_folder_is_refused(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path)
    given = [sys.executable, "-c", _LOCKS, repr(config | {"rewards": {}}), repr(ROWS)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(given, stderr=subprocess.DEVNULL, **pipes) as other:
        assert other.stdout.readline() == b"ready\n"
        for resume in ("never", "auto"):
            with pytest.raises(ConfigError, match=f"another run writes to {tmp_path}"):
                train(config | {"checkpoint": {"resume": resume}}, rows=ROWS)
        other.kill()
    assert train(config, rows=ROWS).steps == 4


def test_a_second_signal_ends_a_run_at_once(model: Path, tmp_path: Path) -> None:
    config = configured(model, tmp_path, rewards={"workers": 0, "deadline_s": 600})
    given = [sys.executable, "-c", _LOCKS, repr(config), repr(ROWS)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    for number, code in ((signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 143)):
        with subprocess.Popen(given, **pipes) as run:
            assert run.stdout.readline() == b"ready\n"
            run.send_signal(number)
            for line in run.stderr:
                if b"a second signal ends it at once" in line:
                    run.send_signal(number)
                    break
            run.stderr.read()
        assert run.returncode == code
        assert not list(tmp_path.glob("checkpoints/*"))


def test_sigterm_amid_a_save_lets_it_end(
    model: Path, tmp_path: Path, unbroken: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    save = HuggingFacePolicy.save_checkpoint

    def interrupted(self: Any, path: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        save(self, path)

    (tmp_path / "checkpoints/.step-000001.partial/policy").mkdir(parents=True)  # of one killed
    with monkeypatch.context() as patched:
        patched.setattr(HuggingFacePolicy, "save_checkpoint", interrupted)
        config = configured(model, tmp_path, checkpoint={"every": 2})
        outcome = train(config, rows=ROWS, eval_rows=ROWS[:4])
    assert (outcome.steps, outcome.stopped) == (2, "SIGTERM")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000002"]
    config["checkpoint"]["resume"] = "auto"
    train(config, rows=ROWS, eval_rows=ROWS[:4])
    assert figures(tmp_path) == unbroken


def test_a_run_goes_on_with_the_same_data_and_configuration_alone(
    model: Path, tmp_path: Path
) -> None:
    config = configured(model, tmp_path, steps=2, checkpoint={"every": 1, "resume": "auto"})
    config["policy"] = {}  # a schedule follows from the number of steps
    train(config, rows=ROWS)
    changed = [{**ROWS[0], "answer": "5"}, *ROWS[1:]]
    with pytest.raises(
        ConfigError, match=r"rows of data differ from those with which .*step-000002"
    ):
        train(config, rows=changed)
    with pytest.raises(ConfigError, match="rows of data differ"):
        train(config, rows=ROWS[1:])
    other = make_model(tmp_path / "other", seed=1, layers=1)
    for key, value, words in (
        ("seed", 1, "policy.seed was 0, is 1; seed was 0, is 1"),
        ("model", str(other), f"model was '{model}', is '{other}'"),
    ):
        with pytest.raises(ConfigError, match=words):
            train(config | {key: value}, rows=ROWS)
    config["checkpoint"]["resume"] = str(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="not a checkpoint of a run"):
        train(config, rows=ROWS)
    # Going back to an earlier one makes the later ones another run's.
    config["checkpoint"] = {"every": 0, "resume": str(tmp_path / "checkpoints/step-000001")}
    assert train(config | {"steps": 3}, rows=ROWS).steps == 3
    there = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert there == ["step-000001", "step-000002.before", "step-000003"]


LONG = [{"prompt": "1+" * 40 + "1=", "completion": "2"}]
SHORT = [{"prompt": "1+1=", "completion": "2"}] * 8


@pytest.mark.parametrize("method", ["grpo", "sft"])
def test_rows_that_are_longer_than_the_context_are_left_out_and_counted(
    method: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model's context is 64; without this the step with such a row would fail, each time."""
    config = configured(model, tmp_path, method=method, steps=3)
    train(config, rows=[*LONG, *SHORT], eval_rows=[*SHORT[:2], *LONG])
    assert "8 rows (1 more are too long and left out)" in capsys.readouterr().err
    config |= {"data": {"long_prompts": "error"}, "output": str(tmp_path / "other")}
    with pytest.raises(DataError, match=r"row 0: the row needs \d+ tokens, .* context is 64 .1 of"):
        train(config, rows=[*LONG, *SHORT])
    if method == "grpo":
        config["data"]["long_prompts"] = "cut"
        assert train(config, rows=[*LONG, *SHORT]).steps == 3


def test_prompts_that_are_never_of_use_end_the_run_with_what_to_do(
    model: Path, tmp_path: Path
) -> None:
    calls = []

    def equal(completions: list[str], **_: Any) -> list[float]:
        calls.append(None)
        return [0.5] * len(completions)

    config = configured(model, tmp_path, rewards={}, batch_size=1)
    config["grpo"] |= {"equal_rewards": "redraw", "max_redraws": 2}
    with pytest.raises(RewardError, match=r"same reward, for each of 3 prompts.*have 0\.5"):
        train(config, rows=ROWS, rewards=[equal])
    assert len(calls) == 3


def test_without_rows_there_is_no_evaluation_and_an_empty_file_is_an_error(
    model: Path, tmp_path: Path
) -> None:
    config = configured(model, tmp_path, steps=1, batch_size=1)
    assert train(config, rows=ROWS, eval_rows=[]).evaluations == {}
    (tmp_path / "none.jsonl").write_text("")
    config["evaluation"] = {"data": {"path": str(tmp_path / "none.jsonl")}}
    with pytest.raises(DataError, match=r"none\.jsonl has no rows"):
        train(config | {"output": str(tmp_path / "other")}, rows=ROWS)


class Misbehaves:
    """An environment that does what it is configured to."""

    def __init__(self, how: str) -> None:
        self.how = how

    def step(self, completion: str, row: Any) -> Any:
        if self.how == "raises":
            raise KeyError("no such tool")
        if self.how == "hangs" and row["answer"] == "0":
            threading.Event().wait()
        replies = {"long": Turn("1" * 100), "nan": Turn(reward=float("nan")), "none": None}
        return replies.get(self.how, Turn(done=True, reward=1.0))


def played(model: Path, output: Path, how: str, *, deadline_s: float = 60.0, **more: Any) -> Any:
    config = configured(model, output, steps=1, batch_size=36, **more)
    del config["rewards"]
    environment = {
        "function": f"{__file__}:Misbehaves",
        "options": {"how": how},
        "deadline_s": deadline_s,
    }
    return train(config | {"environment": environment}, rows=ROWS, eval_rows=ROWS[:2])


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "environment failed in turn 1 .*KeyError: 'no such tool'"),
        ("none", "returned None, not rl_train.Turn"),
        ("nan", "reward nan, which is not finite"),
    ],
)
def test_an_environment_that_fails_is_an_error_of_the_step(
    how: str, words: str, model: Path, tmp_path: Path
) -> None:
    with pytest.raises(RewardError, match=words):
        played(model, tmp_path, how)


@pytest.mark.filterwarnings("ignore:for every prompt, the rewards:rl_core.LoopWarning")
def test_an_environment_that_never_ends_costs_its_episode(model: Path, tmp_path: Path) -> None:
    from patience import enough_for  # not at the top: workers import this file for its rewards

    seconds = enough_for(lambda: played(model, tmp_path / "well", "well"), least=0.5, times=1.0)
    metrics = played(model, tmp_path / "hangs", "hangs", deadline_s=seconds).metrics
    assert metrics["rewards/timed_out"] == 4  # the completions of one prompt
    assert metrics["reward"] == pytest.approx(35 / 36)


@pytest.mark.filterwarnings("ignore:for every prompt, the rewards:rl_core.LoopWarning")
def test_a_reply_that_is_too_long_ends_the_episode(model: Path, tmp_path: Path) -> None:
    metrics = played(model, tmp_path, "long").metrics
    assert metrics["completions/clipped_ratio"] == 1
    assert metrics["completions/max_length"] <= 4


@pytest.mark.parametrize(
    "key", ["generation.num_generations", "policy.num_samples", "generation.n"]
)
def test_completions_per_prompt_have_one_key(key: str, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"set grpo\.num_generations instead"):
        check_run(*read_config(None, [f"model={model}", f"{key}=4"]))
    given, origins = read_config(None, [f"model={model}", "grpo.num_samples=4"])
    with pytest.raises(ConfigError, match="write 'num_generations' instead of 'num_samples'"):
        check_run(given, origins)


def test_a_cluster_that_is_not_installed_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rl_ray", None)
    config = configured(model, tmp_path, placement={"policy": {"where": "ray"}})
    with pytest.raises(ConfigError, match="install rl-ray"):
        train(config, rows=ROWS)
